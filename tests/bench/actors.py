"""One object in a child process of its own, called through a pipe; all moments are on the clock that processes share.

A replica, a hub and a coordinator live in separate processes in real use, and two event loops of grpc.aio in one
process slow each other, so the benchmarks keep each party apart too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_SPAWN: Final = multiprocessing.get_context("spawn")


def now_s() -> float:
    """A moment that other processes of this machine can compare with theirs."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    part: Any = None
    try:
        part = make(*arguments)
        pipe.send((True, os.getpid()))
        while True:
            name, given = pipe.recv()
            if name == "close":
                break
            pipe.send((True, getattr(part, name)(*given)))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent has to hear it
        pipe.send((False, repr(error)))
    finally:
        if part is not None:
            part.shut()
        pipe.close()


class Actor:
    """Calls the methods of an object that was made by ``make(*arguments)`` in a child process.

    The object has a method ``shut`` for the end. ``make`` and all arguments and results can be pickled.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._answer(60.0)

    def call(self, name: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        """Call a method and wait for its result. Raise RuntimeError if it failed, TimeoutError past the bound."""
        self._pipe.send((name, arguments))
        return self._answer(timeout_s)

    def cpu_s(self) -> float:
        """Processor time of the process so far."""
        # The name in brackets may hold anything; what follows the last bracket is plain.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Memory that only this process uses."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

    def kill(self) -> None:
        """End the process by force, at once."""
        self._process.kill()
        self._process.join(5.0)

    def close(self) -> None:
        """End the process, by force if it does not end by itself. Idempotent."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(("close", ()))
            self._process.join(10.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"no answer from process {self._process.pid} within {timeout_s:g} s")
        worked, result = self._pipe.recv()
        if not worked:
            raise RuntimeError(result)
        return result
