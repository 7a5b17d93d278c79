"""A log of the function calls of our packages, kept by every Python process that inherits an environment.

``prepare`` writes a ``sitecustomize`` module, which Python imports at the start of each process that has its folder in
``PYTHONPATH``. It sets a profile function (``sys.setprofile``) in every thread. One shared byte turns the log on and
off, and each call is appended to one file, so that the calls of several processes stand in the order in which they
happened. Forks inherit all of it.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("hub", "omni_discovery", "stage_runtime")

_FOLDER: Final = "OMNI_CALL_LOG"
_SITECUSTOMIZE: Final = "from tests.bench.call_log import install\n\ninstall()\n"
_ON: Final = 1
#: Stands in place of a file in the lines of log records.
_LOG_RECORD: Final = "-"


@dataclass(frozen=True, slots=True)
class Call:
    """A function was called, or a suspended coroutine or generator was resumed."""

    pid: int
    thread: int
    is_main_thread: bool
    #: Monotonic; the same clock in all processes.
    at_s: float
    #: Relative to the root of the repository; empty for a log record.
    file: str
    #: The qualified name; the unformatted message of a log record.
    function: str


class CallLog:
    """The reader's side: turns the log on and off, and reads what it holds."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "calls"
        with (folder / "switch").open("r+b") as switch:
            self._switch = mmap.mmap(switch.fileno(), 1)
        self._offset = 0

    def start(self) -> None:
        """Forget earlier calls and log from now on."""
        self._offset = self._file.stat().st_size
        self._switch[0] = _ON

    def stop(self) -> list[Call]:
        """Log no more; return the calls since ``start`` in their order."""
        self._switch[0] = 0
        # A call that has seen the switch on may still be on its way into the file.
        time.sleep(0.05)
        with self._file.open("rb") as file:
            file.seek(self._offset)
            return [_parse(line) for line in file.read().decode().splitlines()]


def prepare(folder: Path) -> CallLog:
    """Make all Python processes log that are started from here on by this one."""
    (folder / "calls").touch()
    (folder / "switch").write_bytes(b"\0")
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    os.environ[_FOLDER] = str(folder)
    # Children work in other folders: without the root they would import an installed version.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    return CallLog(folder)


def install() -> None:
    """Log the calls of this process, in this thread and those that it starts through ``threading``."""
    folder = Path(os.environ[_FOLDER])
    file = os.open(folder / "calls", os.O_WRONLY | os.O_APPEND)
    with (folder / "switch").open("r+b") as opened:
        switch = mmap.mmap(opened.fileno(), 1)
    prefixes = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)
    skip = len(str(ROOT)) + 1
    handle_record = logging.Logger.handle.__code__

    def log_call(frame: FrameType, event: str, _argument: Any) -> None:
        if not switch[0] or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(prefixes):
            where, what = code.co_filename[skip:], code.co_qualname
        elif code is handle_record:
            where, what = _LOG_RECORD, str(frame.f_locals["record"].msg).partition("\n")[0]
        else:
            return
        thread = threading.get_ident()
        is_main = int(thread == threading.main_thread().ident)
        line = f"{os.getpid()}\t{thread}\t{is_main}\t{time.monotonic_ns()}\t{where}\t{what}\n"
        # One write each: lines of several processes don't mix.
        os.write(file, line.encode())

    threading.setprofile(log_call)
    sys.setprofile(log_call)


def _parse(line: str) -> Call:
    pid, thread, is_main, at_ns, where, what = line.split("\t", 5)
    file = "" if where == _LOG_RECORD else where
    return Call(int(pid), int(thread), is_main == "1", int(at_ns) / 1e9, file, what)
