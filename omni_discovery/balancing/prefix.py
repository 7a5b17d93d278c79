"""Equal prefixes of prompts to the same replica, by a ring of hashes, as long as it isn't overloaded. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from omni_discovery.balancing.base import Member, Task

#: A replica may have this much more than its share of the load.
_BOUND: Final = 1.25
_DIGESTS: Final = 6
_POINTS_OF_ONE: Final = 8
#: How far a pick looks along the ring before it takes anybody.
_FAR: Final = 256
_CHARS_OF_A_BLOCK: Final = 64
_TOKENS_OF_A_BLOCK: Final = 16
_BLOCKS: Final = 16


class PrefixIndex:
    """A ring with bounded load. Who joins or leaves moves its share of the prefixes and no others.

    The ring keeps who is removed, for it mostly comes back soon; it is made anew when somebody joins.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._points: list[int] = []
        self._owners: list[Member] = []
        #: Members with points on the ring, here or not; and those who have none yet.
        self._on_ring: dict[Member, None] = {}
        self._joining: list[Member] = []
        #: Those who may be picked; a member's ``spot`` is its position.
        self._here: list[Member] = []
        #: What is counted of each in the sums below: load, and worth.
        self._counted: dict[Member, tuple[int, float]] = {}
        self._load, self._worth = 0, 0.0

    def add(self, member: Member) -> None:
        """See PoolIndex."""
        member.spot = len(self._here)
        self._here.append(member)
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
        last = self._here.pop()
        if last is not member:
            self._here[member.spot] = last
            last.spot = member.spot
        self._discount(member)

    def pick(self, task: Task) -> Member | None:
        """See PoolIndex."""
        if not self._here:
            return None
        if self._joining:
            self._join()
        owners, count, here = self._owners, len(self._owners), self._counted
        start = bisect_left(self._points, prefix_hash(task))
        most = _BOUND * (self._load + 1) / self._worth
        for step in range(start, start + min(count, _FAR)):
            member = owners[step % count]
            if member in here and member.load < ceil(most * member.capacity * member.weight):
                return member
        return self._anybody()

    def _anybody(self) -> Member:
        one, other = (self._here[int(self._chance() * len(self._here))] for _ in range(2))
        return min(one, other, key=lambda member: member.load / (member.capacity * member.weight))

    def _count(self, member: Member) -> None:
        load, worth = member.load, member.capacity * member.weight
        self._counted[member] = (load, worth)
        self._load += load
        self._worth += worth

    def _discount(self, member: Member) -> None:
        load, worth = self._counted.pop(member)
        self._load -= load
        # With nobody left nothing is left of what rounding has added up.
        self._worth = self._worth - worth if self._counted else 0.0

    def _join(self) -> None:
        if len(self._on_ring) > 2 * len(self._here) + _POINTS_OF_ONE:
            self._on_ring = dict.fromkeys(member for member in self._on_ring if member in self._counted)
            ring = [(point, member.addr, member) for member in self._on_ring for point in _points(member)]
        else:
            ring = [(point, owner.addr, owner) for point, owner in zip(self._points, self._owners, strict=True)] + [
                (point, member.addr, member) for member in self._joining for point in _points(member)
            ]
        # Two lives of one replica have the same points and are told apart by their addresses.
        ring.sort(key=lambda item: item[:2])
        self._points = [point for point, _, _ in ring]
        self._owners = [owner for _, _, owner in ring]
        self._joining.clear()


def _points(member: Member) -> Iterator[int]:
    """Where a replica stands on the ring: the same in every hub, and again after a restart under the same id."""
    replica_id = member.info.replica_id
    name = str(replica_id) if replica_id >= 0 else member.addr
    for number in range(_DIGESTS):
        digest = blake2b(f"{number}/{name}".encode()).digest()
        for start in range(0, 8 * _POINTS_OF_ONE, 8):
            yield int.from_bytes(digest[start : start + 8], "big")


def prefix_hash(task: Task) -> int:
    """Where a request belongs on the ring, by the leading blocks of its prompt; by its id if it has no prompt.

    Of token ids the first 256 count and of text the first 1024 characters, in whole blocks of 16 and 64; a shorter
    prompt than one block counts as it is. Of a conversation all counts up to the first thing that its user says, so
    that its later turns come to where the first one was.
    """
    inputs = task.get("engine_inputs")
    prefix = _prefix(inputs) if isinstance(inputs, Mapping) else inputs if isinstance(inputs, str) else None
    if not prefix:
        raw = b"id:" + str(task.get("request_id", "")).encode(errors="replace")
    elif isinstance(prefix, str):
        raw = b"text:" + _whole(prefix, _CHARS_OF_A_BLOCK).encode(errors="replace")
    else:
        raw = b"ids:" + ",".join(map(str, _whole(prefix, _TOKENS_OF_A_BLOCK))).encode()
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "big")


def _prefix(inputs: Mapping[str, Any]) -> str | Sequence[int] | None:
    token_ids, prompt, messages = (inputs.get(name) for name in ("prompt_token_ids", "prompt", "messages"))
    if isinstance(token_ids, list | tuple) and token_ids:
        return token_ids
    if isinstance(prompt, str) and prompt:
        return prompt
    return _opening(messages) if isinstance(messages, list | tuple) else None


def _opening(messages: Sequence[Any]) -> str:
    said: list[str] = []
    for message in messages:
        if isinstance(message, Mapping):
            said.append(f"{message.get('role', '')}\n{message.get('content', '')}\n")
            if message.get("role") == "user":
                break
    return "".join(said)


def _whole(prefix: Any, block: int) -> Any:
    length = min(len(prefix), block * _BLOCKS)
    return prefix[: length - length % block] if length >= block else prefix
