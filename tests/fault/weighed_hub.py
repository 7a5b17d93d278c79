"""``omni`` as in ``counted_hub``, which also writes down now and then what its memory is made of.

A line of JSON in the file ``weights`` of its folder: at the minutes in ``WEIGHED_AT``, with the allocations of Python
by line of code if ``WEIGHED_DEEPLY`` is set. Both are for tests; the latter doubles what Python holds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Final

from omni_discovery.commands.main import main
from tests.fault.counted_hub import tell_tasks

_STATUS: Final = ("VmRSS", "RssAnon", "RssFile", "RssShmem")
#: The fields of glibc's ``struct mallinfo2``, which is summed over all of its arenas.
_MALLINFO: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)")
_MOST: Final = 40


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def _malloc() -> dict[str, int]:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return {name: getattr(info, name) for name in ("arena", "hblkhd", "uordblks", "fordblks")}


def _mappings() -> dict[str, int]:
    """Resident KiB by kind of mapping: glibc's main heap, other anonymous memory, and pages of files."""
    kinds, kind = Counter[str](), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _MAPPING.fullmatch(line):
            name = found[1]
            kind = name if name.startswith("[") else Path(name).name.split(".")[0] if name else "anonymous"
        elif line.startswith("Rss:"):
            kinds[kind] += int(line.split()[1])
    return dict(kinds.most_common(12))


def _weight(*, deeply: bool) -> dict[str, object]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found: dict[str, object] = {
        "status_kib": {name: int(status[name].split()[0]) for name in _STATUS},
        "malloc": _malloc(),
        "mappings_kib": _mappings(),
        "blocks": sys.getallocatedblocks(),
        "collector": {"counts": gc.get_count(), "generations": gc.get_stats()},
        "modules": len(sys.modules),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }
    if deeply:
        gc.collect()
        types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
        found["types"] = dict(types.most_common(400))
        found["traced"] = tracemalloc.get_traced_memory()[0]
    return found


def _keep_weighing(minutes: list[float], *, deeply: bool) -> None:
    began_s, first = time.monotonic(), None
    ignored = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    for minute in minutes:
        time.sleep(max(0.0, began_s + 60.0 * minute - time.monotonic()))
        found = {"minute": minute, "pid": os.getpid(), **_weight(deeply=deeply)}
        if deeply:
            snapshot = tracemalloc.take_snapshot().filter_traces(ignored)
            if first is not None:
                grown = snapshot.compare_to(first, "lineno")[:_MOST]
                found["grown"] = [(str(each.traceback), each.size_diff, each.count_diff) for each in grown]
            first = first or snapshot
        with Path("weights").open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    is_deep = bool(os.environ.get("WEIGHED_DEEPLY"))
    if is_deep:
        tracemalloc.start()
    at = [float(each) for each in os.environ.get("WEIGHED_AT", "1,3,6,10,15,20,25,29").split(",")]
    threading.Thread(target=tell_tasks, daemon=True).start()
    threading.Thread(target=_keep_weighing, args=(at,), kwargs={"deeply": is_deep}, daemon=True).start()
    sys.exit(main())
