"""The seed of a request whose client names none: hub and replica choose the same, for every attempt. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

#: Seeds are whole numbers from 0 to two to the power of this, less one.
SEED_BITS: Final = 63


def seed_of(request_id: str) -> int:
    """The seed of the hub's request with this id."""
    digest = hashlib.blake2b(request_id.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
