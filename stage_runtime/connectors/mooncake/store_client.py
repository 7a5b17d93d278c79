"""The client of a Mooncake store: one for each store and configuration in a process, as one takes seconds to end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from stage_runtime.connectors import serialization
from stage_runtime.connectors.errors import TransferError, TransferTimeoutError
from stage_runtime.connectors.mooncake.engine import load
from stage_runtime.connectors.store.memory import PooledBuffer, ReceivePool
from stage_runtime.connectors.tcp.client import Fetch, left_s

#: Threads of the library's calls; and of those that read objects, which take half a minute where their owner is silent.
_THREADS: Final = 8
_READERS: Final = 32
_MASTER_TIMEOUT_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.02
#: How long calls fail at once after a call without an answer, which takes seconds.
_PAUSE_S: Final = 2.0
_TRIES: Final = 5
_CHANCE_BYTES: Final = 32
#: Error codes of the library.
_FULL, _BUFFER_FULL, _NOT_THERE, _NOT_MOVED, _UNREACHED = -200, -600, -704, -800, -900


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The configuration of the library's client; sizes are in bytes."""

    host: str
    metadata_server: str
    segment: int
    localbuf: int
    protocol: str
    device_name: str
    master: str


class StoreClient:
    """Connects with the first call. Every call returns by its deadline, even if the library does not. Thread-safe.

    Deadlines are moments of the monotonic clock. Calls raise TransferTimeoutError past the deadline, and TransferError
    if the store can't be reached.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._library = load("store")
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mooncake-store")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="mooncake-get")
        self._store: Any = None
        #: The library's configuration of objects, which are never evicted: in this process's segment, or in any.
        self._mine: Any = None
        self._anywhere: Any = None
        self._master = f"Mooncake's master at {config.master}"
        #: Why calls fail at once until that moment.
        self._why = ""
        self._asked_again_at_s = 0.0

    @property
    def library_store(self) -> Any:
        """The library's store; None before the first call."""
        return self._store

    @property
    def object_config(self) -> Any:
        """The library's configuration of the objects of this process; None before the first call."""
        return self._mine

    def put(self, name: str, parts: Sequence[serialization.Buffer], deadline_s: float) -> None:
        """Store an object of ``parts``. Raise TransferError, also if there is no room."""
        config = self._config
        future = self._submit(lambda store: self._put(store, name, parts))
        try:
            answer = self._outcome(future, deadline_s)
        except BaseException:
            # It may be stored later after all.
            future.add_done_callback(lambda _: self._store and self._store.remove(name, True))
            raise
        if answer == _FULL:
            raise TransferError(f"Mooncake's store has no room: raise 'segment', {config.segment} bytes here")
        if answer == _BUFFER_FULL:
            raise TransferError(
                f"it does not fit into this process's buffer: raise 'localbuf', {config.localbuf} bytes"
            )
        if answer == _UNREACHED:
            raise self._no_answer(answer)
        if answer:
            raise TransferError(f"Mooncake's store answers {answer}")

    def get(
        self, name: str, memory: ReceivePool, deadline_s: float, fetching: Fetch | None = None
    ) -> PooledBuffer | None:
        """A copy of an object in a buffer of ``memory``; None if there is no such object. Raise TransferError."""
        future = self._submit(lambda store: _copy(store, name, memory), self._readers)
        found = self._outcome(future, deadline_s, fetching, f"the owner of the object, or {self._master},")
        if found is None and self.is_there(name, deadline_s):
            raise TransferError(
                "Mooncake's store has it and can't deliver: its owner is gone, or 'localbuf' is too small"
            )
        buffer: PooledBuffer | None = found
        return buffer

    def is_there(self, name: str, deadline_s: float) -> bool:
        """Whether an object exists. Raise TransferError."""
        answer = self._outcome(self._submit(lambda store: store.is_exist(name)), deadline_s)
        if answer not in (0, 1):
            raise self._no_answer(answer)
        return bool(answer)

    def remove(self, name: str, deadline_s: float) -> bool:
        """Remove an object; False if there was none. Of concurrent calls one gets True. Raise TransferError."""
        answer = self._outcome(self._submit(lambda store: store.remove(name, True)), deadline_s)
        if answer not in (0, _NOT_THERE):
            raise self._no_answer(answer)
        return not answer

    def _no_answer(self, answer: int) -> TransferError:
        return self._pause(f"{self._master} does not answer ({answer}): is mooncake_master running there?")

    def _pause(self, why: str) -> TransferError:
        self._why, self._asked_again_at_s = why, time.monotonic() + _PAUSE_S
        return TransferError(why)

    def _put(self, store: Any, name: str, parts: Sequence[serialization.Buffer]) -> int:
        answer = _NOT_MOVED
        for where in (self._mine, self._mine, self._anywhere, self._anywhere, self._anywhere):
            # If this process's segment is full, the master may choose that of a process that died lately.
            if answer == _NOT_MOVED:
                answer = store.put_parts(name, *parts, config=where)
        return answer

    def _submit(self, call: Callable[[Any], Any], threads: ThreadPoolExecutor | None = None) -> Future[Any]:
        if time.monotonic() < self._asked_again_at_s:
            raise TransferError(self._why)
        return (threads or self._threads).submit(lambda: call(self._connected()))

    def _outcome(self, future: Future[Any], deadline_s: float, fetching: Fetch | None = None, whose: str = "") -> Any:
        while True:
            if fetching is not None:
                fetching.check()
            try:
                at_most_s = left_s(deadline_s)
            except TransferTimeoutError as error:
                future.cancel()
                told = f"{whose or self._master} did not answer in time: is mooncake_master running there?"
                raise TransferTimeoutError(told) from error
            with contextlib.suppress(TimeoutError):
                future.exception(at_most_s if fetching is None else min(at_most_s, _LOOK_EVERY_S))
                return future.result()

    def _connected(self) -> Any:
        with self._lock:
            if self._store is None:
                self._connect()
            return self._store

    def _connect(self) -> None:
        config = self._config
        host, _, port = config.master.rpartition(":")
        try:
            # Without a master, the library's own connection attempt would never end.
            socket.create_connection((host.strip("[]"), int(port)), _MASTER_TIMEOUT_S).close()
        except OSError as error:
            raise self._pause(f"no Mooncake master at {config.master}: start mooncake_master ({error})") from error
        for _ in range(_TRIES):
            store, mine, anywhere = self._set_up()
            if not _is_of_another_process(store, mine):
                self._mine, self._anywhere, self._store = mine, anywhere, store
                atexit.register(store.close)
                return
            store.close()
        raise TransferError(f"Mooncake's master at {config.master} takes this process for others that died: try again")

    def _set_up(self) -> tuple[Any, Any, Any]:
        config = self._config
        store = self._library.MooncakeDistributedStore()
        failed = store.setup(
            config.host,
            config.metadata_server,
            config.segment,
            config.localbuf,
            config.protocol,
            config.device_name,
            config.master,
        )
        if failed:
            raise TransferError(f"Mooncake's store at {config.master} does not take this process ({failed})")
        mine, anywhere = self._library.ReplicateConfig(), self._library.ReplicateConfig()
        mine.preferred_segment = store.get_hostname()
        mine.with_hard_pin = anywhere.with_hard_pin = True
        return store, mine, anywhere


@cache
def client_of(config: StoreConfig) -> StoreClient:
    """The process's client with that configuration. Raise ConfigError without the package."""
    return StoreClient(config)


def _copy(store: Any, name: str, memory: ReceivePool) -> PooledBuffer | None:
    handle = store.get_buffer(name)
    if handle is None:
        return None
    size_bytes = handle.size()
    buffer = memory.take_buffer(size_bytes)
    content = (ctypes.c_uint8 * size_bytes).from_address(handle.ptr())
    np.copyto(buffer, np.frombuffer(content, np.uint8))
    return buffer


def _is_of_another_process(store: Any, mine: Any) -> bool:
    """Whether the master takes this process's segment for that of a process that died lately.

    The master knows segments by address and port only, and the library chooses from two thousand ports.
    """
    name = f"omni-{os.urandom(_CHANCE_BYTES).hex()}"
    for _ in range(_TRIES):
        if store.put_parts(name, b"1", config=mine) == _NOT_MOVED:
            return True
        store.remove(name, True)
    return False
