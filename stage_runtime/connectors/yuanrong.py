"""Yuanrong's datasystem between the stages: a store beside them that keeps hand-offs, on one host or on many."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import TransferError
from stage_runtime.connectors.layout import GENERATION_BYTES, key_digest
from stage_runtime.connectors.lent import Loan
from stage_runtime.connectors.receive import PooledBuffer, ReceivePool
from stage_runtime.connectors.settings import COMMON, limits_of, number
from stage_runtime.connectors.store import Kept, Store
from stage_runtime.connectors.storing import StoringConnector
from stage_runtime.connectors.tcp_client import Fetch, Fetches
from stage_runtime.connectors.yuanrong_client import YuanrongClient, load_package
from stage_runtime.connectors.yuanrong_memory import (
    CLAIM_S,
    YuanrongStore,
    claim_name,
    fetched_name,
    key_name,
    payload_name,
    whole_seconds,
)

_HOST: Final = "127.0.0.1"
_PORT: Final = 35001
_GET_SUB_TIMEOUT_MS: Final = 1000
_REQUEST_TIMEOUT_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.02


class YuanrongConnector(StoringConnector):
    """Hand-offs below ``shm_threshold_bytes`` travel inside the metadata; larger ones lie in the datasystem.

    Their producer drops them there; those of a producer that was killed go at the end of their time to live. ``get``
    consumes what it returns, unless the metadata says ``consume: False``. The key is enough to find a hand-off: without
    the metadata of ``put`` it is waited for, at most ``get_sub_timeout_ms``.
    """

    known_settings = COMMON | {
        "advertise_host",
        "bind_host",
        "get_sub_timeout_ms",
        "host",
        "port",
        "request_timeout_s",
    }

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.get_sub_timeout_ms = max(0, int(number(self.config, "get_sub_timeout_ms", _GET_SUB_TIMEOUT_MS, -1)))
        self._memory = ReceivePool(self._limits.pool_bytes)
        self._fetches = Fetches()

    def _make_store(self) -> Store:
        own_host = str(self.config.get("advertise_host", "")).strip("[]") or _HOST
        host, port = self.config.get("host", own_host), self.config.get("port", _PORT)
        if not isinstance(host, str) or not host:
            raise ConfigError(f"host is {host!r}; the address of Yuanrong's datasystem is wanted")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ConfigError(f"port is {port!r}; the port of Yuanrong's datasystem is wanted")
        request_timeout_s = number(self.config, "request_timeout_s", _REQUEST_TIMEOUT_S, 0.1)
        self._limits = limits_of(self.config, None)
        package = load_package()
        #: How the package is told to keep a value.
        self.set_param = package.SetParam()
        self._datasystem = YuanrongClient(package, host, port, request_timeout_s)
        return YuanrongStore(self.namespace, self._datasystem, self._limits)

    @property
    def client(self) -> Any:
        """The package's own client; None before the first call that needs it."""
        return self._datasystem.client

    def _describe(self, kept: Kept) -> dict[str, Any]:
        watched = {"watched": True} if self._limits.window_size is not None else {}
        return {"generation": kept.generation, "data_size": kept.size_bytes, **watched}

    def _fetch(self, edge: tuple[str, str, str], metadata: dict[str, Any]) -> tuple[Loan, memoryview] | None:
        digest = key_digest(self.namespace, *edge)
        generation = metadata.get("generation")
        with self._fetches.under_way(edge[2]) as fetching:
            if not isinstance(generation, bytes) or len(generation) != GENERATION_BYTES:
                generation = self._wait_for(digest, fetching, metadata.get("timeout_s"))
            if generation is None:
                return None
            payload = payload_name(digest, generation)
            consume = bool(metadata.get("consume", True))
            if consume and not self._datasystem.note(claim_name(payload), CLAIM_S):
                return None
            buffer = self._datasystem.read(payload, self._copy)
        if buffer is None:
            return None
        self._say_so(payload, consume=consume, watched=bool(metadata.get("watched")))
        return buffer, buffer.payload()

    def _wait_for(self, digest: bytes, fetching: Fetch, timeout_s: Any) -> bytes | None:
        longest_s = self.get_sub_timeout_ms / 1000
        if isinstance(timeout_s, int | float):
            longest_s = min(longest_s, timeout_s)
        deadline_s = time.monotonic() + longest_s
        while True:
            found = self._datasystem.read(key_name(digest), bytes)
            if found is not None or time.monotonic() >= deadline_s:
                return found
            time.sleep(_LOOK_EVERY_S)
            fetching.check()

    def _copy(self, view: memoryview) -> PooledBuffer:
        buffer = self._memory.take(len(view))
        np.copyto(buffer, np.frombuffer(view, np.uint8))
        return buffer

    def _say_so(self, payload: str, *, consume: bool, watched: bool) -> None:
        if consume:
            # The claim stays behind: who comes now must not take the hand-off for one that may be had.
            self._datasystem.delete([payload])
        elif watched:
            self._datasystem.note(fetched_name(payload), whole_seconds(self._limits.ttl_s))

    def cancel(self, get_key: str) -> None:
        """See OmniConnectorBase."""
        self._fetches.cancel(get_key)

    def health(self) -> dict[str, Any]:
        """See OmniConnectorBase. ``reason`` says why the datasystem can't be used."""
        try:
            self._datasystem.exist([key_name(b"")])
        except TransferError as error:
            return {**super().health(), "status": "unhealthy", "reason": str(error)}
        return super().health()

    def close(self) -> None:
        """See OmniConnectorBase."""
        self._fetches.close()
        super().close()
        self._memory.close()
