"""ReceiptBook: answers why, from receipts of requests that ended or are under way, and the pools as they are now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from hub.pool.snapshots import candidate_of, row_of, why_out
from hub.pool.status import slow_ones
from hub.receipts.raw import (
    RETRY_BUDGET,
    SLOT,
    TRIAL,
    AskedRequest,
    DispatchMark,
    line_of,
    picks_of,
    receipt_of,
    why_waits,
)
from hub.receipts.ring import ReceiptRing, meant
from hub.request.state import Phase
from omni_discovery.receipts.receipt import (
    Candidate,
    Receipt,
    ReceiptLine,
    ReplicaReport,
    StageAttempt,
    WaitingWork,
)
from omni_discovery.records.schema import ReplicaStatus

if TYPE_CHECKING:
    from hub.pool.entry import Entry
    from hub.pool.stage_pool import StagePool
    from hub.pool.versions import Pools
    from hub.request.machine import RequestMachine

#: How many of the last receipts are looked through for the picks of one replica.
_MOST_SEARCHED: Final = 2000
#: Waiting work, and requests, that one answer names at most; receipts of one name.
MOST_LISTED: Final = 1000
MOST_FOUND: Final = 100
#: An answer that lies for less is on its way.
_UNREAD_S: Final = 5.0


class RunningRequest(Protocol):
    """One request under way; ``Active`` has this form."""

    @property
    def request(self) -> AskedRequest:
        """What was asked."""

    @property
    def machine(self) -> RequestMachine:
        """How far it is."""

    @property
    def pools(self) -> Mapping[int, StagePool]:
        """The pools that its stages are picked from."""

    @property
    def marks(self) -> list[DispatchMark]:
        """When its work was sent, or had to wait."""


class ReceiptBook:
    """Used on the hub's loop. ``encode`` gives the receipt of a request under way.

    ``unread_since_s`` tells, by request id, since when the oldest output waits for its client, monotonic; infinity
    where none does.
    """

    def __init__(
        self,
        hub_id: str,
        policy: str,
        ring: ReceiptRing | None,
        pools: Pools,
        running: Callable[[], Iterable[RunningRequest]],
        encode: Callable[[str], bytes],
        unread_since_s: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._hub_id = hub_id
        self._policy = policy
        self._ring = ring
        self._pools = pools
        self._running = running
        self._encode = encode
        self._unread_since_s = unread_since_s

    @property
    def is_kept(self) -> bool:
        """Whether this hub keeps receipts at all."""
        return self._ring is not None

    def find(self, name: str) -> list[Receipt]:
        """The receipts of the requests that a user may mean by a name, up to 100, the one that came last first."""
        asked = [each.request for each in self._running()]
        places = meant([(each.request_id, each.shown_id, each.label) for each in asked], name)
        encoded = [self._encode(asked[place].request_id) for place in places[:MOST_FOUND]]
        encoded += [] if self._ring is None else self._ring.find(name, MOST_FOUND - len(encoded))
        receipts = [receipt_of(each, self._hub_id, self._policy) for each in encoded]
        return sorted(map(self._with_places, receipts), key=lambda each: each.received_at, reverse=True)

    def latest(self, limit: int, *, failed: bool = False) -> list[ReceiptLine]:
        """The requests that ended last, the one that came last first."""
        if self._ring is None:
            return []
        rings = [self._ring.failed()] if failed else [self._ring.failed(), self._ring.served()]
        lines = [line_of(each, self._hub_id) for ring in rings for each in islice(ring, limit)]
        return sorted(lines, key=lambda each: each.received_at, reverse=True)[:limit]

    def waiting(self, limit: int = MOST_LISTED) -> list[WaitingWork]:
        """The work that can't go on now, that which waits for the longest time first."""
        running = list(self._running())
        found = [work for each in running for work in self._waits_of(each)]
        found += self._unread({each.request.request_id: each for each in running})
        return sorted(found, key=lambda each: -each.since_s)[:limit]

    def _waits_of(self, each: RunningRequest) -> Iterable[WaitingWork]:
        request, now_s = each.request, time.perf_counter()
        named = partial(WaitingWork, request_id=request.request_id, shown_id=request.shown_id, label=request.label)
        segments = each.machine.segments
        if segments is not None and segments.waits_for_client:
            what = "the next segment of its input, from its client"
            yield named(stage=request.plan.stages[0], what=what)
        for stage_id, run in each.machine.runs.items():
            if run.phase is Phase.DISPATCHED and run.replica is None:
                marks = [mark for mark in each.marks if (mark.stage_id, mark.attempt) == (stage_id, run.attempt)]
                what = marks[-1].what if marks else SLOT
                if what == SLOT:
                    text = why_waits(each.pools[stage_id].core.snapshot_of_wait(run.avoid))
                else:
                    text = {RETRY_BUDGET: "the retry budget", TRIAL: "a trial"}.get(what, what)
                since_s = now_s - run.dispatched_at_s
                yield named(stage=stage_id, attempt=run.attempt, since_s=since_s, what=text)

    def _unread(self, running: Mapping[str, RunningRequest]) -> Iterable[WaitingWork]:
        """The requests whose client lets its answer lie; of one that has ended, only the client's name is known."""
        now_s = time.monotonic()
        for request_id, since_s in self._unread_since_s().items():
            if now_s - since_s < _UNREAD_S:
                continue
            each = running.get(request_id)
            yield WaitingWork(
                request_id=request_id,
                shown_id=request_id.rpartition("~")[0] if each is None else each.request.shown_id,
                label="" if each is None else each.request.label,
                since_s=now_s - since_s,
                what="its client, which does not read what is there of its answer",
            )

    def replica(self, stage_id: int, replica_id: int) -> ReplicaReport | None:
        """Why a replica gets what it gets; None if this hub knows none of that name. Raise KeyError for no stage."""
        found = self._entries(stage_id, replica_id)
        if not found:
            return None
        # Of several processes under one name, the one that could be picked, else the youngest.
        pool, entry = max(found, key=lambda item: (item[1].pickable, item[1].info.epoch))
        counts, chosen, last_at = self._searched(stage_id, entry)
        return ReplicaReport(
            now=_with_place(candidate_of(row_of(entry, ()), stage_id), entry),
            hub=self._hub_id,
            in_flight=len(entry.in_flight),
            picks=counts.total(),
            chosen=chosen,
            passed_over=counts[""] - chosen,
            left_out={reason: count for reason, count in counts.items() if reason},
            last_chosen_at=last_at,
            why=why_little(pool, entry, counts, chosen),
        )

    def known(self, stage_id: int) -> list[str]:
        """The replicas of a stage that this hub knows. Raise KeyError for an unknown stage."""
        entries = [entry for pool in self._pools.of_stage(stage_id) for entry in pool.core.members]
        return [f"{stage_id}/{each}" for each in sorted({entry.info.replica_id for entry in entries})]

    def _entries(self, stage_id: int, replica_id: int) -> list[tuple[StagePool, Entry]]:
        pools = self._pools.of_stage(stage_id)
        return [(pool, each) for pool in pools for each in pool.core.members if each.info.replica_id == replica_id]

    def _searched(self, stage_id: int, entry: Entry) -> tuple[Counter[str], int, float | None]:
        """Why it could not be picked (empty: it could) in the last picks of its stage; how many chose it, the last."""
        counts: Counter[str] = Counter()
        chosen, last_at = 0, None
        rings = () if self._ring is None else (self._ring.failed(), self._ring.served())
        for encoded in (each for ring in rings for each in islice(ring, _MOST_SEARCHED)):
            for stage, at, chosen_id, rows in picks_of(encoded):
                row = next((row for row in rows if row[:2] == (entry.info.replica_id, entry.info.epoch)), None)
                if stage != stage_id or row is None:
                    continue
                counts[row[10]] += 1
                if chosen_id == entry.info.replica_id:
                    chosen, last_at = chosen + 1, max(at, last_at or 0.0)
        return counts, chosen, last_at

    def _with_places(self, receipt: Receipt) -> Receipt:
        """The receipt with the hosts and versions of replicas that are still known."""
        return msgspec.structs.replace(receipt, attempts=[self._placed(each) for each in receipt.attempts])

    def _placed(self, attempt: StageAttempt) -> StageAttempt:
        picking = attempt.picking
        if picking is None or attempt.stage not in self._pools:
            return attempt
        known = {
            (entry.info.name, entry.info.epoch): entry
            for pool in self._pools.of_stage(attempt.stage)
            for entry in pool.core.members
        }
        candidates = [
            _with_place(each, known[name]) if not each.host and (name := (each.replica, each.epoch)) in known else each
            for each in picking.candidates
        ]
        return msgspec.structs.replace(attempt, picking=msgspec.structs.replace(picking, candidates=candidates))


def _with_place(candidate: Candidate, entry: Entry) -> Candidate:
    return msgspec.structs.replace(candidate, host=entry.info.host, version=entry.info.version)


def why_little(pool: StagePool, entry: Entry, counts: Counter[str], chosen: int) -> list[str]:
    """Why a replica gets nothing, or less than others, each with what to do."""
    name, out = entry.info.name, why_out(entry, ())
    reasons = [f"{out}{_remedy(entry, out)}"] if out else []
    own_id = entry.info.replica_id
    slow = [each for each in slow_ones(pool.core.members, time.monotonic()) if each.replica_id == own_id]
    reasons += [f"slow: {each.reason}; to give it less: omni weight {name} 0.5" for each in slow]
    if entry.info.reason and entry.info.status is ReplicaStatus.UP:
        reasons.append(f"its record says: {entry.info.reason}")
    others = [each for each in pool.core.members if each is not entry and each.tier >= 0]
    if entry.tier > 0 and any(each.tier == 0 for each in others):
        reasons.append("others have the labels that this hub prefers (--label), and free slots: they go first")
    if not out and entry.weight < entry.info.weight:
        reasons.append(f"slow start: it is new, and {entry.weight:g} of its weight {entry.info.weight:g} counts so far")
    elif not out and others and entry.weight < max(each.weight for each in others):
        most = max(each.weight for each in others)
        reasons.append(f"its weight is {entry.weight:g}, that of others up to {most:g}: omni weight {name} {most:g}")
    if not out and others:
        share, least = _share(entry), min(map(_share, others))
        if share > least:
            reasons.append(f"it is busier than others: {share:.2f} of its slots are taken, elsewhere {least:.2f}")
    if not counts.total():
        reasons.append("no request that this hub keeps a receipt of was picked a replica of its stage since it came")
    elif not out and not chosen:
        reasons.append(f"it was free for {counts['']} of the last picks, and the policy chose others")
    return reasons


def _share(entry: Entry) -> float:
    return entry.load / max(1, entry.capacity)


def _remedy(entry: Entry, out: str) -> str:
    name = entry.info.name
    if out.startswith("ejected"):
        return ": its failures are in its log and in 'omni history'; it is tried again by itself"
    if out == "cordoned":
        return f": omni cordon {name} --undo"
    if out.startswith("of weight 0"):
        return f": omni weight {name} 1"
    if out.startswith(("without a session", "unusable", "refused", "with an error")):
        return ": omni doctor"
    return ""
