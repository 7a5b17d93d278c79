"""ReadingTime: how long answers may be read for calls, in a thread that has other work to do.

vLLM's parsers search with regular expressions, some of which take the square of an answer's length. One that runs can
be stopped by nothing but a signal, to the main thread: that is where a replica steps its engine, and a hub runs its
loop.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, TypeVar

_Made = TypeVar("_Made")

#: What any answer may take, in seconds: parsers that read an answer once take less.
_LEAST_S: Final = 0.02
_CHARACTER_S: Final = 1e-6
#: What answers may take beyond that, all together: at most so much at once, and so much of each second.
_MOST_SPARE_S: Final = 1.0
_SPARE_RATE: Final = 0.05


class TookTooLongError(Exception):
    """An answer has been read for too long."""


class _Interrupt(BaseException):
    """Passes the handlers of parsers, which take any Exception for an answer without calls."""


class ReadingTime:
    """The time for reading answers of one engine, or in one hub. Used by one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._spare_s, self._counted_at_s = _MOST_SPARE_S, now()
        #: Whether an answer is being read: a signal that comes late interrupts nothing.
        self._is_reading = False
        self._has_signal = False

    def read(self, text: str, act: Callable[[], _Made]) -> _Made:
        """What ``act`` returns, which reads ``text``. Raise TookTooLongError in its place once that takes too long."""
        if threading.current_thread() is not threading.main_thread():
            return act()
        self._take_signal()
        now_s = self._now()
        refilled_s = self._spare_s + (now_s - self._counted_at_s) * _SPARE_RATE
        self._spare_s, self._counted_at_s = min(_MOST_SPARE_S, refilled_s), now_s
        least_s = _LEAST_S + len(text) * _CHARACTER_S
        began_s = time.thread_time()
        try:
            return self._interrupted(least_s + self._spare_s, act)
        except _Interrupt:
            raise TookTooLongError(f"{len(text)} characters, {time.thread_time() - began_s:.2f} s") from None
        finally:
            self._spare_s = max(0.0, self._spare_s - max(0.0, time.thread_time() - began_s - least_s))

    def read_within(self, most_s: float, act: Callable[[], _Made]) -> _Made:
        """What ``act`` returns, whatever other answers have taken. Raise TookTooLongError once it takes longer."""
        if threading.current_thread() is not threading.main_thread():
            return act()
        self._take_signal()
        try:
            return self._interrupted(most_s, act)
        except _Interrupt:
            raise TookTooLongError(f"{most_s:g} s") from None

    def _interrupted(self, after_s: float, act: Callable[[], _Made]) -> _Made:
        """Call ``act``; raise _Interrupt once the process has computed for so long."""
        try:
            self._is_reading = True
            signal.setitimer(signal.ITIMER_VIRTUAL, after_s)
            return act()
        finally:
            self._is_reading = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _take_signal(self) -> None:
        # For good: a signal that comes behind the end of a reading would end a process that does not handle it.
        if not self._has_signal:
            signal.signal(signal.SIGVTALRM, self._interrupt)
            # Other threads may be in calls of the system, which go on.
            signal.siginterrupt(signal.SIGVTALRM, False)
            self._has_signal = True

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_reading:
            self._is_reading = False
            raise _Interrupt
