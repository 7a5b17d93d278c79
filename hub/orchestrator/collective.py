"""Collective calls: one RPC to every replica of some stages, with a deadline and one result for each replica.

A replica that fails or does not answer in time is an entry with an error; the call itself does not fail. ``Correlator``
keeps which replicas still have to answer which call, ``Collective`` sends the calls and their results.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hub.config import SendFailedError
from hub.replicas.events import Controlled, ProcessGone, SessionDown
from omni_discovery import wire
from omni_discovery.errors import OverloadedError, RequestError, WireError

if TYPE_CHECKING:
    from hub.metrics import HubMetrics
    from hub.pool.versions import Pools
    from hub.replicas.events import ReplicaLink
    from hub.replicas.membership import Membership
    from hub.replicas.stage_client import StageClient
    from omni_discovery.records.schema import ReplicaInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """The result of one replica, or why there is none; ``error`` begins with the error's type."""

    stage_id: int
    replica_id: int
    ok: bool
    #: Built of the types that msgpack has.
    result: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """One replica that is called. ``session`` identifies where its answer will come from."""

    stage_id: int
    replica_id: int
    session: Hashable


@dataclass(slots=True)
class _Call:
    call_id: str
    #: The targets that have not answered, by session.
    pending: dict[Hashable, Target]
    results: list[ReplicaResult] = field(default_factory=list)


class Correlator:
    """Every target of a call gets exactly one result; a call is done once all have theirs."""

    def __init__(self) -> None:
        self._serial = 0
        #: By wire id, which is never used twice.
        self._calls: dict[str, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call_id: str, targets: Sequence[Target]) -> str:
        """Open a call; return its wire id. Raise RuntimeError if one of that ``call_id`` is open."""
        if any(call.call_id == call_id for call in self._calls.values()):
            raise RuntimeError(f"a collective call with the id {call_id!r} is already open")
        self._serial += 1
        wire_id = f"{call_id}~{self._serial}"
        self._calls[wire_id] = _Call(call_id, {target.session: target for target in targets})
        return wire_id

    def settle(self, wire_id: str, session: Hashable, *, ok: bool = False, result: Any = None, error: str = "") -> bool:
        """Store one target's result; return False, and change nothing, if none is pending from that session."""
        call = self._calls.get(wire_id)
        target = None if call is None else call.pending.pop(session, None)
        if call is None or target is None:
            return False
        call.results.append(ReplicaResult(target.stage_id, target.replica_id, ok, result, error))
        return True

    def lose(self, session: Hashable, error: str) -> None:
        """Store the error for all calls that are pending at a session."""
        for wire_id in self._calls:
            self.settle(wire_id, session, error=error)

    def expire(self, wire_id: str, error: str) -> None:
        """Store the error for all targets of a call that have not answered. Calls that are done are left alone."""
        call = self._calls.get(wire_id)
        for session in [] if call is None else list(call.pending):
            self.settle(wire_id, session, error=error)

    def open(self) -> list[str]:
        """The wire ids of all calls whose results were not taken with ``take_done``."""
        return list(self._calls)

    def take_done(self) -> list[tuple[str, list[ReplicaResult]]]:
        """Remove the calls that are done; return their wire ids and results, sorted by stage and replica."""
        done = [wire_id for wire_id, call in self._calls.items() if not call.pending]
        return [(wire_id, sorted(self._calls.pop(wire_id).results, key=_replica_key)) for wire_id in done]


def _replica_key(result: ReplicaResult) -> tuple[int, int]:
    return result.stage_id, result.replica_id


_MAX_OPEN: Final = 32
#: What the wire says for a call without a timeout.
_LONGEST_S: Final = 1e9
_STOPPING: Final = "the hub is stopping"


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A validated call. ``done`` gets its results or an error in any case."""

    call_id: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stage_ids: tuple[int, ...]
    #: None: it waits until every replica has answered or is lost.
    timeout_s: float | None
    done: asyncio.Future[list[ReplicaResult]]


@dataclass(frozen=True, slots=True)
class CallDue:
    """A call's deadline has passed, or its caller waits no longer."""

    wire_id: str


class Collective:
    """Sends calls and collects their answers, in the orchestrator's task; ``post`` brings deadlines there."""

    def __init__(
        self,
        pools: Pools,
        membership: Membership,
        metrics: HubMetrics,
        post: Callable[[CallDue], None],
    ) -> None:
        self._pools = pools
        self._membership = membership
        self._metrics = metrics
        self._post = post
        self._correlator = Correlator()
        #: By wire id.
        self._calls: dict[str, CollectiveCall] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def handle_call(self, item: CollectiveCall | CallDue) -> None:
        """Send a call, whose ``done`` gets an error of the start as well; or end one whose deadline has passed."""
        if isinstance(item, CallDue):
            self._end(item)
        else:
            try:
                self._start(item)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                _resolve(item, error)
        self._finish_done()

    def handle_client_event(self, event: Controlled | SessionDown | ProcessGone) -> None:
        """Apply an event of one replica's connection to the calls that are pending there."""
        if isinstance(event, Controlled):
            self._settle(event)
        elif isinstance(event, SessionDown) and event.lost:
            self.lose_replica(event.client, event.reason)
        elif isinstance(event, ProcessGone):
            self.lose_replica(event.client, "its process is gone")

    def lose_replica(self, client: ReplicaLink, reason: str = "the registry does not list it any more") -> None:
        """End what is pending at a replica that will not answer any more."""
        self._correlator.lose(client, f"ReplicaLostError: {reason}")
        self._finish_done()

    def close(self) -> None:
        """End every call with the results that it has: the hub stops. Idempotent."""
        for wire_id in self._correlator.open():
            self._correlator.expire(wire_id, f"RequestError: {_STOPPING}")
        self._finish_done()

    def _settle(self, event: Controlled) -> None:
        message, client = event.message, event.client
        pool = self._pools.of(client.info)
        pool.core.report(client.addr, message.queue_length, pool.now())
        was_pending = self._correlator.settle(
            message.call_id, client, ok=message.ok, result=message.result, error=message.error
        )
        if not was_pending:
            self._metrics.dropped.labels("late").inc()
        self._finish_done()

    def _end(self, due: CallDue) -> None:
        call = self._calls.get(due.wire_id)
        if call is not None and (call.timeout_s is None or call.done.cancelled()):
            self._correlator.expire(due.wire_id, "RequestError: its caller waits no longer")
        elif call is not None:
            self._correlator.expire(due.wire_id, f"DeadlineExceededError: no answer within {call.timeout_s:g} s")

    def _start(self, call: CollectiveCall) -> None:
        if len(self._correlator) >= _MAX_OPEN:
            raise OverloadedError(f"{_MAX_OPEN} collective calls are open in this hub, and no more may be")
        replicas = self._membership.members(call.stage_ids)
        targets = [Target(info.stage_id, info.replica_id, self._session(info)) for info in replicas]
        wire_id = self._correlator.begin(call.call_id, targets)
        self._calls[wire_id] = call
        due = CallDue(wire_id)
        if call.timeout_s is not None:
            self._timers[wire_id] = asyncio.get_running_loop().call_later(call.timeout_s, self._post, due)
        # A call without a timeout would be open for ever.
        call.done.add_done_callback(lambda done: self._post(due) if done.cancelled() else None)
        logger.info("collective.call method=%r stages=%s replicas=%d", call.method, call.stage_ids, len(targets))
        for target in targets:
            error = self._send(wire_id, call, target.session)
            if error:
                self._correlator.settle(wire_id, target.session, error=error)

    def _session(self, info: ReplicaInfo) -> StageClient | tuple[int, str]:
        """The key of the replica's answer: its client, or a mere name if there is no session to ask it by."""
        client = self._membership.clients.get(info.input_addr)
        if client is not None and client.info.stage_id == info.stage_id and client.session_up:
            return client
        return info.stage_id, info.input_addr

    def _send(self, wire_id: str, call: CollectiveCall, session: object) -> str:
        """Send the call to one replica; return the error if that fails, else an empty text."""
        if isinstance(session, tuple):
            return "NotConnectedError: this hub has no session with the replica"
        client: Any = session
        control = wire.Control(
            epoch=client.info.epoch,
            call_id=wire_id,
            method=call.method,
            args=call.args,
            kwargs=dict(call.kwargs),
            remaining_s=_LONGEST_S if call.timeout_s is None else call.timeout_s,
        )
        try:
            client.send_message(control)
        except (SendFailedError, WireError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _finish_done(self) -> None:
        for wire_id, results in self._correlator.take_done():
            timer = self._timers.pop(wire_id, None)
            if timer is not None:
                timer.cancel()
            call = self._calls.pop(wire_id)
            failed = sum(not result.ok for result in results)
            logger.info("collective.done method=%r replicas=%d failed=%d", call.method, len(results), failed)
            _resolve(call, results)


def reject_call(call: CollectiveCall) -> None:
    """Answer a call that was not started before the hub stopped."""
    _resolve(call, RequestError(_STOPPING))


def _resolve(call: CollectiveCall, outcome: list[ReplicaResult] | Exception) -> None:
    # The caller may have been cancelled.
    if call.done.done():
        return
    if isinstance(outcome, Exception):
        call.done.set_exception(outcome)
    else:
        call.done.set_result(outcome)
