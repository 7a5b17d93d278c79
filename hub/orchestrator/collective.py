"""Collective: one call to every replica of some stages, with a deadline, and whatever answers came by then.

Part of the orchestrator's task. One replica's failure is that replica's entry in the results, never the call's.

Correlator: which replicas have still to answer which collective call, and what the others said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hub.config import SendFailedError
from hub.replicas.events import ClientEvent, Controlled, ProcessGone, SessionDown
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
    """What one replica answered, or in its place why it did not; ``error`` begins with the error's type."""

    stage_id: int
    replica_id: int
    ok: bool
    #: Plain values, as msgpack has them.
    result: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """One replica that is called. ``session`` is what its answer will come by."""

    stage_id: int
    replica_id: int
    session: Hashable


@dataclass(slots=True)
class _Call:
    call_id: str
    #: By session, who has still to answer.
    awaited: dict[Hashable, Target]
    results: list[ReplicaResult] = field(default_factory=list)


class Correlator:
    """Every target of a call gets exactly one result; a call is done once all have theirs."""

    def __init__(self) -> None:
        self._serial = 0
        #: By their ids on the wire, which are never used twice.
        self._calls: dict[str, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, call_id: str, targets: Sequence[Target]) -> str:
        """A call begins; return its id on the wire. Raise RuntimeError if one of that ``call_id`` is open."""
        if any(call.call_id == call_id for call in self._calls.values()):
            raise RuntimeError(f"a collective call with the id {call_id!r} is already open")
        self._serial += 1
        wire_id = f"{call_id}~{self._serial}"
        self._calls[wire_id] = _Call(call_id, {target.session: target for target in targets})
        return wire_id

    def settle(self, wire_id: str, session: Hashable, *, ok: bool = False, result: Any = None, error: str = "") -> bool:
        """One target's result; False, and nothing changes, if none is awaited from there any more."""
        call = self._calls.get(wire_id)
        target = None if call is None else call.awaited.pop(session, None)
        if call is None or target is None:
            return False
        call.results.append(ReplicaResult(target.stage_id, target.replica_id, ok, result, error))
        return True

    def lose(self, session: Hashable, error: str) -> None:
        """Nothing will be answered there any more."""
        for wire_id in self._calls:
            self.settle(wire_id, session, error=error)

    def expire(self, wire_id: str, error: str) -> None:
        """Who has not answered has not, and the call is done. Calls that are done already are left alone."""
        call = self._calls.get(wire_id)
        for session in [] if call is None else list(call.awaited):
            self.settle(wire_id, session, error=error)

    def open(self) -> list[str]:
        """The ids on the wire of all calls that are not done, or whose results were not taken."""
        return list(self._calls)

    def take_done(self) -> list[tuple[str, list[ReplicaResult]]]:
        """The calls that are done, each once: id on the wire and results, by stage and replica."""
        done = [wire_id for wire_id, call in self._calls.items() if not call.awaited]
        return [(wire_id, sorted(self._calls.pop(wire_id).results, key=_place)) for wire_id in done]


def _place(result: ReplicaResult) -> tuple[int, int]:
    return result.stage_id, result.replica_id


_MAX_OPEN: Final = 32
_STOPPING: Final = "the hub is stopping"


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call, checked. ``done`` gets its results, or an error, in any case."""

    call_id: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stage_ids: tuple[int, ...]
    timeout_s: float
    done: asyncio.Future[list[ReplicaResult]]


@dataclass(frozen=True, slots=True)
class CallDue:
    """A call's deadline has passed."""

    wire_id: str


class Collective:
    """Sends calls and collects their answers. ``post`` brings what is due back into the task."""

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
        #: By id on the wire.
        self._calls: dict[str, CollectiveCall] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def follow(self, item: CollectiveCall | CallDue) -> None:
        """Begin a call, of which ``done`` is told whatever goes wrong; or end one whose time is over."""
        if isinstance(item, CallDue):
            self._due(item)
            return
        try:
            self._begin(item)
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            _resolve(item, error)
        self._finish()

    def hear(self, event: ClientEvent) -> None:
        """Take in what one client has to say, so far as it is about calls."""
        if isinstance(event, Controlled):
            self._answered(event)
        elif isinstance(event, SessionDown) and event.lost:
            self.lose(event.client, event.reason)
        elif isinstance(event, ProcessGone):
            self.lose(event.client, "its process is gone")

    def lose(self, client: ReplicaLink, reason: str = "the registry does not list it any more") -> None:
        """A replica will not answer what it was asked."""
        self._correlator.lose(client, f"ReplicaLostError: {reason}")
        self._finish()

    def close(self) -> None:
        """The hub stops: every call ends with what it has. Idempotent."""
        for wire_id in self._correlator.open():
            self._correlator.expire(wire_id, f"RequestError: {_STOPPING}")
        self._finish()

    def _answered(self, item: Controlled) -> None:
        message, client = item.message, item.client
        self._pools.of(client.info).report(client.addr, message.queue_length)
        awaited = self._correlator.settle(
            message.call_id, client, ok=message.ok, result=message.result, error=message.error
        )
        if not awaited:
            self._metrics.dropped.labels("late").inc()
        self._finish()

    def _due(self, item: CallDue) -> None:
        call = self._calls.get(item.wire_id)
        if call is not None:
            self._correlator.expire(item.wire_id, f"DeadlineExceededError: no answer within {call.timeout_s:g} s")
            self._finish()

    def _begin(self, call: CollectiveCall) -> None:
        if len(self._correlator) >= _MAX_OPEN:
            raise OverloadedError(f"{_MAX_OPEN} collective calls are open in this hub, and no more may be")
        replicas = self._membership.members(call.stage_ids)
        targets = [Target(info.stage_id, info.replica_id, self._session(info)) for info in replicas]
        wire_id = self._correlator.begin(call.call_id, targets)
        self._calls[wire_id] = call
        due = CallDue(wire_id)
        self._timers[wire_id] = asyncio.get_running_loop().call_later(call.timeout_s, self._post, due)
        logger.info("collective.call method=%r stages=%s replicas=%d", call.method, call.stage_ids, len(targets))
        for target in targets:
            error = self._send(wire_id, call, target.session)
            if error:
                self._correlator.settle(wire_id, target.session, error=error)

    def _session(self, info: ReplicaInfo) -> StageClient | tuple[int, str]:
        """What the replica's answer comes by; who has no session is not asked."""
        client = self._membership.clients.get(info.input_addr)
        if client is not None and client.info.stage_id == info.stage_id and client.session_up:
            return client
        return info.stage_id, info.input_addr

    def _send(self, wire_id: str, call: CollectiveCall, session: object) -> str:
        """Ask one replica; return what stands in the way, if anything does."""
        if isinstance(session, tuple):
            return "NotConnectedError: this hub has no session with the replica"
        client: Any = session
        control = wire.Control(
            epoch=client.info.epoch,
            call_id=wire_id,
            method=call.method,
            args=call.args,
            kwargs=dict(call.kwargs),
            remaining_s=call.timeout_s,
        )
        try:
            client.send_message(control)
        except (SendFailedError, WireError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _finish(self) -> None:
        for wire_id, results in self._correlator.take_done():
            self._timers.pop(wire_id).cancel()
            call = self._calls.pop(wire_id)
            failed = sum(not result.ok for result in results)
            logger.info("collective.done method=%r replicas=%d failed=%d", call.method, len(results), failed)
            _resolve(call, results)


def refuse(call: CollectiveCall) -> None:
    """The hub has stopped before it came to the call."""
    _resolve(call, RequestError(_STOPPING))


def _resolve(call: CollectiveCall, what: list[ReplicaResult] | Exception) -> None:
    # Whoever asked may have gone.
    if call.done.done():
        return
    if isinstance(what, Exception):
        call.done.set_exception(what)
    else:
        call.done.set_result(what)
