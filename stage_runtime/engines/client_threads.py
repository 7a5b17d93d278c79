"""Threads beside an engine's own that serve the clients in turn: for what takes long and is not the engine's work.

A form of an answer of 2 KB may take a CPU the third of a second to be checked, a video of some MB seconds to be read.
The engine's thread does neither, so that other requests wait for none; and one client's leave a thread to the others.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from stage_runtime.engines.errors import is_panic

#: Added to the nice value of the threads: beside a busy thread they get a tenth of a CPU.
_NICE: Final = 10
#: Whose work is given to the threads in the current context.
_client: Final[ContextVar[str]] = ContextVar("client_of_work", default="")


class _ClientTask:
    """Something to be done by a thread, unless it is cancelled before."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.result: Future[Any] = Future()
        self._act: Callable[[], Any] | None = act
        # What was cancelled keeps its place, but no memory.
        self.result.add_done_callback(self._forget)

    def run(self) -> None:
        """Set the result, or the error. A panic is an ordinary one: vLLM then ends one request, not its own step."""
        act = self._act
        if act is None or not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(act())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
            if is_panic(error):
                error = RuntimeError(f"a library panicked: {error}")
            self.result.set_exception(error)

    def _forget(self, _: Future[Any]) -> None:
        self._act = None


class ClientThreads(ThreadPoolExecutor):
    """Threads of which one client has all but one at most. Each client has one task in turn.

    ``is_low``: they get the CPU that the engine leaves, whose own thread has to launch each of its steps.
    """

    def __init__(self, threads: int, name: str, *, is_low: bool = True) -> None:
        super().__init__(threads, name, _lower_priority if is_low else None)
        self._most_each = max(1, threads - 1)
        self._lock = threading.Lock()
        #: By client, the one whose turn is next before all others.
        self._waiting: OrderedDict[str, deque[_ClientTask]] = OrderedDict()
        #: How many tasks of each client are being done.
        self._running: Counter[str] = Counter()

    def submit(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Executor. It is the current context's client's, see ``work_of``."""
        task = _ClientTask(partial(act, *args, **kwargs))
        with self._lock:
            self._waiting.setdefault(_client.get(), deque()).append(task)
        super().submit(self._work)
        return task.result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor."""
        if cancel_futures:
            with self._lock:
                waiting, self._waiting = self._waiting, OrderedDict()
            for task in (each for tasks in waiting.values() for each in tasks):
                task.result.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            client, task = taken
            task.run()
            with self._lock:
                self._running[client] -= 1

    def _take(self) -> tuple[str, _ClientTask] | None:
        """The task whose turn it is; None if none may be done now. Who ends one of the same client looks again."""
        with self._lock:
            client = next((each for each in self._waiting if self._running[each] < self._most_each), None)
            if client is None:
                # Those that have none are not kept.
                self._running = +self._running
                return None
            tasks = self._waiting[client]
            task = tasks.popleft()
            self._waiting.move_to_end(client)
            if not tasks:
                del self._waiting[client]
            self._running[client] += 1
            return client, task


def _lower_priority() -> None:
    """Give the current thread, and those that it will start, a low priority, so that the engine's has the CPU first."""
    # On Linux, that is a priority of each thread.
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


@contextmanager
def work_of(client: str) -> Iterator[None]:
    """What is submitted to ``ClientThreads`` inside is this client's."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)
