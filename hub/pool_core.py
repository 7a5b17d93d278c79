"""One stage as a hub sees it: who is registered, who answers, what is in flight where. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from omni_discovery.messages import ReplicaInfo


@dataclass(slots=True)
class _Entry:
    info: ReplicaInfo
    #: Whether the registry lists it. An entry that is not listed stays only while requests are in flight there.
    registered: bool = True
    #: Whether it is served though the registry lists it no more.
    held: bool = False
    #: Whether its data-plane session is up.
    answers: bool = False
    #: Requests sent there and not finished, in order; true once the replica has accepted them.
    in_flight: dict[str, bool] = field(default_factory=dict)
    #: The part of the last report that is not this hub's own work.
    others: int = 0
    #: When a frame last brought a report, monotonic; None before the first.
    reported_at_s: float | None = None
    #: ``info`` with the fresh estimate; None when it has to be made anew.
    listed: ReplicaInfo | None = None

    @property
    def pickable(self) -> bool:
        return (self.registered or self.held) and self.answers and self.info.takes_new_work

    def estimated(self) -> ReplicaInfo:
        if self.listed is None:
            self.listed = replace(self.info, queue_length=self.others + len(self.in_flight))
        return self.listed

    def report(self, queue_length: int) -> None:
        # What is sent but not yet accepted can't be in the replica's count.
        own = sum(self.in_flight.values())
        self.others, self.listed = max(0, queue_length - own), None


class PoolCore:
    """Replicas of one stage by input address, and the bindings of requests to them."""

    def __init__(self, load_fresh_s: float) -> None:
        self._load_fresh_s = load_fresh_s
        #: In order of registration, which is what a round robin goes by.
        self._entries: dict[str, _Entry] = {}
        #: Input address by request. Each binding is also in that entry's ``in_flight``.
        self._bindings: dict[str, str] = {}

    # ---- membership

    def upsert(self, info: ReplicaInfo, now_s: float) -> None:
        """The registry lists a replica. A report from a frame younger than ``load_fresh_s`` wins over the record's."""
        entry = self._entries.get(info.input_addr)
        if entry is None:
            entry = self._entries[info.input_addr] = _Entry(info)
            entry.report(info.queue_length)
            return
        entry.info, entry.registered, entry.held, entry.listed = info, True, False, None
        if entry.reported_at_s is None or now_s - entry.reported_at_s > self._load_fresh_s:
            entry.report(info.queue_length)

    def remove(self, addr: str) -> None:
        """The registry lists it no more: no picks. What is in flight there goes on. Unknown addresses are fine."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.registered = entry.held = False
            self._forget_if_idle(addr, entry)

    def hold(self, addr: str) -> None:
        """The registry lists it no more, and is not believed: picks go on while it answers. Until upsert or remove."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.registered, entry.held = False, True

    def session_up(self, addr: str) -> None:
        """The replica answers."""
        if addr in self._entries:
            self._entries[addr].answers = True

    def session_down(self, addr: str) -> None:
        """The replica does not answer: no picks."""
        if addr in self._entries:
            self._entries[addr].answers = False

    def report(self, addr: str, queue_length: int, now_s: float) -> None:
        """A frame told the replica's queue length."""
        entry = self._entries.get(addr)
        if entry is not None:
            entry.reported_at_s = now_s
            entry.report(queue_length)

    # ---- picking

    def candidates(self, avoid: Collection[str] = ()) -> list[ReplicaInfo]:
        """Who can take work and is not in ``avoid``; ``queue_length`` is this hub's estimate of now."""
        return [entry.estimated() for addr, entry in self._entries.items() if entry.pickable and addr not in avoid]

    def answers(self, addr: str) -> bool:
        """Whether the replica at that address answers, listed or not."""
        entry = self._entries.get(addr)
        return entry is not None and entry.answers

    def serviceable(self, addr: str) -> bool:
        """Whether the replica at that address can take work."""
        entry = self._entries.get(addr)
        return entry is not None and entry.pickable

    def get(self, addr: str) -> ReplicaInfo | None:
        """The replica at that address, as last heard of."""
        entry = self._entries.get(addr)
        return None if entry is None else entry.info

    # ---- bindings

    def bind(self, request_id: str, addr: str) -> None:
        """Work of the request is in flight at ``addr``; a former binding ends. Raise ValueError if nobody is there."""
        if addr not in self._entries:
            raise ValueError(f"no replica has the address {addr!r}")
        if self._bindings.get(request_id) == addr:
            return
        self.release(request_id)
        self._bindings[request_id] = addr
        entry = self._entries[addr]
        entry.in_flight[request_id] = False
        entry.listed = None

    def bound(self, request_id: str) -> str | None:
        """Where the request's work of this stage is."""
        return self._bindings.get(request_id)

    def accepted(self, request_id: str) -> None:
        """The replica has the work: its reports count it from now on."""
        addr = self._bindings.get(request_id)
        if addr is not None:
            self._entries[addr].in_flight[request_id] = True

    def release(self, request_id: str) -> str | None:
        """The request's work of this stage is over; return where it was. Unknown requests are fine."""
        addr = self._bindings.pop(request_id, None)
        if addr is not None:
            entry = self._entries[addr]
            del entry.in_flight[request_id]
            entry.listed = None
            self._forget_if_idle(addr, entry)
        return addr

    def invalidate(self, addr: str) -> list[str]:
        """End every binding to ``addr``; return exactly the requests that had one."""
        request_ids = list(self._entries[addr].in_flight) if addr in self._entries else []
        for request_id in request_ids:
            self.release(request_id)
        return request_ids

    def in_flight(self, addr: str) -> list[str]:
        """The requests whose work is at ``addr``."""
        entry = self._entries.get(addr)
        return [] if entry is None else list(entry.in_flight)

    # ---- counts

    def registered_count(self) -> int:
        """How many replicas the registry lists."""
        return sum(entry.registered for entry in self._entries.values())

    def held_count(self) -> int:
        """How many are served though the registry lists them no more."""
        return sum(entry.held for entry in self._entries.values())

    def pickable_count(self) -> int:
        """How many can take work."""
        return sum(entry.pickable for entry in self._entries.values())

    def _forget_if_idle(self, addr: str, entry: _Entry) -> None:
        if not (entry.registered or entry.held or entry.in_flight):
            del self._entries[addr]
