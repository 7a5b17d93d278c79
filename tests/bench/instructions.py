"""How many instructions a hub executes for a request: ``python -m tests.bench.instructions``.

A real ``omni serve`` under valgrind, with two echo stages of two replicas each, embedded etcd and CURVE on; replicas
and etcd run without it. What all threads of the hub's process execute is counted while clients send whole chats over
connections that stay open, and again for as long a time without any request, which is taken off. The kernel's part is
not seen. Time would say little on a busy machine; these counts differ by some hundredths from run to run, as messages
fall together or not.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.bench import report
from tests.bench.actors import now_s
from tests.bench.tokens_per_core import _PAIR, _ask
from tests.support.hub import Hub
from tests.support.processes import wait_for

#: A hub starts slowly under valgrind.
_READY_S: Final = 600.0
_TOTALS: Final = re.compile(r"^(?:totals|summary): (\d+)$", re.MULTILINE)


class CountedHub:
    """A hub under valgrind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (deploy := folder / "deploy.yaml").write_text(_PAIR)
        out = f"--callgrind-out-file={folder / 'counts'}"
        prefix = ("valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", out)
        variables = {"PYTHONHASHSEED": "0"}
        self.hub = Hub(folder, ["--deploy-config", str(deploy)], prefix=prefix, variables=variables)
        self._dumps = 0

    def control(self, option: str, *more: str) -> None:
        """Have valgrind count, begin at zero, or write down what it has counted."""
        command = ["callgrind_control", option, *more, str(self.hub.process.pid)]
        subprocess.run(command, check=True, capture_output=True)

    def counted(self) -> int:
        """Instructions since the last call."""
        self.control("--dump")
        self._dumps += 1
        dump = self._folder / f"counts.{self._dumps}"
        wait_for("the counts", lambda: dump.exists() and _TOTALS.search(dump.read_text()))
        found = _TOTALS.search(dump.read_text())
        assert found is not None
        return int(found[1])


def count(folder: Path, requests: int, at_once: list[int]) -> list[report.Row]:
    """One row for each number of clients."""
    counted, rows = CountedHub(folder), list[report.Row]()
    hub = counted.hub
    try:
        hub.wait_ready(_READY_S)
        counted.control("--instr=on")
        asyncio.run(_ask(hub.url, max(at_once), requests // 4))
        for clients in at_once:
            counted.counted()
            began_s = now_s()
            asyncio.run(_ask(hub.url, clients, requests))
            took_s, all_of_them = now_s() - began_s, counted.counted()
            time.sleep(took_s)
            idle = counted.counted()
            rows.append(
                {"at_once": clients, "instructions": (all_of_them - idle) // requests, "idle": idle // requests}
            )
    finally:
        hub.stop()
    return rows


def main() -> None:
    """Count, print the table, write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--keep", type=Path, help="folder for valgrind's own files, for callgrind_annotate")
    parser.add_argument("--out", type=Path, help="path of the JSON file to write")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        rows = count(given.keep or Path(folder), given.requests, given.at_once)
    report.show("instructions of the hub, of a request through two stages", rows)
    report.write(given.out, {"machine": report.machine(), "requests": rows})


if __name__ == "__main__":
    main()
