"""Hand-offs that travel piece by piece: what the next stages have not taken yet, and what the engine has yet to be fed.

Used by the engine's thread. Order and number are checked here; a piece goes to the engine when that wants one, and to
the next stages as long as they keep up. What they leave waits here, and the engine is paused where it can be, so that
it holds at most what the request puts out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_discovery.wire import FailureKind
from stage_runtime.config import PayloadError
from stage_runtime.engine_loop.backpressure import Behind, Pauses
from stage_runtime.engine_loop.jobs import (
    HandedPiece,
    Outcome,
    PieceArrived,
    RequestFailed,
    TookPiece,
    WindowUpdate,
    Work,
)
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engine_loop.running import broken, kind_of
from stage_runtime.engines.base import Engine, EngineOutput

logger = logging.getLogger(__name__)

_Handed = Mapping[str, Any]


@dataclass(slots=True)
class _Outflow:
    """What one request hands on."""

    work: Work
    #: How many pieces each next stage may be behind.
    windows: Mapping[int, int]
    waiting: deque[_Handed] = field(default_factory=deque)
    #: How many were said, and how many of them each next stage has taken.
    said: int = 0
    taken: dict[int, int] = field(default_factory=dict)
    #: Of those said, what not every next stage has taken.
    open: deque[HandedPiece] = field(default_factory=deque)
    #: The engine's last word, until everything before it was said.
    end: EngineOutput | None = None

    @property
    def has_room(self) -> bool:
        """Whether every next stage keeps up."""
        return all(self.said - self.taken.get(stage, 0) < window for stage, window in self.windows.items())


@dataclass(slots=True)
class _Inflow:
    """What one request gets of one stage before."""

    work: Work
    from_stage: int
    waiting: deque[PieceArrived] = field(default_factory=deque)
    #: How many have come, and whether that is all there will be.
    come: int = 0
    is_complete: bool = False
    #: The last piece that the engine has; -1 before the first.
    last: int = -1
    #: What has come, where the engine takes no pieces.
    whole: list[_Handed] = field(default_factory=list)


class Pieces:
    """All that flows into and out of one engine. ``add`` starts work whose pieces are all there; ``end`` ends work.

    Methods return what is to be said; a RequestFailed among it has been taken from the engine.
    """

    def __init__(
        self,
        engine: Engine,
        payloads: Payloads,
        pauses: Pauses,
        add: Callable[[Work, Mapping[int, _Handed]], Sequence[Outcome]],
        end: Callable[[EngineOutput], Sequence[Outcome]],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._payloads = payloads
        self._pauses = pauses
        self._add = add
        self._end = end
        self._clock = clock
        self._feed: Callable[[str, int, _Handed | None, bool], None] | None = getattr(engine, "feed", None)
        self._wants: Callable[[str, int], bool] = getattr(engine, "wants", lambda _key, _stage: True)
        self._outflows: dict[str, _Outflow] = {}
        #: By request, then by stage.
        self._inflows: dict[str, dict[int, _Inflow]] = {}

    @property
    def queued(self) -> int:
        """How many pieces wait for the next stages to take those before them."""
        return sum(len(flow.waiting) for flow in self._outflows.values())

    # ---- in

    def begin(self, work: Work) -> bool:
        """Work has come; whether the engine can have it now, and its pieces as they come."""
        if not work.stream_from:
            return True
        self._inflows[work.key] = {stage: _Inflow(work, stage) for stage in work.stream_from}
        return self._feed is not None

    def take(self, fed: PieceArrived) -> Sequence[Outcome]:
        """A piece was announced. Those of unknown requests, and those that were here before, are fine."""
        flow = self._inflows.get(fed.key, {}).get(fed.from_stage)
        if flow is None:
            return ()
        if fed.number < flow.come or flow.is_complete:
            # Said again, after a connection broke: what was answered may be lost, too.
            return [TookPiece(fed.key, fed.from_stage, flow.last)] if flow.last >= 0 else ()
        if fed.number > flow.come:
            reason = f"piece {flow.come} of stage {fed.from_stage} never came, piece {fed.number} did"
            return self._end_broken(RequestFailed(fed.key, FailureKind.PAYLOAD, reason))
        flow.waiting.append(fed)
        flow.come += 1
        flow.is_complete = fed.is_last
        return self._go_on(fed.key)

    def feed(self) -> list[Outcome]:
        """Give the engine what it wants of all that has come."""
        hungry = [key for key, flows in self._inflows.items() if any(flow.waiting for flow in flows.values())]
        return [outcome for key in hungry for outcome in self._go_on(key)]

    def _go_on(self, key: str) -> Sequence[Outcome]:
        said: list[Outcome] = []
        try:
            for flow in self._inflows[key].values():
                last = self._feed_from(flow)
                if last is not None:
                    said.append(TookPiece(key, flow.from_stage, last))
        except Exception as error:
            # The engine is not stepped here: what one request broke is that request's own.
            if kind_of(error) is FailureKind.ENGINE:
                logger.exception("engine.feed_failed")
            return self._end_broken(broken(key, error))
        flows = self._inflows[key]
        if all(flow.is_complete and not flow.waiting for flow in flows.values()):
            del self._inflows[key]
            if self._feed is None:
                whole = {stage: {"pieces": flow.whole} for stage, flow in flows.items()}
                said += self._add(next(iter(flows.values())).work, whole)
        return said

    def _feed_from(self, flow: _Inflow) -> int | None:
        """Feed from one stage; the number of the last piece that the engine has got now, if any."""
        key, last = flow.work.key, None
        while flow.waiting and (self._feed is None or flow.waiting[0].is_last or self._wants(key, flow.from_stage)):
            fed = flow.waiting[0]
            piece = None if fed.is_last else self._fetch(flow, fed)
            flow.waiting.popleft()
            if self._feed is not None:
                self._feed(key, flow.from_stage, piece, fed.is_last)
            elif piece is not None:
                flow.whole.append(piece)
            if piece is not None:
                last = flow.last = fed.number
        return last

    def _fetch(self, flow: _Inflow, fed: PieceArrived) -> _Handed:
        if fed.payload is None or fed.payload.from_stage != flow.from_stage:
            raise PayloadError(f"piece {fed.number} of stage {flow.from_stage} names no payload of it")
        left_s = flow.work.deadline_s - self._clock()
        found = self._payloads.fetch((fed.payload,), left_s).get(flow.from_stage)
        if found is None:
            raise PayloadError(f"piece {fed.number} of stage {flow.from_stage} is a companion's")
        return found

    # ---- out

    def put(self, work: Work, piece: _Handed) -> Sequence[Outcome]:
        """The engine has made a piece."""
        if not work.stream_to:
            return ()
        flow = self._outflows.get(work.key)
        if flow is None:
            flow = self._outflows[work.key] = _Outflow(work, self._payloads.windows(work.stream_to))
        flow.waiting.append(piece)
        return self._say(flow)

    def takers_of_rest(self, work: Work) -> tuple[int, ...]:
        """The next stages that get the hand-off as a whole."""
        in_pieces = work.stream_to if work.key in self._outflows else ()
        return tuple(stage for stage in work.next_stages if stage not in in_pieces)

    def hold(self, output: EngineOutput) -> bool:
        """Whether the end of a request has to wait for pieces that were not said yet; then it comes by itself."""
        flow = self._outflows.get(output.key)
        if flow is None or not flow.waiting or output.error is not None or output.finish_reason == "abort":
            return False
        flow.end = output
        return True

    def make_room(self, room: WindowUpdate) -> Sequence[Outcome]:
        """A next stage has taken pieces. Unknown requests are fine."""
        flow = self._outflows.get(room.key)
        if flow is None or room.to_stage not in flow.windows:
            return ()
        flow.taken[room.to_stage] = min(flow.said, max(room.number, flow.taken.get(room.to_stage, 0)))
        taken_by_all = min(flow.taken.get(stage, 0) for stage in flow.windows)
        while flow.open and flow.open[0].number < taken_by_all:
            flow.open.popleft()
        said = [*(flow.open if room.again else ()), *self._say(flow)]
        if flow.end is not None and not flow.waiting:
            said = [*said, *self._end(flow.end)]
        return said

    def cancel(self, key: str) -> bool:
        """The request is to stop; whether the engine has nothing more to say of it."""
        flow = self._outflows.get(key)
        is_collecting = self._feed is None and key in self._inflows
        return is_collecting or (flow is not None and flow.end is not None)

    def close(self, key: str) -> None:
        """The request is over."""
        self._inflows.pop(key, None)
        self._outflows.pop(key, None)

    def _say(self, flow: _Outflow) -> Sequence[Outcome]:
        said: list[Outcome] = []
        key = flow.work.key
        while flow.waiting and flow.has_room:
            try:
                refs = self._payloads.hand_over(flow.work, flow.waiting[0], flow.work.stream_to, flow.said)
            except PayloadError as error:
                return [*said, *self._end_broken(broken(key, error))]
            flow.waiting.popleft()
            flow.open.append(HandedPiece(key, flow.said, refs))
            said.append(flow.open[-1])
            flow.said += 1
        return [*said, *self._pauses.set(key, Behind.NEXT_STAGES, is_behind=not flow.has_room)]

    def _end_broken(self, end: RequestFailed) -> Sequence[Outcome]:
        self.close(end.key)
        self._engine.abort(end.key)
        return [end]
