"""Input in segments: which segment each stage works on, and which it gets next. Pure.

Each stage takes one segment after the other, on the replica that took the first. A stage gets its next segment when it
has ended the one before and the stages behind it keep up. The client's segments are kept until output was shown, so
that the whole request can be restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hub.json_memory import memory_of_value
from hub.request.plan import RequestPlan
from hub.request.retry import Decision, Loss, Shown, Verdict, decide
from omni_discovery.wire import PayloadRef

#: How many segments may wait in front of a stage.
_MAX_AHEAD: Final = 2
#: How much of a client's input is kept for a restart, in memory.
MAX_KEPT_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """One segment for one stage.

    ``segment`` is its number as the client counts, from 0. ``inputs`` None: the end of the input, no more segments
    come.
    """

    segment: int
    inputs: Mapping[str, Any] | None
    #: The hand-offs of the stages before for it, by stage.
    handed: Mapping[int, tuple[PayloadRef, ...]] = field(default_factory=dict)
    #: Whether a stage before left no hand-off for it, so that this stage has nothing to do.
    is_skipped: bool = False

    @property
    def is_end(self) -> bool:
        """Whether this is the end of the input."""
        return self.inputs is None


@dataclass(frozen=True, slots=True)
class Step:
    """Give a stage its next segment.

    ``number`` counts the segments that the stage was given: number 0 is its dispatch, any other an update. The stage's
    hand-offs of numbers below ``kept_from`` are needed no more.
    """

    stage_id: int
    number: int
    item: Item
    kept_from: int = 0


@dataclass(slots=True)
class _Lane:
    """The input of one stage: the segments that wait, and the one that it works on."""

    waiting: deque[Item] = field(default_factory=deque)
    #: The segment that the stage works on.
    open: Item | None = None
    #: How many segments it was given, the end of the input included.
    given_count: int = 0
    #: How many of the client's segments it has ended.
    ended: int = 0
    is_over: bool = False
    #: The client's numbers of the segments that it was given, from ``kept_from`` on.
    segments: deque[int] = field(default_factory=deque)
    kept_from: int = 0
    #: Hand-offs of segments that not all stages before have ended, by segment and stage.
    gathered: dict[int, dict[int, Item]] = field(default_factory=dict)


class Segments:
    """All segments of one request; ``first`` holds the inputs of its first one."""

    def __init__(self, plan: RequestPlan, first: Mapping[str, Any], max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._plan = plan
        self._max_kept_bytes = max_kept_bytes
        self._roots = tuple(stage_id for stage_id in plan.stages if not plan.inputs[stage_id])
        #: The client's segments, all of them; None once they are not kept any more.
        self._kept: list[Item] | None = []
        self._kept_bytes = 0
        #: How many segments came, and whether the input has ended.
        self.arrived = 0
        self.is_complete = False
        self._lanes = {stage_id: _Lane() for stage_id in plan.stages}
        self.add(first)

    # ---- the client's side

    def add(self, inputs: Mapping[str, Any] | None) -> None:
        """Add the client's next segment; None: no more come."""
        item = Item(self.arrived, inputs)
        self.is_complete = inputs is None
        self.arrived += inputs is not None
        if self._kept is not None:
            self._kept_bytes += memory_of_value(inputs, self._max_kept_bytes - self._kept_bytes)
            self._kept.append(item)
            if self._kept_bytes > self._max_kept_bytes:
                self._kept = None
        for stage_id in self._roots:
            self._lanes[stage_id].waiting.append(item)

    @property
    def waits(self) -> bool:
        """Whether a segment of the client waits for a first stage: the client should send no other yet."""
        return any(self._lanes[stage_id].waiting for stage_id in self._roots)

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing is left to do until the client sends its next segment, or the end of its input."""
        lanes = self._lanes.values()
        return not self.is_complete and not any(lane.waiting or lane.open is not None for lane in lanes)

    # ---- the stages' side

    def steps(self) -> list[Step]:
        """Pop the segments that stages can take now; each counts as given."""
        steps: list[Step] = []
        count = -1
        while count != len(steps):
            count = len(steps)
            # From the last stage on: a segment that a stage takes makes room for the stage before it.
            for stage_id in reversed(self._plan.stages):
                steps += self._steps_of(stage_id)
        return steps

    def _steps_of(self, stage_id: int) -> list[Step]:
        lane = self._lanes[stage_id]
        while lane.waiting and lane.open is None and not lane.is_over:
            item = lane.waiting[0]
            if not (item.is_skipped or item.is_end or self._has_room(stage_id)):
                break
            lane.waiting.popleft()
            if item.is_skipped or (item.is_end and not lane.given_count):
                self._pass_on(stage_id, item, ())
                continue
            self._forget_taken(stage_id)
            lane.open = item
            lane.segments.append(item.segment)
            lane.given_count += 1
            return [Step(stage_id, lane.given_count - 1, item, lane.kept_from)]
        return []

    def _has_room(self, stage_id: int) -> bool:
        return all(len(self._lanes[after].waiting) < _MAX_AHEAD for after in self._plan.next_stages[stage_id])

    def _forget_taken(self, stage_id: int) -> None:
        lane, behind = self._lanes[stage_id], self._plan.next_stages[stage_id]
        taken = min((self._lanes[after].ended for after in behind), default=lane.ended)
        while lane.segments and lane.segments[0] < taken:
            lane.segments.popleft()
            lane.kept_from += 1

    def ended(self, stage_id: int, payloads: Sequence[PayloadRef] = ()) -> None:
        """A stage has ended its segment, and leaves ``payloads`` for the stages behind it."""
        lane = self._lanes[stage_id]
        item, lane.open = lane.open, None
        if item is not None:
            self._pass_on(stage_id, item, payloads)

    def _pass_on(self, stage_id: int, item: Item, payloads: Sequence[PayloadRef]) -> None:
        lane = self._lanes[stage_id]
        lane.is_over = lane.is_over or item.is_end
        lane.ended = max(lane.ended, item.segment + (not item.is_end))
        for after in self._plan.next_stages[stage_id]:
            refs = tuple(ref for ref in payloads if ref.to_stage == after)
            self._gather(after, stage_id, replace(item, handed={stage_id: refs}, is_skipped=not refs))

    def _gather(self, stage_id: int, from_stage: int, part: Item) -> None:
        lane, before = self._lanes[stage_id], self._plan.inputs[stage_id]
        parts = lane.gathered.setdefault(part.segment, {})
        parts[from_stage] = part
        if len(parts) < len(before):
            return
        del lane.gathered[part.segment]
        lane.waiting.append(
            replace(
                part,
                handed={source: refs for each in parts.values() for source, refs in each.handed.items()},
                is_skipped=not part.is_end and any(each.is_skipped for each in parts.values()),
            )
        )

    # ---- where a stage stands

    def is_over(self, stage_id: int) -> bool:
        """Whether the stage has got all its input."""
        return self._lanes[stage_id].is_over

    def is_ending(self, stage_id: int) -> bool:
        """Whether the stage was given the end of the input, and has to end."""
        item = self._lanes[stage_id].open
        return item is not None and item.is_end

    def is_idle(self, stage_id: int) -> bool:
        """Whether the stage works on no segment."""
        return self._lanes[stage_id].open is None

    def segment_of(self, stage_id: int) -> int:
        """Which of the client's segments the stage works on, or worked on last."""
        lane = self._lanes[stage_id]
        return lane.open.segment if lane.open is not None and not lane.open.is_end else max(0, lane.ended - 1)

    def last_step(self, stage_id: int) -> Step:
        """The last segment that the stage was given; without its content if the stage has ended it."""
        lane = self._lanes[stage_id]
        item = Item(self.segment_of(stage_id), {}) if lane.open is None else lane.open
        return Step(stage_id, max(0, lane.given_count - 1), item, lane.kept_from)

    def is_first(self, stage_id: int) -> bool:
        """Whether the stage still works on the first segment that it was given, or was given none."""
        lane = self._lanes[stage_id]
        return not lane.given_count or (lane.given_count == 1 and lane.open is not None)

    def inputs_of(self, stage_id: int) -> Mapping[str, Any]:
        """The client's input of the segment that the stage works on."""
        item = self._lanes[stage_id].open
        return {} if item is None or item.inputs is None else item.inputs

    # ---- losses

    def decide(self, stage_id: int, loss: Loss) -> Decision:
        """The retry rule where input comes in segments.

        No other replica can continue a stage that has ended a segment. Then the whole request is restarted with all
        segments so far, if no output was shown and they are still kept; otherwise it fails.
        """
        decision = decide(loss if self.is_first(stage_id) else replace(loss, shown=Shown.NOTHING))
        if decision.verdict is Verdict.FAIL:
            return decision
        if self.is_first(stage_id) and decision.verdict is not Verdict.RESTART:
            return decision
        if loss.request_shown:
            return Decision(
                Verdict.FAIL, "part of the output was shown, and only that replica knew the segments before"
            )
        if self._kept is None:
            return Decision(Verdict.FAIL, "the segments so far are too long to be kept for another replica")
        return Decision(Verdict.RESTART)

    def forget_past(self) -> None:
        """Drop the client's segments: the request will not be restarted."""
        self._kept = None

    def restart(self) -> None:
        """Start again with all segments so far: they wait for the first stages."""
        self._lanes = {stage_id: _Lane() for stage_id in self._plan.stages}
        for stage_id in self._roots:
            self._lanes[stage_id].waiting.extend(self._kept or ())
