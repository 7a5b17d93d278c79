"""The control calls of hubs: each is passed to the engine once, and its answer to the hub that asked. Pure.

Part of the talk with all hubs (sessions.py), and like that owned by the ZMQ thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import SLEEP, Call, Called
from stage_runtime.lifecycle import Stage

#: How many calls may be open in one replica.
_MAX_OPEN: Final = 64
#: How many calls are remembered, so that none of them runs again when its frame comes twice.
_MAX_SEEN: Final = 8192


@dataclass(slots=True)
class _Open:
    epoch: int
    call_id: str
    method: str
    #: None: whoever asked was given up.
    peer: Peer | None


class Calls:
    """``stage`` is the replica's own, ``queue_length`` its load; ``say`` sends an answer."""

    def __init__(
        self,
        stage: Callable[[], Stage],
        queue_length: Callable[[], int],
        counters: Counter[str],
        say: Callable[[Peer, wire.ControlResult], None],
    ) -> None:
        self._stage = stage
        self._queue_length = queue_length
        self._counters = counters
        self._say = say
        self._serial = 0
        #: By key, until the engine has answered.
        self._open: dict[str, _Open] = {}
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._is_asleep = False
        #: Calls for sleep that the engine has not answered: nothing new is taken from the moment that one comes.
        self._falling = 0

    def stage(self) -> Stage:
        """Where in its life the replica is, and whether it sleeps. May be read by any thread."""
        stage = self._stage()
        return Stage.ASLEEP if stage is Stage.READY and (self._is_asleep or self._falling) else stage

    def take(self, peer: Peer, control: wire.Control, now_s: float) -> list[Call]:
        """A call for this life of the replica has come; what the engine is to do."""
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
        self._open[key] = _Open(control.epoch, control.call_id, control.method, peer)
        self._falling += control.method == SLEEP
        return [Call(key, control.method, control.args, control.kwargs, now_s + control.remaining_s)]

    def ended(self, called: Called) -> None:
        """The engine has answered."""
        if called.is_asleep is not None:
            self._is_asleep = called.is_asleep
        call = self._open.pop(called.key, None)
        if call is None:
            return
        self._falling -= call.method == SLEEP
        if call.peer is not None:
            self._answer(call.peer, call.epoch, call.call_id, called)

    def drop(self, name: str) -> list[str]:
        """A hub's connection was given up: the keys of its calls, which need not begin any more, the last one first.

        In the order of coming, each one that is cancelled would let the next begin.
        """
        dropped = [key for key, call in self._open.items() if call.peer is not None and call.peer.name == name]
        for key in dropped:
            self._open[key].peer = None
        return dropped[::-1]

    def peers(self) -> list[Peer]:
        """Whose calls are open."""
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
        self._say(peer, answer)

    def _refusal(self) -> str:
        if len(self._open) >= _MAX_OPEN:
            return f"ControlRefusedError: {len(self._open)} calls are open in this replica, the bound is {_MAX_OPEN}"
        match self._stage():
            case Stage.STARTING:
                return "ControlRefusedError: the replica is still loading its model"
            case Stage.STOPPED | Stage.FAILED:
                return "ControlRefusedError: the replica's engine is gone"
            case Stage.READY | Stage.ASLEEP | Stage.DRAINING:
                return ""
