"""Hand-offs that travel piece by piece, with a window of pieces in flight for each next stage.

Used by the engine's thread. Inflow: pieces of earlier stages are checked for order and fed to the engine when it wants
one. Outflow: pieces of the engine are stored and announced while every next stage has window left; the rest is queued
here, and the engine is paused if it can be, so that the queue stays short.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from omni_discovery.wire import FailureKind
from stage_runtime.config import PayloadError
from stage_runtime.engine_loop.backpressure import Behind, Pauses
from stage_runtime.engine_loop.fetching import HandOffFetches
from stage_runtime.engine_loop.jobs import (
    HandedPiece,
    HandOffs,
    Outcome,
    PieceArrived,
    RequestFailed,
    TookPiece,
    WindowUpdate,
    Work,
)
from stage_runtime.engine_loop.payloads import Payloads, size_of
from stage_runtime.engine_loop.running import failed
from stage_runtime.engines.base import Engine, EngineOutput
from stage_runtime.engines.capabilities import Capabilities
from stage_runtime.engines.errors import failure_kind

logger = logging.getLogger(__name__)

_Handed = Mapping[str, Any]
#: Pieces that may be kept until all have come, of one request from one stage, and the bytes of all that are kept. Of
#: these, no request takes more than it leaves to others.
MOST_COLLECTED: Final = 1 << 16
MOST_COLLECTED_BYTES: Final = 4 << 30


class _FullError(Exception):
    """Too much is kept, of this request or of all: no hand-off is to blame for it."""


@dataclass(slots=True)
class _Outflow:
    """The pieces that one request hands to its next stages."""

    work: Work
    #: By next stage: how many announced pieces it may be behind.
    windows: Mapping[int, int]
    #: Pieces that wait for window.
    queued: deque[_Handed] = field(default_factory=deque)
    #: How many pieces were announced, and how many of them each next stage has taken.
    announced: int = 0
    taken: dict[int, int] = field(default_factory=dict)
    #: Announced pieces that not every next stage has taken: announced again when a connection broke.
    unacknowledged: deque[HandedPiece] = field(default_factory=deque)
    #: The engine's last output, held back until every piece before it was announced.
    end: EngineOutput | None = None

    @property
    def has_window(self) -> bool:
        """Whether every next stage may be sent another piece."""
        return all(self.announced - self.taken.get(stage, 0) < window for stage, window in self.windows.items())


@dataclass(slots=True)
class _Inflow:
    """The pieces that one request gets from one earlier stage."""

    work: Work
    from_stage: int
    #: How many pieces may have arrived that the engine has not been fed.
    window: int
    #: Pieces that arrived and that the engine has not been fed.
    queued: deque[PieceArrived] = field(default_factory=deque)
    #: How many have arrived, and whether no more will.
    arrived: int = 0
    is_complete: bool = False
    #: The number of the last piece that the engine has; -1 before the first.
    last_fed: int = -1
    #: Whether the first of ``queued`` is being fetched, and what is in it, once it has come.
    is_fetching: bool = False
    fetched: _Handed | None = None
    fetched_bytes: int = 0
    #: All pieces so far, for an engine without ``feed``: it gets them together.
    collected: list[_Handed] = field(default_factory=list)
    #: Bytes of the pieces that are kept until all have come, here or in the engine.
    kept_bytes: int = 0


class Pieces:
    """All piecewise hand-offs into and out of one engine.

    ``add`` starts work whose pieces were collected first; ``end`` ends a request whose last output was held back.
    Methods return the outcomes to emit; a request of which a RequestFailed is among them was aborted in the engine.
    """

    def __init__(
        self,
        engine: Engine,
        capabilities: Capabilities,
        payloads: Payloads,
        fetches: HandOffFetches,
        pauses: Pauses,
        add: Callable[[Work, Mapping[int, _Handed]], Sequence[Outcome]],
        end: Callable[[EngineOutput], Sequence[Outcome]],
    ) -> None:
        self._engine = engine
        self._payloads = payloads
        self._fetches = fetches
        self._pauses = pauses
        self._add = add
        self._end = end
        self._feed = capabilities.feed
        self._wants = capabilities.wants or (lambda _key, _stage: True)
        self._keeps = capabilities.keeps_pieces or (lambda _key: False)
        #: Bytes of all pieces that are kept until all have come.
        self._kept_bytes = 0
        self._outflows: dict[str, _Outflow] = {}
        #: By request, then by stage.
        self._inflows: dict[str, dict[int, _Inflow]] = {}
        #: Requests that the engine does not have yet: it is fed no pieces of them.
        self._held: set[str] = set()

    @property
    def queued(self) -> int:
        """How many outgoing pieces wait for window."""
        return sum(len(flow.queued) for flow in self._outflows.values())

    # ---- inflow

    def expect_pieces(self, work: Work) -> bool:
        """Prepare for the pieces of accepted work; whether the engine is to be given the work now.

        False: the engine has no ``feed``, and ``add`` is called when all pieces have arrived.
        """
        if not work.stream_from:
            return True
        windows = self._payloads.windows_from(work.stream_from)
        self._inflows[work.key] = {stage: _Inflow(work, stage, window) for stage, window in windows.items()}
        return self._feed is not None

    def accept_piece(self, fed: PieceArrived) -> Sequence[Outcome]:
        """An earlier stage announced a piece. Unknown requests and repeated announcements are ignored."""
        flow = self._inflows.get(fed.key, {}).get(fed.from_stage)
        if flow is None:
            return ()
        if fed.number < flow.arrived or flow.is_complete:
            # Announced again after a connection broke: our acknowledgement may be lost, too.
            return [TookPiece(fed.key, fed.from_stage, flow.last_fed)] if flow.last_fed >= 0 else ()
        if fed.number > flow.arrived:
            reason = f"piece {flow.arrived} of stage {fed.from_stage} never came, piece {fed.number} did"
            return self._fail(RequestFailed(fed.key, FailureKind.PAYLOAD, reason))
        waiting = flow.arrived - flow.last_fed - 1
        if waiting >= flow.window and not fed.is_last:
            # No hub is believed to keep to it.
            reason = f"{waiting + 1} pieces of stage {flow.from_stage} wait; the window is {flow.window}"
            return self._fail(RequestFailed(fed.key, FailureKind.OVERLOADED, reason))
        flow.queued.append(fed)
        flow.arrived += 1
        flow.is_complete = fed.is_last
        return self._feed_request(fed.key)

    def hold_pieces(self, key: str) -> None:
        """Feed the engine nothing of a request until ``release_pieces``: other hand-offs of it are on their way."""
        if self._feed is not None and key in self._inflows:
            self._held.add(key)

    def release_pieces(self, key: str) -> Sequence[Outcome]:
        """The engine has the request: feed it the pieces that have come meanwhile."""
        if key not in self._held:
            return ()
        self._held.discard(key)
        return self._feed_request(key)

    def feed_waiting(self) -> list[Outcome]:
        """Feed the engine every queued piece that it wants now."""
        keys = [key for key, flows in self._inflows.items() if any(flow.queued for flow in flows.values())]
        return [outcome for key in keys for outcome in self._feed_request(key)]

    def _feed_request(self, key: str) -> Sequence[Outcome]:
        if key in self._held:
            return ()
        outcomes: list[Outcome] = []
        try:
            for flow in self._inflows[key].values():
                last = self._feed_from(flow)
                if last is not None:
                    outcomes.append(TookPiece(key, flow.from_stage, last))
        except _FullError as error:
            return self._fail(RequestFailed(key, FailureKind.OVERLOADED, str(error)))
        except Exception as error:
            # The engine is not in a step, so the other requests in it are unharmed.
            if failure_kind(error) is FailureKind.ENGINE:
                logger.exception("engine.feed_failed")
            return self._fail(failed(key, error))
        flows = self._inflows[key]
        if all(flow.is_complete and not flow.queued for flow in flows.values()):
            self._forget_inflow(key)
            if self._feed is None:
                whole = {stage: {"pieces": flow.collected} for stage, flow in flows.items()}
                outcomes += self._add(next(iter(flows.values())).work, whole)
        return outcomes

    def _feed_from(self, flow: _Inflow) -> int | None:
        """Feed the pieces of one stage that the engine wants; the number of the last one fed now, None if none was."""
        key, last = flow.work.key, None
        while flow.queued:
            fed = flow.queued[0]
            # The next piece is fetched before the engine wants it.
            if not fed.is_last and not (self._has_fetched(flow, fed) and self._is_wanted(flow)):
                break
            piece, flow.fetched = flow.fetched, None
            flow.queued.popleft()
            if piece is not None and (self._feed is None or self._keeps(key)):
                self._count(flow, fed.number + 1)
            if self._feed is not None:
                self._feed(key, flow.from_stage, piece, fed.is_last)
            elif piece is not None:
                flow.collected.append(piece)
            if piece is not None:
                last = flow.last_fed = fed.number
        return last

    def _count(self, flow: _Inflow, pieces: int) -> None:
        """Count the last of so many pieces, which are kept until all have come. Raise _FullError for one too many."""
        flow.kept_bytes += flow.fetched_bytes
        self._kept_bytes += flow.fetched_bytes
        own_bytes = sum(each.kept_bytes for each in self._inflows[flow.work.key].values())
        if pieces > MOST_COLLECTED or own_bytes + self._kept_bytes > MOST_COLLECTED_BYTES:
            told = f"{pieces} pieces of stage {flow.from_stage}, of {flow.kept_bytes} bytes"
            raise _FullError(f"{told}, are more than this engine, which takes them together, can be given now")

    def _is_wanted(self, flow: _Inflow) -> bool:
        return self._feed is None or self._wants(flow.work.key, flow.from_stage)

    def _has_fetched(self, flow: _Inflow, fed: PieceArrived) -> bool:
        """Whether the first queued piece is here, in ``flow.fetched``; if not, it is on its way now."""
        if flow.fetched is not None or flow.is_fetching:
            return flow.fetched is not None
        if fed.payload is None or fed.payload.from_stage != flow.from_stage or fed.payload.role:
            raise PayloadError(f"piece {fed.number} of stage {flow.from_stage} names no payload of it")
        refs = (fed.payload,)
        if self._payloads.is_at_hand(refs):
            _take(self._payloads.fetch_at_hand(refs), flow)
            return True
        flow.is_fetching = True
        self._fetches.fetch(flow.work.key, refs, flow.work.deadline_s, lambda result: self._piece_fetched(flow, result))
        return False

    def _piece_fetched(self, flow: _Inflow, result: HandOffs | Exception) -> Sequence[Outcome]:
        flow.is_fetching = False
        try:
            _take(result, flow)
        except Exception as error:  # noqa: BLE001 - the request fails with it
            return self._fail(failed(flow.work.key, error))
        return self._feed_request(flow.work.key)

    # ---- outflow

    def send_piece(self, work: Work, piece: _Handed) -> Sequence[Outcome]:
        """The engine has made a piece for the next stages: announce it, or queue it until there is window."""
        if not work.stream_to:
            return ()
        flow = self._outflows.get(work.key)
        if flow is None:
            flow = self._outflows[work.key] = _Outflow(work, self._payloads.windows(work.stream_to))
        flow.queued.append(piece)
        return self._announce(flow)

    def takers_of_rest(self, work: Work) -> tuple[int, ...]:
        """The next stages that get the hand-off as a whole, because they did not get it in pieces."""
        in_pieces = work.stream_to if work.key in self._outflows else ()
        return tuple(stage for stage in work.next_stages if stage not in in_pieces)

    def delay_end(self, output: EngineOutput) -> bool:
        """Hold back the end of a request that has queued pieces; whether it was. ``end`` is called for it later."""
        flow = self._outflows.get(output.key)
        if flow is None or not flow.queued or output.error is not None or output.finish_reason == "abort":
            return False
        flow.end = output
        return True

    def update_window(self, update: WindowUpdate) -> Sequence[Outcome]:
        """A next stage has taken pieces, so there is window for others. Unknown requests are ignored."""
        flow = self._outflows.get(update.key)
        if flow is None or update.to_stage not in flow.windows:
            return ()
        flow.taken[update.to_stage] = min(flow.announced, max(update.number, flow.taken.get(update.to_stage, 0)))
        taken_by_all = min(flow.taken.get(stage, 0) for stage in flow.windows)
        while flow.unacknowledged and flow.unacknowledged[0].number < taken_by_all:
            flow.unacknowledged.popleft()
        outcomes = [*(flow.unacknowledged if update.again else ()), *self._announce(flow)]
        if flow.end is not None and not flow.queued:
            outcomes = [*outcomes, *self._end(flow.end)]
        return outcomes

    def has_left_engine(self, key: str) -> bool:
        """Whether the engine will put out nothing more for a request: not begun yet, or its end is held back."""
        flow = self._outflows.get(key)
        is_collecting = self._feed is None and key in self._inflows
        return is_collecting or (flow is not None and flow.end is not None)

    def forget_request(self, key: str) -> None:
        """Drop all pieces of a request that is over. Unknown requests are ignored."""
        self._held.discard(key)
        self._forget_inflow(key)
        self._outflows.pop(key, None)

    def _forget_inflow(self, key: str) -> None:
        self._kept_bytes -= sum(flow.kept_bytes for flow in self._inflows.pop(key, {}).values())

    def _announce(self, flow: _Outflow) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        key = flow.work.key
        while flow.queued and flow.has_window:
            try:
                refs = self._payloads.hand_over(flow.work, flow.queued[0], flow.work.stream_to, flow.announced)
            except PayloadError as error:
                return [*outcomes, *self._fail(failed(key, error))]
            flow.queued.popleft()
            flow.unacknowledged.append(HandedPiece(key, flow.announced, refs))
            outcomes.append(flow.unacknowledged[-1])
            flow.announced += 1
        return [*outcomes, *self._pauses.set_behind(key, Behind.NEXT_STAGES, is_behind=not flow.has_window)]

    def _fail(self, end: RequestFailed) -> Sequence[Outcome]:
        self.forget_request(end.key)
        self._engine.abort(end.key)
        return [end]


def _take(result: HandOffs | Exception, flow: _Inflow) -> None:
    """Keep the piece that was fetched until it is fed; raise the reason why it was not."""
    if isinstance(result, Exception):
        raise result
    flow.fetched, flow.fetched_bytes = result[""][flow.from_stage], size_of(result)
