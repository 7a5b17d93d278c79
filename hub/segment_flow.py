"""What a request's machine does where input comes in segments: one after the other, through all stages. Pure."""

from __future__ import annotations

from hub import request_events as ev
from hub.outputs import OmniOutput
from hub.request_body import RequestBody
from hub.request_events import Action
from hub.request_losses import blame, gap, lost
from hub.request_state import StageRun


def arrived(body: RequestBody, event: ev.Segment, now_s: float) -> list[Action]:
    """The client has sent its next segment, or said that there are no more. What comes after that is dropped."""
    if body.segments is None or body.segments.is_complete:
        return []
    body.segments.add(event.inputs)
    return body.next_segments(now_s)


def segment_done(body: RequestBody, run: StageRun, event: ev.SegmentDone, now_s: float) -> list[Action]:
    """A stage has ended a segment: it is shown, and handed on."""
    segments, message = body.segments, event.message
    if message.seq < run.next_seq:
        return [ev.Drop("duplicate")]
    if message.seq > run.next_seq:
        return gap(body, run, message.seq, now_s)
    if segments is None or segments.is_ending(run.stage_id) or segments.is_idle(run.stage_id):
        return lost(body, run, blame(run, "it ended a segment that it had not been given"), now_s)
    if run.next_seq < run.skip:
        return lost(body, run, blame(run, "it made less than had been shown before"), now_s)
    run.next_seq, run.skip = run.next_seq + 1, 0
    segment = segments.segment_of(run.stage_id)
    segments.ended(run.stage_id, message.payloads)
    _note(body, run, event)
    actions: list[Action] = []
    modality = body.plan.finals.get(run.stage_id)
    if modality is not None:
        # Nobody can go on behind it any more, so what it said need not be remembered; that it said something must.
        run.seen.token_ids, run.seen.texts = [], []
        run.seen.chunks += 1
        actions.append(ev.Emit(segment_output(body.shown_id, run, segment, modality, event)))
    if body.request_shown:
        segments.forget_past()
    return actions + body.next_segments(now_s)


def said_again(body: RequestBody, run: StageRun) -> list[Action]:
    """The session of a stage's replica is back: what it was told last may not have come there."""
    if body.segments is None or body.segments.is_first(run.stage_id):
        return []
    return [body.update(run, body.segments.last_step(run.stage_id))]


def segment_output(shown_id: str, run: StageRun, segment: int, modality: str, event: ev.SegmentDone) -> OmniOutput:
    """What tells the client that a segment has ended."""
    return OmniOutput(
        request_id=shown_id,
        stage_id=run.stage_id,
        modality=modality,
        usage=event.message.usage,
        replica=str(run.replica),
        received_at_s=event.received_at_s,
        segment=segment,
        segment_end=event.message.finish_reason,
    )


def _note(body: RequestBody, run: StageRun, event: ev.SegmentDone) -> None:
    streaming = body.state.streaming
    if not body.plan.inputs[run.stage_id]:
        streaming.segment_finished = True
        streaming.new_prompt_len_snapshot = event.message.usage.get("prompt_tokens")
    given_to = {ref.to_stage for ref in event.message.payloads} & set(body.plan.next_stages[run.stage_id])
    for to_stage in given_to:
        edge = f"{run.stage_id}-{to_stage}"
        streaming.bridge_states[edge] = streaming.bridge_states.get(edge, 0) + 1
