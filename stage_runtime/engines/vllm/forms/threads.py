"""The threads that check and compile forms of answers, and serve the clients in turn.

A form of 2 KB may take a CPU the third of a second to be checked, and longer to be compiled. The engine's thread does
neither, so that requests without a form wait for none; and one client's forms leave a thread to those of the others.
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
#: Whose form vLLM gives to the threads in the current context.
_client: Final[ContextVar[str]] = ContextVar("client_of_form", default="")


class _FormTask:
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


class FormThreads(ThreadPoolExecutor):
    """Threads of a low priority, of which one client has all but one at most. Each client has one task in turn.

    They get the CPU that the engine leaves, whose own thread has to launch each of its steps.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads, "omni-forms", lower_priority)
        self._most_each = max(1, threads - 1)
        self._lock = threading.Lock()
        #: By client, the one whose turn is next before all others.
        self._waiting: OrderedDict[str, deque[_FormTask]] = OrderedDict()
        #: How many tasks of each client are being done.
        self._running: Counter[str] = Counter()

    def submit(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Executor. It is the current context's client's, see ``forms_of``."""
        task = _FormTask(partial(act, *args, **kwargs))
        with self._lock:
            self._waiting.setdefault(_client.get(), deque()).append(task)
        super().submit(self._work)
        return task.result

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            client, task = taken
            task.run()
            with self._lock:
                self._running[client] -= 1

    def _take(self) -> tuple[str, _FormTask] | None:
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


def lower_priority() -> None:
    """Give the current thread, and those that it will start, a low priority, so that the engine's has the CPU first."""
    # On Linux, that is a priority of each thread.
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


@contextmanager
def forms_of(client: str) -> Iterator[None]:
    """What is submitted to ``FormThreads`` inside is this client's."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)


def put_forms_behind_engine(llm: Any) -> FormThreads:
    """The threads for forms of answers, in which vLLM compiles them from now on."""
    threads = FormThreads(max(2, (os.cpu_count() or 1) // 2))
    core = getattr(getattr(llm, "engine_core", None), "engine_core", None)
    manager: Any = getattr(core, "structured_output_manager", None)
    if getattr(manager, "executor", None) is not None:
        manager.executor.shutdown(wait=False)
        manager.executor = threads
    return threads
