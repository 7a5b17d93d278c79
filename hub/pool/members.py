"""Members: the replicas of one stage by input address, how many of them can take work, and their slow start. Pure."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from hub.pool.entry import Entry
from hub.pool.status import ASLEEP_PHASE
from omni_discovery.records.schema import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hub.config import PoolOptions
    from omni_discovery.records.schema import ReplicaInfo

#: A replica in its slow start begins with this part of its weight,
_FIRST_PART: Final = 0.1
#: and reaches all of it in so many steps.
_RAMP_STEPS: Final = 20
#: A replica of weight 0 is not picked at all; all others can be divided by.
_LEAST_WEIGHT: Final = 1e-6


class Members:
    """The entries of one stage's replicas, and counts over them. Call ``recount`` after each change of an entry."""

    def __init__(self, options: PoolOptions) -> None:
        self._labels = options.labels
        self._load_fresh_s = options.load_fresh_s
        #: Entries by input address, in order of registration.
        self.entries: dict[str, Entry] = {}
        #: How many replicas are registered or held, and how many can take work.
        self.listed_count = 0
        self.pickable_count = 0
        #: The sum of the capacities of the replicas that can take work.
        self.slots = 0
        #: The pickable replicas that give credits, by address.
        self.credit_replicas: dict[str, Entry] = {}
        self._credit_addrs: tuple[str, ...] | None = None
        #: Since when ``pickable_count`` has been above 0 at every moment, or has been 0.
        self.availability_since_s = -inf
        #: How many hubs share the replicas, this one included.
        self.hubs = 1

    def __repr__(self) -> str:
        return f"Members({self.pickable_count} pickable of {len(self.entries)}, {self.slots} slots)"

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def upsert(self, info: ReplicaInfo, now_s: float) -> Entry:
        """Store a record. A report from a frame younger than ``load_fresh_s`` wins over the record's queue length."""
        is_local = all(info.labels.get(name) == value for name, value in self._labels.items())
        entry = self.entries.get(info.input_addr)
        if entry is None:
            entry = self.entries[info.input_addr] = Entry(info, is_local, now_s)
            entry.report(info.queue_length, self.hubs)
        else:
            entry.info, entry.registered, entry.held, entry.is_local = info, True, False, is_local
            if entry.reported_at_s is None or now_s - entry.reported_at_s > self._load_fresh_s:
                entry.report(info.queue_length, self.hubs)
        if entry.pickable:
            self.slots += info.capacity - entry.capacity
        entry.capacity = info.capacity
        return entry

    def recount(self, entry: Entry, now_s: float) -> bool:
        """Bring all counts up to date after a change of an entry's record or session; return whether any changed."""
        listed = entry.registered or entry.held
        pickable = listed and entry.answers and entry.info.takes_new_work and not entry.refused
        changed = listed != entry.listed or pickable != entry.pickable
        if listed != entry.listed:
            entry.listed = listed
            self.listed_count += 1 if listed else -1
        if pickable != entry.pickable:
            before = self.pickable_count
            entry.pickable = pickable
            self.pickable_count += 1 if pickable else -1
            if not (before and self.pickable_count):
                self.availability_since_s = now_s
            self.slots += entry.capacity if pickable else -entry.capacity
        gives_credits = pickable and entry.uses_credits
        if gives_credits != (entry.addr in self.credit_replicas):
            self._credit_addrs = None
            if gives_credits:
                self.credit_replicas[entry.addr] = entry
            else:
                del self.credit_replicas[entry.addr]
            changed = True
        return changed

    def get(self, addr: str) -> ReplicaInfo | None:
        """The record of the replica at an address, listed or with work still in flight; None for an unknown one."""
        entry = self.entries.get(addr)
        return None if entry is None else entry.info

    def answers(self, addr: str) -> bool:
        """Whether the replica at an address answers, listed or not."""
        entry = self.entries.get(addr)
        return entry is not None and entry.answers

    def serviceable(self, addr: str) -> bool:
        """Whether the replica at an address can take work, full or not."""
        entry = self.entries.get(addr)
        return entry is not None and entry.pickable

    def end_silence(self, addr: str) -> None:
        """The replica has answered a dispatch. Does nothing for an unknown one."""
        entry = self.entries.get(addr)
        if entry is not None:
            entry.silence.end()

    def in_flight(self, addr: str) -> list[str]:
        """The ids of the requests whose work is at an address, in the order of their picks."""
        entry = self.entries.get(addr)
        return [] if entry is None else list(entry.in_flight)

    def credits(self, addr: str) -> int:
        """How many unspent credits of a replica this hub has."""
        entry = self.entries.get(addr)
        return 0 if entry is None else entry.credits

    def report_age_s(self, addr: str, now_s: float) -> float | None:
        """How old a replica's last report in a frame is; None before the first."""
        entry = self.entries.get(addr)
        return None if entry is None or entry.reported_at_s is None else now_s - entry.reported_at_s

    @property
    def registered_count(self) -> int:
        """How many replicas the registry lists."""
        return sum(entry.registered for entry in self.entries.values())

    @property
    def held_count(self) -> int:
        """How many replicas are held: still picked, though gone from the registry."""
        return sum(entry.held for entry in self.entries.values())

    @property
    def serving_since_s(self) -> float | None:
        """Since when some replica could take work at every moment; None while none can."""
        return self.availability_since_s if self.pickable_count else None

    @property
    def unavailable_since_s(self) -> float | None:
        """Since when no replica can take work; None while one can."""
        return None if self.pickable_count else self.availability_since_s

    def credit_addrs(self) -> tuple[str, ...]:
        """The addresses of the pickable replicas that give credits."""
        if self._credit_addrs is None:
            self._credit_addrs = tuple(self.credit_replicas)
        return self._credit_addrs

    def serviceable_count(self, addrs: Collection[str]) -> int:
        """How many of the replicas at different addresses can take work."""
        entries = (self.entries.get(addr) for addr in addrs)
        return sum(entry is not None and entry.pickable for entry in entries)

    @property
    def is_one_starting(self) -> bool:
        """Whether the registry shows a replica that is being started."""
        infos = (entry.info for entry in self.entries.values() if entry.registered)
        return any(info.status is ReplicaStatus.STARTING and info.phase != ASLEEP_PHASE for info in infos)

    def drop_if_idle(self, entry: Entry) -> bool:
        """Forget an entry that is not listed and has nothing in flight; return whether it is gone."""
        if entry.registered or entry.held or entry.in_flight:
            return False
        del self.entries[entry.addr]
        return True


class SlowStart:
    """Slow start: the weight of a new replica rises in steps, if other replicas have served for a while."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        #: Entries on their way to full weight.
        self.warming: dict[str, Entry] = {}
        self._stepped_at_s = 0.0

    def begin(self, entry: Entry, serving_since_s: float | None, now_s: float) -> None:
        """Begin the slow start of a replica that has answered for the first time.

        ``serving_since_s``: since when other replicas have been pickable; None if there are none.
        """
        entry.first_up_s = now_s
        # Where no replica has served for that long the whole pool is new.
        if self._length_s > 0 and serving_since_s is not None and now_s - serving_since_s >= self._length_s:
            entry.warm_at_s = now_s + self._length_s
            self.warming[entry.addr] = entry

    def weigh(self, entry: Entry, now_s: float) -> None:
        """Set the entry's weight: the part of it that its slow start allows at ``now_s``."""
        weight = max(entry.info.weight, _LEAST_WEIGHT)
        if entry.warm_at_s is not None:
            left = (entry.warm_at_s - now_s) / self._length_s
            if left > 0:
                weight *= 1.0 - (1.0 - _FIRST_PART) * min(1.0, left)
            else:
                entry.warm_at_s = None
                self.warming.pop(entry.addr, None)
        entry.weight = weight

    @property
    def next_step_s(self) -> float | None:
        """When ``step`` is due, monotonic; None while no replica warms up."""
        return self._stepped_at_s + self._length_s / _RAMP_STEPS if self.warming else None

    def step(self, now_s: float) -> list[Entry]:
        """Update the weights of the entries in slow start, and return them; do nothing before ``next_step_s``."""
        next_s = self.next_step_s
        if next_s is None or now_s < next_s:
            return []
        self._stepped_at_s = now_s
        entries = list(self.warming.values())
        for entry in entries:
            self.weigh(entry, now_s)
        return entries

    def forget(self, addr: str) -> None:
        """Drop a replica that is gone or that runs as a new process."""
        self.warming.pop(addr, None)
