"""RecordLimit: how many TLS records a client may send that bring no HTTP. Pure.

TLS 1.3 has messages for itself: a KeyUpdate is a record of 27 bytes, makes a new key and calls for an answer. No honest
client sends more than a few, and whoever pays no attention to them works through ten thousand in one read.
"""

from __future__ import annotations

from typing import Final

#: A record's header: its type, its version, and the size of what follows in two bytes.
_HEADER_BYTES: Final = 5
#: Records that may bring nothing. Some dozens lie in the buffers of a connection while HTTP is not read.
_FREE_RECORDS: Final = 512
#: So many bytes of HTTP, or of anything within TLS, pay for one record: no WebSocket frame of a client is smaller than
#: the first, and a record of the size of the second costs little for its size.
_HTTP_BYTES: Final = 4
_BYTES: Final = 512


class RecordLimit:
    """The records of one connection."""

    def __init__(self) -> None:
        #: Bytes to go until the next header, and what has come of that header.
        self._to_go = 0
        self._head = b""
        #: Records that nothing has paid for.
        self.unpaid = 0.0

    def came(self, data: bytes, http_bytes: int) -> bool:
        """So much has come, and brought so much HTTP since the last call. Return whether it is too little."""
        paid = http_bytes / _HTTP_BYTES + len(data) / _BYTES
        self.unpaid = max(0.0, self.unpaid + self._records(data) - paid)
        return self.unpaid > _FREE_RECORDS

    def _records(self, data: bytes) -> int:
        """How many records begin in this; that which is no TLS is taken for one."""
        data, at, found = self._head + data, self._to_go, 0
        while at + _HEADER_BYTES <= len(data):
            found += 1
            at += _HEADER_BYTES + int.from_bytes(data[at + 3 : at + 5])
        self._head = data[at:]
        self._to_go = max(0, at - len(data))
        return found
