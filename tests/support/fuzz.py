"""Frames that no honest peer sends: bent, broken, repeated, out of place. The same seed makes the same ones."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from random import Random

from omni_discovery import wire

_TOP = (1 << 53) - 1


def rounds(default: int) -> int:
    """How many frames a fuzzer sends: few in ``make test``, many in ``make fuzz``."""
    return int(os.environ.get("OMNI_FUZZ_ROUNDS", str(default)))


def garbage(rng: Random) -> bytes:
    """Bytes that mean nothing, often behind the right version byte."""
    body = rng.randbytes(rng.choice((0, 1, 2, 10, 200, 5000)))
    return body if rng.random() < 0.4 else b"\x01" + body


def nested(rng: Random) -> bytes:
    """Arrays in arrays, or maps in maps, deeper than any reader should follow."""
    return b"\x01" + rng.choice((b"\x91", b"\x81\xa1t", b"\x81\xa6inputs")) * rng.choice((50, 5000, 60_000))


def bent(rng: Random, head: bytes) -> bytes:
    """A right frame with something wrong in its bytes."""
    match rng.randrange(7):
        case 0:
            return head[: rng.randrange(len(head))]
        case 1:
            return head + rng.randbytes(rng.randrange(1, 20))
        case 2:
            return b"\x02" + head[1:]
        case 3:
            start = rng.randrange(len(head))
            return head[:start] + head[start + rng.randrange(1, 8) :]
        case 4:
            return head[:1] + b"\xdd\xff\xff\xff\xff" + head[1:]
        case _:
            flipped = bytearray(head)
            for _ in range(rng.choice((1, 1, 2, 5))):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)


def oversized(rng: Random, message: wire.ToReplica | wire.FromReplica) -> bytes:
    """A frame one byte too long: zeros, or a right message behind padding that a reader would skip."""
    if rng.random() < 0.5:
        return bytes(wire.MAX_HEAD_BYTES + 1)
    padding = wire.MAX_HEAD_BYTES - 10
    head = wire.encode(message)
    return (
        head[:1] + bytes([head[1] + 1]) + b"\xa2zz" + b"\xc6" + padding.to_bytes(4, "big") + bytes(padding) + head[2:]
    )


def odd_batch(rng: Random, messages: Sequence[wire.ToReplica | wire.FromReplica]) -> bytes:
    """Batches that are empty, too long, nested, or end in nonsense."""
    bodies = [wire.encode(message)[1:] for message in messages]
    match rng.randrange(4):
        case 0:
            return b"\x01\x90"
        case 1:
            return b"\x01\xdc" + (wire.MAX_BATCH + 1).to_bytes(2, "big") + bodies[0] * (wire.MAX_BATCH + 1)
        case 2:
            return b"\x01\x91\x91" + bodies[0]
        case _:
            return b"\x01" + bytes([0x90 | (len(bodies[:10]) + 1)]) + b"".join(bodies[:10]) + b"\xc1"


def number(rng: Random, right: int) -> int:
    """A number that is right, nearly right, or far off."""
    return rng.choice((right, right, right, right + 1, max(0, right - 1), 0, _TOP))


def resident_bytes() -> int:
    """How much memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
