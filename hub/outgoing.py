"""Outgoing: requests on their way to one replica's socket, so that many at once cost little more than one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from hub.errors import SendFailedError
from omni_discovery import wire

#: A batch is closed when it has grown to this.
_BATCH_BYTES: Final = 256 << 10

_Key = tuple[str, int]


class Outgoing:
    """The first of a turn of the loop leaves at once, those that follow it in the same turn go together after it.

    ``send`` raises SendFailedError; ``on_unsent`` is told of each request, by ``key``, that then has not left.
    """

    def __init__(self, send: Callable[[Sequence[bytes]], None], on_unsent: Callable[[_Key], None]) -> None:
        self._send = send
        self._on_unsent = on_unsent
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[_Key, bytes]] = []
        self._turn_ends = False

    def push(self, key: _Key, head: bytes) -> None:
        """Send one request. Raise SendFailedError if it certainly has not left."""
        if self._turn_ends:
            self._waiting.append((key, head))
            return
        self._send([head])
        self._turn_ends = True
        self._loop.call_soon(self._end_turn)

    def flush(self) -> None:
        """Send what waits: something else is to go behind it."""
        waiting, self._waiting = self._waiting, []
        batch: list[tuple[_Key, bytes]] = []
        size_bytes = 0
        for item in waiting:
            if batch and (size_bytes + len(item[1]) > _BATCH_BYTES or len(batch) == wire.MAX_BATCH):
                self._send_batch(batch)
                batch, size_bytes = [], 0
            batch.append(item)
            size_bytes += len(item[1])
        if batch:
            self._send_batch(batch)

    def clear(self) -> None:
        """Forget what waits: the session has ended, and with it all that was on its way."""
        self._waiting.clear()

    def _end_turn(self) -> None:
        self._turn_ends = False
        if self._waiting:
            self.flush()

    def _send_batch(self, batch: Sequence[tuple[_Key, bytes]]) -> None:
        try:
            self._send([wire.join([head for _, head in batch])])
        except SendFailedError:
            for key, _ in batch:
                self._on_unsent(key)
