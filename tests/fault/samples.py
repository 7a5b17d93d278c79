"""What the processes of a site hold, looked at again and again: memory, files, sockets, threads, tasks, keys."""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stage_runtime.demo.processes import alive
from tests.fault.flat import Fit, fit
from tests.fault.site import NAMESPACE, Site

_SITE: Final = "site"
_STATUS: Final = {"VmRSS:": ("memory", 1024.0), "Threads:": ("threads", 1.0)}


class Samples:
    """Taken every ``every_s`` in a thread of its own between ``__enter__`` and ``__exit__``."""

    def __init__(self, site: Site, every_s: float) -> None:
        self._site = site
        self._every_s = every_s
        #: Moments and values by process id, or 0 for the site, and resource.
        self.points: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        #: Who a process is: replicas are known by their records.
        self.names: dict[int, str] = {0: _SITE}
        #: Which tasks a hub had last: how many of each coroutine function.
        self._tasks: dict[int, dict[str, int]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def fits(self, from_s: float, least_span_s: float) -> list[Fit]:
        """The lines of all series behind ``from_s``, of those that are long enough."""
        found = []
        for (pid, what), points in sorted(self.points.items(), key=lambda each: (self._name(each[0][0]), each[0])):
            behind = [point for point in points if point[0] >= from_s]
            if line := fit(self._name(pid), what, behind, least_span_s):
                found.append(line)
        return found

    def tasks(self) -> dict[str, dict[str, int]]:
        """What each hub's tasks were at its last look: how many of each coroutine function."""
        return {f"{self._name(pid)}, process {pid}": dict(sorted(found.items())) for pid, found in self._tasks.items()}

    def as_built_in(self, began_s: float) -> list[dict[str, object]]:
        """All series, with moments counted from ``began_s``, as JSON has them."""
        return [
            {
                "who": self._name(pid),
                "pid": pid,
                "what": what,
                "points": [[round(at_s - began_s, 1), v] for at_s, v in ps],
            }
            for (pid, what), ps in self.points.items()
        ]

    def _name(self, pid: int) -> str:
        return self.names.get(pid, f"process {pid}")

    def _keep_looking(self) -> None:
        while not self._end.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        hubs = {hub.process.pid: name for name, hub in list(self._site.hubs.items())}
        supervisors = list(self._site.supervisors.items())
        trees = {child.process.pid: child.tree() for _, child in supervisors}
        self.names |= {pid: f"hub {name}" for pid, name in hubs.items()}
        self.names |= {child.process.pid: f"supervisor {stage} {side}" for (stage, side), child in supervisors}
        for (stage, side), child in supervisors:
            for pid in trees[child.process.pid]:
                self.names.setdefault(pid, f"zygote {stage} {side}")
        self._ask_etcd()
        running = alive([*hubs, *(pid for tree in trees.values() for pid in tree)])
        self._note(0, {"processes": float(len(running))})
        for pid in running:
            self._note(pid, held_by(pid))
            if pid in hubs:
                self._note_tasks(pid, self._site.folder / hubs[pid])

    def _ask_etcd(self) -> None:
        try:
            found = json.loads(self._site.etcdctl("get", "--prefix", f"/omni/v1/{NAMESPACE}/", "-w", "json"))
        except subprocess.SubprocessError:
            # It is what the present fault takes away.
            return
        pairs = found.get("kvs", [])
        self._note(0, {"keys in etcd": float(len(pairs))})
        for pair in pairs:
            if b"/replicas/" in base64.b64decode(pair["key"]):
                record = json.loads(base64.b64decode(pair["value"]))
                self.names[record["pid"]] = f"replica {record['stage_id']} {record['host']}"

    def _note_tasks(self, pid: int, folder: Path) -> None:
        try:
            found = json.loads((folder / "tasks").read_text())
        except (OSError, ValueError):
            return
        self._tasks[pid] = found
        self._note(pid, {"tasks": float(sum(found.values()))})

    def _note(self, pid: int, values: dict[str, float]) -> None:
        now_s = time.monotonic()
        for what, value in values.items():
            self.points[pid, what].append((now_s, value))


def held_by(pid: int) -> dict[str, float]:
    """What a process holds now, by resource; empty if it is gone."""
    here = Path(f"/proc/{pid}")
    try:
        lines = [line.split() for line in (here / "status").read_text().splitlines()]
        known = [(line, *_STATUS[line[0]]) for line in lines if line and line[0] in _STATUS]
        found = {what: int(line[1]) / divisor for line, what, divisor in known}
        files = list((here / "fd").iterdir())
        found["descriptors"] = float(len(files))
        found["sockets"] = float(sum(_target(file).startswith("socket:") for file in files))
        shared = (here / "root/dev/shm").iterdir()
        found["shared memory"] = sum(_size_bytes(file) for file in shared) / (1 << 20)
    except OSError:
        return {}
    return found


def _target(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:
        return ""


def _size_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
