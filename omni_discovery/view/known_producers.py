"""KnownProducers: the addresses at which registered replicas of earlier stages hand over, for a replica that fetches.

A hub names the address of each hand-off, and a hub may be hostile: what no producer has registered is not connected to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from omni_discovery.records.handoff_addresses import ANY_PORT, LONGEST_HOST, Address, kv_hosts, registered_address
from omni_discovery.records.schema import ReplicaInfo

#: Addresses count for so long after they were last seen: a hand-off may outlive its producer's record.
_KEEP_S: Final = 900.0
#: So many are kept, those that were seen last: as many as all replicas can have.
_MOST_PLACES: Final = 200_000
#: The registry is read at most so often for addresses that are not known.
_ASK_EVERY_S: Final = 1.0

#: From stage, to stage, host, port; of KV: from stage, -1, host, any port.
_Place = tuple[int, int, object, object]
_KV: Final = -1


class KnownProducers:
    """Filled by the registry's thread, asked by those that fetch.

    ``edges`` are the (from stage, to stage) by which hand-offs come in.
    """

    def __init__(self, edges: Collection[tuple[int, int]], now: Callable[[], float] = time.monotonic) -> None:
        self._edges = frozenset(edges)
        self._now = now
        self._changed = threading.Condition()
        #: When each place was last seen in the registry.
        self._seen_s: dict[_Place, float] = {}
        #: Whose each of them is: the replica's that has registered it first, of those that do.
        self._owners: dict[_Place, str] = {}
        #: How often the registry was read, or could not be.
        self._reads = 0
        #: When it was asked to be read last, and how often it had been read then.
        self._reads_when_asked = -1
        self._asked_at_s = float("-inf")
        self._ask: Callable[[], object] = lambda: None

    @property
    def stage_ids(self) -> list[int]:
        """The stages whose replicas hand over to this one."""
        return sorted({from_stage for from_stage, _ in self._edges})

    def on_miss(self, ask: Callable[[], object]) -> None:
        """Have ``ask`` called, from a thread that fetches, when the registry should be read at once."""
        self._ask = ask

    def apply_records(self, infos: Iterable[ReplicaInfo]) -> None:
        """The registry was read, and holds these replicas. It takes its time: call it in a thread of its own."""
        now_s = self._now()
        owners: dict[_Place, str] = {}
        for info in sorted(infos, key=lambda info: info.epoch):
            for place in self._places_of(info):
                owners.setdefault(place, info.name)
        with self._changed:
            # Those that were seen last are the last.
            former = [(place, at_s) for place, at_s in self._seen_s.items() if place not in owners]
            room = max(0, _MOST_PLACES - len(owners))
            kept = {
                place: at_s for place, at_s in former[len(former) - min(len(former), room) :] if now_s - at_s < _KEEP_S
            }
            self._seen_s = kept | dict.fromkeys(owners, now_s)
            self._owners = {place: self._owners[place] for place in kept} | owners
            self._reads += 1
            self._changed.notify_all()

    def read_failed(self) -> None:
        """The registry could not be read; what was known still counts."""
        with self._changed:
            self._reads += 1
            self._changed.notify_all()

    def hands_over_at(self, from_stage: int, to_stage: int, named: Address, timeout_s: float) -> bool:
        """Whether a registered replica of ``from_stage`` hands over at this address; waits for news of the registry."""
        places = [(from_stage, to_stage, *named), (from_stage, to_stage, named[0], ANY_PORT)]
        return self._is_known(places, timeout_s)

    def owner_of(self, from_stage: int, to_stage: int, named: Address) -> str:
        """The replica that hands over at an address which is known; empty for none."""
        places = [(from_stage, to_stage, *named), (from_stage, to_stage, named[0], ANY_PORT)]
        with self._changed:
            return next((self._owners[place] for place in places if place in self._owners), "")

    def has_kv_at(self, from_stage: int, host: object, timeout_s: float) -> bool:
        """Whether the KV cache of a registered replica of ``from_stage`` may be fetched from this host."""
        return self._is_known([(from_stage, _KV, host, ANY_PORT)], timeout_s)

    def _is_known(self, places: list[_Place], timeout_s: float) -> bool:
        with self._changed:
            if self._knows(places):
                return True
            now_s, reads = self._now(), self._reads
            if now_s - self._asked_at_s < _ASK_EVERY_S:
                if reads > self._reads_when_asked:
                    return False
                # Another thread has asked, and what it gets may be the answer here, too.
                self._changed.wait_for(lambda: self._reads > reads, timeout_s)
                return self._knows(places)
            self._asked_at_s, self._reads_when_asked = now_s, reads
        self._ask()
        with self._changed:
            self._changed.wait_for(lambda: self._reads > reads, timeout_s)
            return self._knows(places)

    def _knows(self, places: list[_Place]) -> bool:
        try:
            return any(place in self._seen_s for place in places)
        except TypeError:
            # A host or port from a hub may be a list or a mapping.
            return False

    def _places_of(self, info: ReplicaInfo) -> list[_Place]:
        outward = [to_stage for from_stage, to_stage in self._edges if from_stage == info.stage_id]
        places: list[_Place] = [
            (info.stage_id, to_stage, host, port)
            for to_stage in outward
            for host, port in [registered_address(info, to_stage)]
            if _is_short(host) and (port is None or isinstance(port, int) or _is_short(port))
        ]
        return places + [(info.stage_id, _KV, host, ANY_PORT) for host in kv_hosts(info)]


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_HOST
