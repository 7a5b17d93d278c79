"""Hand-offs in pieces (async_chunk): which pieces go on, and which stages depend on which. Pure.

A stage that works on another's pieces begins as soon as each of its inputs has begun. It depends on the attempt that
feeds it: if the producer's attempt is lost, the consumer's is stopped, and begins again with the pieces of the next
attempt. The machine does that; the functions here read the state, move relays and never write a phase.
"""

from __future__ import annotations

from collections.abc import Iterator

from hub.request import events as ev
from hub.request.events import Action
from hub.request.retry import Shown
from hub.request.state import Phase, PieceRelay, RequestState, StageRun
from omni_discovery import wire


def overfull_stage(state: RequestState, run: StageRun, message: wire.HandOffPiece) -> int | None:
    """The consumer whose window the producer has not kept to with its next piece; None if there is none."""
    for ref in message.payloads:
        relay = state.runs[ref.to_stage].streams.get(run.stage_id) if ref.to_stage in state.runs else None
        if relay is not None and relay.is_full and (run.stage_id, ref.to_stage) in state.plan.windows:
            return ref.to_stage
    return None


def add_pieces(state: RequestState, run: StageRun, message: wire.HandOffPiece) -> Iterator[StageRun]:
    """Store a producer's next piece in the relay of each consumer; yield the consumer after each."""
    run.next_piece += 1
    for ref in {ref.to_stage: ref for ref in message.payloads}.values():
        window = state.plan.windows.get((run.stage_id, ref.to_stage))
        if window is not None:
            consumer = state.runs[ref.to_stage]
            consumer.streams.setdefault(run.stage_id, PieceRelay(window)).add(ref)
            yield consumer


def end_pieces(state: RequestState, run: StageRun, to_stage: int) -> list[Action] | None:
    """The producer is done: pass the end on to a consumer of its pieces. None if it made no pieces for that stage."""
    relay = state.runs[to_stage].streams.get(run.stage_id)
    if relay is None:
        return None
    relay.complete()
    return flow(state, state.runs[to_stage])


def acknowledge_pieces(state: RequestState, run: StageRun, message: wire.PieceTaken) -> list[Action]:
    """The consumer has taken pieces of a producer: send it the next ones, and tell the producer."""
    relay = run.streams.get(message.from_stage)
    if relay is None or not relay.acknowledge(message.number):
        return [ev.Drop("piece")]
    return flow(state, run)


def repeat_pieces(state: RequestState, run: StageRun) -> list[Action]:
    """The session of the stage's replica is back: repeat the pieces and counts that may be lost, in both directions."""
    for relay in run.streams.values():
        relay.rewind()
    actions = flow(state, run)
    if run.replica is None:
        return actions
    for to_stage in state.plan.pieces_to(run.stage_id):
        relay_to = state.runs[to_stage].streams.get(run.stage_id)
        number = 0 if relay_to is None else relay_to.room_sent
        actions.append(ev.PieceRoom(run.stage_id, run.attempt, run.replica, to_stage, number, again=True))
    return actions


def flow(state: RequestState, consumer: StageRun) -> list[Action]:
    """Feed a consumer the pieces that fit its windows, and tell its producers how many it has taken."""
    actions: list[Action] = []
    # A stage that waits for another input, which may be made of the same pieces, must not hold their producer up.
    is_free = consumer.settled or consumer.phase is Phase.WAITING
    for from_stage, relay in consumer.streams.items():
        if consumer.running and consumer.replica is not None:
            actions += [
                ev.FeedInput(consumer.stage_id, consumer.attempt, consumer.replica, from_stage, number, ref)
                for number, ref in relay.due()
            ]
        producer = state.runs[from_stage]
        number = relay.new_room(is_free=is_free) if producer.running and producer.replica is not None else None
        if number is not None and producer.replica is not None:
            actions.append(ev.PieceRoom(from_stage, producer.attempt, producer.replica, consumer.stage_id, number))
    return actions


def stage_in_doubt(state: RequestState, run: StageRun) -> int | None:
    """The stage for whose sake a new attempt may not reproduce output that was made of the stage's pieces and shown.

    None: there is no such output, or it is reproduced. That is so where all stages on the way to it are deterministic,
    and where the client has also seen the stage's own output, behind which the new attempt continues.
    """
    return _in_doubt(state, run, None if run.deterministic else run.stage_id)


def _in_doubt(state: RequestState, run: StageRun, doubtful: int | None) -> int | None:
    """``doubtful`` is the first stage on the way to ``run`` that is not deterministic."""
    is_continued = run.seen.kind in (Shown.TOKENS, Shown.PIECES)
    for consumer in consumers_of_pieces(state, run):
        if consumer.settled:
            continue
        first = consumer.stage_id if doubtful is None and not consumer.deterministic else doubtful
        can_go_on = first is None or (is_continued and consumer.seen.kind not in (Shown.OTHER, Shown.LONG))
        if consumer.seen and not can_go_on:
            return first
        found = _in_doubt(state, consumer, first)
        if found is not None:
            return found
    return None


def producer_at_fault(state: RequestState, run: StageRun) -> StageRun | None:
    """The producer whose hand-off the stage can't read, if it still runs and is the only one that can be meant."""
    producers = [state.runs[stage_id] for stage_id in run.streams]
    if len(producers) == 1 and producers[0].running and not run.handed:
        return producers[0]
    return None


def consumers_of_pieces(state: RequestState, run: StageRun) -> Iterator[StageRun]:
    """The stages that have got pieces of this stage's present attempt."""
    for stage_id in state.plan.next_stages[run.stage_id]:
        # A companion has runs of the first stage only.
        consumer = state.runs.get(stage_id)
        if consumer is not None and run.stage_id in consumer.streams:
            yield consumer
