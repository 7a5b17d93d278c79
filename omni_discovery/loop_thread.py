"""LoopThread: a thread with an asyncio event loop, so that a busy main thread can't delay lease renewals."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines and calls on one named daemon thread until ``close``.

    Raise OSError or RuntimeError if there is no descriptor or no thread left for it.
    """

    def __init__(self, name: str, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self._pid = os.getpid()
        _check_descriptors()
        self._loop = new_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    @property
    def name(self) -> str:
        """The thread's name."""
        return self._thread.name

    def start(self, work: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Run a coroutine on the loop; return the future of its result. Raise RuntimeError once closed or forked."""
        try:
            self._check_process()
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, _Result], timeout_s: float) -> _Result:
        """Run a coroutine on the loop and wait for its result. Past ``timeout_s`` cancel it and raise TimeoutError."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(f"a call that waits for thread {self.name} can't be made on that thread")
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a call of ``function`` on the loop and return at once; its result is dropped."""
        self._check_process()
        self._loop.call_soon_threadsafe(function, *args)

    def close(self, timeout_s: float = 2.0) -> None:
        """Cancel all tasks, end the thread, wait ``timeout_s`` for it. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid or self._loop.is_closed():
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"thread {self.name} stayed in process {self._pid}: it does not survive a fork; "
                "start processes by spawn and make the client in the process that uses it"
            )


def _check_descriptors() -> None:
    """Raise OSError if there are too few for a loop, of which asyncio would leave a half and a traceback behind."""
    with select.epoll(), contextlib.ExitStack() as stack:
        for end in socket.socketpair():
            stack.enter_context(end)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio wakes every loop of the process for each event; a loop that comes second finds nothing to read.
    if isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)
