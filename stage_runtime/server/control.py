"""Control calls of hubs: each is passed to the engine once, and its result to the hub that called.

Part of the sessions with all hubs (sessions.py), and like them owned by the ZMQ thread. Pure.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import SLEEP, Call, Called
from stage_runtime.lifecycle import LifeState

#: How many calls may be open in one replica.
_MAX_OPEN: Final = 64
#: How many calls are remembered, so that a call that comes twice does not run twice.
_MAX_SEEN: Final = 8192


@dataclass(slots=True)
class _OpenCall:
    epoch: int
    call_id: str
    method: str
    #: None: the connection that called was given up.
    peer: Peer | None


class ControlCalls:
    """The open calls.

    ``life_state`` gives the replica's state, ``queue_length`` its load; ``answer`` sends a result.
    """

    def __init__(
        self,
        life_state: Callable[[], LifeState],
        queue_length: Callable[[], int],
        counters: Counter[str],
        answer: Callable[[Peer, wire.ControlResult], None],
    ) -> None:
        self._life_state = life_state
        self._queue_length = queue_length
        self._counters = counters
        self._send_answer = answer
        self._serial = 0
        #: Calls without a result, by the key of their job.
        self._open: dict[str, _OpenCall] = {}
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._is_asleep = False
        #: Open calls for sleep: the replica takes no new work from the moment that one comes.
        self._falling = 0

    def life_state(self) -> LifeState:
        """The replica's state, ASLEEP if it is put to sleep. May be read by any thread."""
        state = self._life_state()
        return LifeState.ASLEEP if state is LifeState.READY and (self._is_asleep or self._falling) else state

    def accept_call(self, peer: Peer, control: wire.Control, now_s: float) -> list[Call]:
        """A call has come; return its job, or none if it is refused (and answered so) or came before."""
        seen = peer.name, control.call_id
        if seen in self._seen:
            self._counters["replayed_calls"] += 1
            return []
        self._seen[seen] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        refusal = self._refusal()
        if refusal:
            self._counters["rejected_calls"] += 1
            self._answer(peer, control.epoch, control.call_id, Called("", ok=False, error=refusal))
            return []
        self._serial += 1
        # A request's key has a slash, this one has none.
        key = f"#{self._serial}"
        self._open[key] = _OpenCall(control.epoch, control.call_id, control.method, peer)
        self._falling += control.method == SLEEP
        return [Call(key, control.method, control.args, control.kwargs, now_s + control.remaining_s)]

    def finish_call(self, called: Called) -> None:
        """The engine has run a call: send the result. Does nothing for unknown calls."""
        if called.is_asleep is not None:
            self._is_asleep = called.is_asleep
        call = self._open.pop(called.key, None)
        if call is None:
            return
        self._falling -= call.method == SLEEP
        if call.peer is not None:
            self._answer(call.peer, call.epoch, call.call_id, called)

    def drop_calls(self, name: str) -> list[str]:
        """A connection was given up: return the keys of its open calls, to be cancelled, the last one first.

        In the order of coming, each call that is cancelled would let the next one begin.
        """
        dropped = [key for key, call in self._open.items() if call.peer is not None and call.peer.name == name]
        for key in dropped:
            self._open[key].peer = None
        return dropped[::-1]

    def calling_peers(self) -> list[Peer]:
        """The connections that have open calls."""
        return [call.peer for call in self._open.values() if call.peer is not None]

    def _answer(self, peer: Peer, epoch: int, call_id: str, called: Called) -> None:
        answer = wire.ControlResult(
            epoch=epoch,
            call_id=call_id,
            ok=called.ok,
            queue_length=self._queue_length(),
            result=called.result,
            error=called.error,
        )
        self._send_answer(peer, answer)

    def _refusal(self) -> str:
        if len(self._open) >= _MAX_OPEN:
            return f"ControlRefusedError: {len(self._open)} calls are open in this replica, the bound is {_MAX_OPEN}"
        match self._life_state():
            case LifeState.STARTING:
                return "ControlRefusedError: the replica is still loading its model"
            case LifeState.STOPPED | LifeState.FAILED:
                return "ControlRefusedError: the replica's engine is gone"
            case LifeState.READY | LifeState.ASLEEP | LifeState.DRAINING:
                return ""
