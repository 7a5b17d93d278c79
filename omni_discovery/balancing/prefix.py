"""Consistent hashing with bounded loads: equal prefixes of prompts go to the same replica. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from omni_discovery.balancing.base import Member, Task

#: A replica may have so many times its share of the load.
_BOUND: Final = 1.25
_DIGESTS: Final = 6
_POINTS_OF_A_DIGEST: Final = 8
#: How many points of the ring a pick looks at before it takes the better of two random members.
_MAX_STEPS: Final = 256
_CHARS_OF_A_BLOCK: Final = 64
_TOKENS_OF_A_BLOCK: Final = 16
_BLOCKS: Final = 16


class PrefixIndex:
    """A hash ring with bounded loads. A member that joins or leaves moves its share of the prefixes and no others.

    The ring keeps the points of removed members, for most come back soon; it is sorted again when a new one joins.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        #: See KeyedIndex.
        self.chance = chance
        self._points: list[int] = []
        self._owners: list[Member] = []
        #: Members with points on the ring, removed ones as well; and members that are to get theirs at the next pick.
        self._on_ring: dict[Member, None] = {}
        self._joining: list[Member] = []
        #: The members that may be picked, each at its ``position``.
        self._members: list[Member] = []
        #: What of each member is in the sums below: its load, and capacity * weight.
        self._counted: dict[Member, tuple[int, float]] = {}
        self._total_load, self._total_worth = 0, 0.0
        #: The point of the ring where the last pick began, and the worth of all members then: less than the prompt's
        #: hash says of it, and enough to repeat the pick.
        self.basis: tuple[float, ...] = ()

    def add(self, member: Member) -> None:
        """See PoolIndex."""
        member.position = len(self._members)
        self._members.append(member)
        self._count(member)
        if member not in self._on_ring:
            self._on_ring[member] = None
            self._joining.append(member)

    def update(self, member: Member) -> None:
        """See PoolIndex."""
        self._discount(member)
        self._count(member)

    def remove(self, member: Member) -> None:
        """See PoolIndex."""
        last = self._members.pop()
        if last is not member:
            self._members[member.position] = last
            last.position = member.position
        self._discount(member)

    def pick(self, task: Task) -> Member | None:
        """See PoolIndex."""
        return self.pick_from(prefix_hash(task)) if self._members else None

    def restore_basis(self, basis: tuple[float, ...]) -> None:
        """Have the next ``pick_from`` go by the ``basis`` of another index with the same members."""
        # The sum of another index was added up in another order, and may be another in its last digits.
        self._total_worth = basis[1]

    def pick_from(self, point: float) -> Member:
        """Choose from this point of the ring on; the index must not be empty."""
        if self._joining:
            self._join()
        owners, count, counted = self._owners, len(self._owners), self._counted
        start = bisect_left(self._points, point)
        self.basis = self._points[start % count], self._total_worth
        most = _BOUND * (self._total_load + 1) / self._total_worth
        for step in range(start, start + min(count, _MAX_STEPS)):
            member = owners[step % count]
            if member in counted and member.load < ceil(most * member.capacity * member.weight):
                return member
        return self._pick_random()

    def _pick_random(self) -> Member:
        one, other = (self._members[int(self.chance() * len(self._members))] for _ in range(2))
        return min(one, other, key=lambda member: member.load / (member.capacity * member.weight))

    def _count(self, member: Member) -> None:
        load, worth = member.load, member.capacity * member.weight
        self._counted[member] = (load, worth)
        self._total_load += load
        self._total_worth += worth

    def _discount(self, member: Member) -> None:
        load, worth = self._counted.pop(member)
        self._total_load -= load
        # Without members no rounding error may be left.
        self._total_worth = self._total_worth - worth if self._counted else 0.0

    def _join(self) -> None:
        if len(self._on_ring) > 2 * len(self._members) + _POINTS_OF_A_DIGEST:
            self._on_ring = dict.fromkeys(member for member in self._on_ring if member in self._counted)
            ring = [(point, member.addr, member) for member in self._on_ring for point in _points(member)]
        else:
            ring = [(point, owner.addr, owner) for point, owner in zip(self._points, self._owners, strict=True)] + [
                (point, member.addr, member) for member in self._joining for point in _points(member)
            ]
        # Two processes of one replica id have the same points; their addresses give them an order.
        ring.sort(key=lambda item: item[:2])
        self._points = [point for point, _, _ in ring]
        self._owners = [owner for _, _, owner in ring]
        self._joining.clear()


def _points(member: Member) -> Iterator[int]:
    """The points of a replica on the ring: the same in every hub, and after a restart under the same id."""
    replica_id = member.info.replica_id
    name = str(replica_id) if replica_id >= 0 else member.addr
    for number in range(_DIGESTS):
        digest = blake2b(f"{number}/{name}".encode()).digest()
        for start in range(0, 8 * _POINTS_OF_A_DIGEST, 8):
            yield int.from_bytes(digest[start : start + 8], "big")


def prefix_hash(task: Task) -> int:
    """The 64-bit hash of a request's prefix: the leading blocks of its prompt, or its id if it has no prompt.

    The first 256 token ids count, or the first 1024 characters, in whole blocks of 16 and 64; a prompt shorter than one
    block counts as it is. Of a conversation everything up to the first message of the user counts, so that its later
    turns go to the same replica.
    """
    inputs = task.get("engine_inputs")
    prefix = _prefix(inputs) if isinstance(inputs, Mapping) else inputs if isinstance(inputs, str) else None
    if not prefix:
        raw = b"id:" + str(task.get("request_id", "")).encode(errors="replace")
    elif isinstance(prefix, str):
        raw = b"text:" + _whole_blocks(prefix, _CHARS_OF_A_BLOCK).encode(errors="replace")
    else:
        raw = b"ids:" + ",".join(map(str, _whole_blocks(prefix, _TOKENS_OF_A_BLOCK))).encode()
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "big")


def _prefix(inputs: Mapping[str, Any]) -> str | Sequence[int] | None:
    token_ids, prompt, messages = (inputs.get(name) for name in ("prompt_token_ids", "prompt", "messages"))
    if isinstance(token_ids, list | tuple) and token_ids:
        return token_ids
    if isinstance(prompt, str) and prompt:
        return prompt
    return _opening(messages) if isinstance(messages, list | tuple) else None


def _opening(messages: Sequence[Any]) -> str:
    texts: list[str] = []
    for message in messages:
        if isinstance(message, Mapping):
            texts.append(f"{message.get('role', '')}\n{message.get('content', '')}\n")
            if message.get("role") == "user":
                break
    return "".join(texts)


def _whole_blocks(prefix: Any, block: int) -> Any:
    length = min(len(prefix), block * _BLOCKS)
    return prefix[: length - length % block] if length >= block else prefix
