"""How the pieces of one request's hand-offs are passed on, and what becomes of them when a stage is lost. Pure.

A stage that works on pieces of another begins when each of its inputs has begun. It shares the fate of what it is fed
with: if the producer's attempt is lost, what was made of its pieces is stopped and begun anew with the next attempt's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hub.request import events as ev
from hub.request.events import Action
from hub.request.retry import Shown
from hub.request.state import Phase, PieceRelay, StageRun
from omni_discovery import wire

if TYPE_CHECKING:
    from hub.request.machine import RequestBody


def take_piece(body: RequestBody, run: StageRun, message: wire.HandOffPiece, now_s: float) -> list[Action]:
    """The stage has made its next piece: pass it on, and begin the stages that waited for it."""
    run.next_piece += 1
    actions: list[Action] = []
    for ref in {ref.to_stage: ref for ref in message.payloads}.values():
        window = body.plan.windows.get((run.stage_id, ref.to_stage))
        if window is None:
            continue
        target = body.runs[ref.to_stage]
        target.streams.setdefault(run.stage_id, PieceRelay(window)).add(ref)
        actions += body.dispatch_if_ready(target, now_s)
        actions += flow(body, target)
    return actions


def end_pieces(body: RequestBody, run: StageRun, to_stage: int) -> list[Action] | None:
    """The stage is done: tell one that works on its pieces. None if it has made none for that."""
    relay = body.runs[to_stage].streams.get(run.stage_id)
    if relay is None:
        return None
    relay.complete()
    return flow(body, body.runs[to_stage])


def taken(body: RequestBody, run: StageRun, from_stage: int, number: int) -> list[Action]:
    """The stage has taken pieces of another."""
    relay = run.streams.get(from_stage)
    if relay is None or not relay.take(number):
        return [ev.Drop("piece")]
    return flow(body, run)


def session_back(body: RequestBody, run: StageRun) -> list[Action]:
    """What was on its way to or from the stage's replica may be lost: say it again."""
    for relay in run.streams.values():
        relay.again()
    actions = flow(body, run)
    if run.replica is None:
        return actions
    for to_stage in body.plan.pieces_to(run.stage_id):
        ours = body.runs[to_stage].streams.get(run.stage_id)
        roomed = 0 if ours is None else ours.roomed
        actions.append(ev.PieceRoom(run.stage_id, run.attempt, run.replica, to_stage, roomed, again=True))
    return actions


def flow(body: RequestBody, target: StageRun) -> list[Action]:
    """What can go to a stage now, and what those that feed it may be told."""
    actions: list[Action] = []
    # One that waits for another input, which may be made of the same pieces, must not hold those up.
    is_free = target.settled or target.phase is Phase.WAITING
    for from_stage, relay in target.streams.items():
        if target.running and target.replica is not None:
            actions += [
                ev.Feed(target.stage_id, target.attempt, target.replica, from_stage, number, ref)
                for number, ref in relay.due()
            ]
        producer = body.runs[from_stage]
        number = relay.room(is_free=is_free) if producer.running and producer.replica is not None else None
        if number is not None and producer.replica is not None:
            actions.append(ev.PieceRoom(from_stage, producer.attempt, producer.replica, target.stage_id, number))
    return actions


def withdraw(body: RequestBody, run: StageRun) -> list[Action]:
    """The stage's attempt is over, and with it all that was being made of its pieces."""
    actions: list[Action] = []
    for target in _fed_by(body, run):
        del target.streams[run.stage_id]
        if target.settled:
            continue
        if target.running:
            actions.append(ev.Abort(target.stage_id, target.attempt, target.replica))
        target.phase, target.replica = Phase.WAITING, None
        actions += withdraw(body, target) + flow(body, target)
    return actions


def is_shown(body: RequestBody, run: StageRun) -> bool:
    """Whether the client has seen what was made of the stage's pieces, and they are not sure to be made again.

    They are where the client has seen what they were made of, too: another attempt goes on behind that.
    """
    exact = run.seen.kind in (Shown.TOKENS, Shown.PIECES)
    for target in _fed_by(body, run):
        if target.settled:
            continue
        if (target.seen and (not exact or target.seen.kind is Shown.OTHER)) or is_shown(body, target):
            return True
    return False


def producer_at_fault(body: RequestBody, run: StageRun) -> StageRun | None:
    """Whose work it is that the stage can't read, if that still runs and nobody else's can be meant."""
    producers = [body.runs[stage_id] for stage_id in run.streams]
    if len(producers) == 1 and producers[0].running and not run.handed:
        return producers[0]
    return None


def _fed_by(body: RequestBody, run: StageRun) -> Iterator[StageRun]:
    for stage_id in body.plan.next_stages[run.stage_id]:
        # A companion has runs of the first stage only.
        target = body.runs.get(stage_id)
        if target is not None and run.stage_id in target.streams:
            yield target
