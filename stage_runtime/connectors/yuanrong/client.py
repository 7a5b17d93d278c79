"""A client of Yuanrong's datasystem: values by name, its errors mapped to this project's.

Its library holds the interpreter's lock during every call, so no other thread of this process runs meanwhile. Therefore
no call waits for a value, none may take longer than ``request_timeout_s``, and after a call without an answer, or
without room, further calls fail at once for ``PAUSE_S``.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import EdgeFullError, TransferCancelledError, TransferError
from stage_runtime.connectors.serialization import Buffer

#: The module's name, and what it was called before.
_MODULES: Final = ("yr.datasystem.kv_client", "datasystem.kv_client")
_CODE: Final = re.compile(r"code: \[([^\[\]]+)\]")
_NOT_FOUND: Final = "Key not found"
_EXISTS: Final = "Object already exist error"
_NO_ROOM: Final = ("Out of memory", "No space left on device")
#: Error codes of a datasystem that works.
_REFUSALS: Final = frozenset({"Invalid parameter", *_NO_ROOM})
#: How long calls fail at once after a call without an answer, in seconds.
PAUSE_S: Final = 2.0
_LEAST_CONNECT_MS: Final = 500

T = TypeVar("T")


def load_package() -> Any:
    """The package's module. Raise ConfigError that names what to install."""
    reasons: list[str] = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise ConfigError(
        "YuanrongConnector needs the package openyuanrong-datasystem: pip install 'omni-discovery[yuanrong]' "
        f"({'; '.join(reasons)})"
    )


class _KeyError(Exception):
    """A value does not exist, or exists already."""


class YuanrongClient:
    """Connects with the first call, and reconnects by itself. Used by any thread.

    Calls raise TransferError if the datasystem can't be reached, TransferCancelledError after ``close``.
    """

    def __init__(
        self,
        package: Any,
        host: str,
        port: int,
        request_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._package = package
        self._where = f"{host}:{port}"
        timeout_ms = int(request_timeout_s * 1000)
        self._arguments: dict[str, Any] = {
            "host": host,
            "port": port,
            "connect_timeout_ms": max(timeout_ms, _LEAST_CONNECT_MS),
            "req_timeout_ms": timeout_ms,
        }
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._asked_again_at_s = self._room_again_at_s = clock()
        self._why = ""
        #: The package's own client, once there is one.
        self.client: Any = None

    def store(self, values: Sequence[tuple[str, Sequence[Buffer]]], ttl_s: int) -> None:
        """Store values by name, each given in parts. Values of the same names are replaced.

        Raise EdgeFullError if there is no room.
        """
        if self._clock() < self._room_again_at_s:
            raise EdgeFullError(f"the datasystem at {self._where} had no room a moment ago")

        def go(client: Any) -> None:
            names = [name for name, _ in values]
            sizes = [sum(len(part) for part in parts) for _, parts in values]
            buffers = client.mcreate(names, sizes, self._package.SetParam().write_mode, ttl_s)
            for buffer, (_, parts) in zip(buffers, values, strict=True):
                _write(np.frombuffer(buffer.MutableData(), np.uint8), parts)
            client.mset_buffer(buffers)

        self._call(go)

    def put_mark(self, name: str, ttl_s: int) -> bool:
        """Store a mark under a name; False if there is one already. Of concurrent calls one succeeds."""
        only_new = self._package.ExistenceOpt.NX
        try:
            self._call(lambda client: client.msettx([name], [b"1"], ttl_second=ttl_s, existence_opt=only_new))
        except _KeyError:
            return False
        return True

    def read(self, name: str, use: Callable[[memoryview], T]) -> T | None:
        """The result of ``use`` with a value, which can't be dropped during the call; None if there is no value."""

        def go(client: Any) -> T | None:
            (buffer,) = client.get_read_only_buffers([name], 0)
            return None if buffer is None else use(memoryview(buffer.immutable_data()).cast("B"))

        try:
            return self._call(go)
        except _KeyError:
            return None

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Whether each value exists, in order."""
        return [bool(there) for there in self._call(lambda client: client.exist(list(names)))]

    def delete(self, names: Sequence[str]) -> None:
        """Drop values. Unknown names are ignored."""
        self._call(lambda client: client.delete(list(names)))
        self._room_again_at_s = self._clock()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            self._closed = True
            self.client = None

    def _call(self, go: Callable[[Any], T]) -> T:
        if (left_s := self._asked_again_at_s - self._clock()) > 0:
            raise TransferError(f"{self._why}; it is asked again in {left_s:.1f} s")
        try:
            return go(self._connected())
        except RuntimeError as error:
            raise self._mapped_error(error) from error

    def _connected(self) -> Any:
        with self._lock:
            if self._closed:
                raise TransferCancelledError("the connector is closed")
            if self.client is None:
                client = self._package.KVClient(**self._arguments)
                client.init()
                self.client = client
            return self.client

    def _mapped_error(self, error: RuntimeError) -> Exception:
        found = _CODE.search(str(error))
        code = found.group(1) if found else ""
        if code in (_NOT_FOUND, _EXISTS):
            return _KeyError(code)
        first_line = str(error).partition("\n")[0]
        told = f"Yuanrong's datasystem at {self._where}: {first_line}"
        if code in _NO_ROOM:
            self._room_again_at_s = self._clock() + PAUSE_S
            return EdgeFullError(f"{told}; start it with more --shared_memory_size_mb, or lower max_inflight_bytes")
        if code not in _REFUSALS:
            # The text behind the code is about the library's own threads.
            self._why = f"Yuanrong's datasystem at {self._where}: {code or first_line}; is it running (dscli start)?"
            self._asked_again_at_s = self._clock() + PAUSE_S
            return TransferError(self._why)
        return TransferError(told)


def _write(target: np.ndarray[Any, np.dtype[np.uint8]], parts: Sequence[Buffer]) -> None:
    place = 0
    for part in parts:
        if len(part):
            np.copyto(target[place : place + len(part)], np.frombuffer(part, np.uint8))
            place += len(part)
