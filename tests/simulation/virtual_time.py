"""Virtual time: an asyncio loop whose clock jumps to the next timer, and the processes whose callbacks it runs.

Import this before the packages: ``install`` replaces what they take time and chance from, and their default arguments
are bound when they are imported.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import os
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

#: Wall-clock seconds at the start of every run.
WALL_S: Final = 1_700_000_000.0
_RESOLUTION_S: Final = 1e-6
#: Callbacks at one moment beyond which something spins without waiting.
MOST_AT_ONCE: Final = 20_000


class SpinningError(Exception):
    """Callbacks follow each other without end, and time stands still."""


class Process:
    """A simulated process: every callback that was made in its context belongs to it, and dies or pauses with it."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.is_alive, self.is_paused = True, False
        #: Whether not even the threads run that have no Python in them.
        self.is_stopped = False
        #: What was due while it was paused, in order.
        self.deferred: list[SimHandle] = []
        #: Seconds by which its wall clock is wrong.
        self.wall_skew_s = 0.0
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        state = "dead" if not self.is_alive else "paused" if self.is_paused else "alive"
        return f"Process({self.name}, {state})"


#: The process that the running callback belongs to; None: the world itself.
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("simulated_process", default=None)


class SimTask(asyncio.Task[Any]):
    """A task that knows its process."""

    process: Process | None = None


class SimHandle:
    """A callback that is due, or will be: what Handle and TimerHandle of asyncio are, and no more."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_when_s", "process")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context, when_s: float
    ) -> None:
        self._callback, self._args, self._context, self._when_s = callback, args, context, when_s
        self._cancelled = False
        self.process = context.get(PROCESS)

    def __lt__(self, other: SimHandle) -> bool:
        # Two timers of one moment are told apart by their numbers; this is never asked.
        raise AssertionError("timers have numbers")

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when_s


def _nothing() -> None:
    return


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that never waits: with nothing to run, its clock moves on to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._due: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._timer_number = 0
        self._at_once = 0
        #: Callbacks run so far.
        self.callbacks = 0
        self.set_task_factory(_new_task)
        #: Unfinished tasks of dead processes: were they collected, their ``finally`` blocks would run.
        self.graveyard: list[object] = []

    def time(self) -> float:
        return self.now_s

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> Any:
        self._timer_number += 1
        handle = SimHandle(callback, args, contextvars.copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, self._timer_number, handle))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> Any:
        # As on a machine, some time passes until any timer that is not due: a delay may be too small to change a float.
        when_s = self.now_s + max(_RESOLUTION_S, delay) if delay > 0 else self.now_s
        return self.call_at(when_s, callback, *args, context=context)

    def call_soon(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> Any:
        handle = SimHandle(callback, args, contextvars.copy_context() if context is None else context, self.now_s)
        self._due.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def run_in_executor(self, executor: object, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Run it here and now: nothing blocks in virtual time."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the future has it
            future.set_exception(error)
        return future

    def _run_once(self) -> None:  # noqa: C901 - one place, for speed
        """Run what is due, and move the clock on, until the loop is told to stop."""
        due, timers, next_timer = self._due, self._timers, heapq.heappop
        while not self._stopping:  # type: ignore[attr-defined]
            if due:
                handle = due.popleft()
            elif timers:
                when_s, _, handle = next_timer(timers)
                if handle._cancelled:
                    continue
                if when_s > self.now_s:
                    self.now_s, self._at_once = when_s, 0
            else:
                raise RuntimeError("nothing is left that could ever happen")
            if handle._cancelled:
                continue
            process = handle.process
            if process is not None:
                if not process.is_alive:
                    continue
                if process.is_paused:
                    process.deferred.append(handle)
                    continue
            self.callbacks += 1
            self._at_once += 1
            if self._at_once > MOST_AT_ONCE:
                self._at_once = 0
                following = [_name_of(each) for each in (handle, *list(due)[:5])]
                raise SpinningError(f"{MOST_AT_ONCE} callbacks at {self.now_s:.3f} s, next {following}")
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - the judge has it
                self.call_exception_handler({"message": f"in {_name_of(handle)}", "exception": error})

    def spawn(self, process: Process | None, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Start a task in a process."""
        context = contextvars.Context() if process is None else process.context.copy()
        return self.create_task(work, name=name or None, context=context)

    def bury(self, process: Process) -> None:
        """The process is dead: none of its callbacks ever runs again."""
        process.is_alive = False
        self.graveyard += process.deferred
        process.deferred = []
        self.graveyard += [task for task in asyncio.all_tasks(self) if getattr(task, "process", None) is process]

    def wake(self, process: Process) -> None:
        """A paused process goes on, with all that was due meanwhile."""
        process.is_paused = process.is_stopped = False
        self._due.extend(process.deferred)
        process.deferred = []


def _name_of(handle: SimHandle) -> str:
    """What a callback does, as far as it tells."""
    owner = getattr(handle._callback, "__self__", None)
    what = owner.get_coro() if isinstance(owner, asyncio.Task) else handle._callback
    return getattr(what, "__qualname__", repr(what))


def _new_task(loop: Any, work: Any, *, context: contextvars.Context | None = None, **more: Any) -> SimTask:
    task = SimTask(work, loop=loop, context=context, **more)
    task.process = PROCESS.get() if context is None else context.get(PROCESS)
    return task


class _Source:
    """Where the packages take time and chance from while a simulation runs."""

    loop: VirtualLoop | None = None
    chance = random.Random(0)


SOURCE: Final = _Source()
#: The machine's own clocks, for figures of speed: what passes, and what this process uses of a processor.
real_clock_s: Final[Callable[[], float]] = time.perf_counter
used_s: Final[Callable[[], float]] = time.process_time


def _now_s() -> float:
    loop = SOURCE.loop
    return real_clock_s() if loop is None else loop.now_s


def _wall_s() -> float:
    process = PROCESS.get()
    return WALL_S + _now_s() + (0.0 if process is None else process.wall_skew_s)


def _urandom(size: int) -> bytes:
    return SOURCE.chance.randbytes(size)


def install() -> None:
    """Replace the clocks and the system's randomness in this process, for good."""
    time.monotonic = time.perf_counter = _now_s
    time.time = _wall_s
    time.time_ns = lambda: int(_wall_s() * 1e9)
    time.monotonic_ns = time.perf_counter_ns = lambda: int(_now_s() * 1e9)
    time.thread_time = time.process_time = lambda: 0.0
    time.sleep = lambda _delay_s: None
    os.urandom = _urandom
    random._urandom = _urandom  # type: ignore[attr-defined]


install()
