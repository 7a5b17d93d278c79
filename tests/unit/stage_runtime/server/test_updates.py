"""What a hub may still order about a request in flight."""

from __future__ import annotations

import pytest

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.engine_loop.jobs import NextSegment, Pause, PieceArrived, ReleasePayload, WindowUpdate
from stage_runtime.server.ledger import Ledger, Ticket
from stage_runtime.server.updates import Order, accept_update, jobs_of

PEER = Peer("h1/a", "h1")


def opened(segment: int | None = 0, *, is_idle: bool = True) -> tuple[Ledger, Ticket]:
    ledger = Ledger()
    ticket = ledger.open_ticket(PEER, "r", 1, 5)
    ticket.segment, ticket.is_idle = segment, is_idle
    return ledger, ticket


def update(segment: int, attempt: int = 1, *, is_last: bool = False) -> wire.Update:
    return wire.Update(epoch=5, request_id="r", attempt=attempt, segment=segment, is_last=is_last)


def test_the_next_segment_becomes_a_job_and_the_request_is_busy_again() -> None:
    ledger, ticket = opened()
    answer, jobs = accept_update(ledger, PEER, update(1, is_last=True))
    assert answer == wire.Accepted(epoch=5, request_id="r", attempt=1, queue_length=1)
    assert [(job.key, job.segment, job.is_last) for job in jobs] == [(ticket.key, 1, True)]
    assert (ticket.segment, ticket.is_idle) == (1, False)


def test_a_segment_that_comes_again_is_accepted_again_without_a_job() -> None:
    ledger, ticket = opened(2, is_idle=False)
    answer, jobs = accept_update(ledger, PEER, update(2))
    assert (type(answer), jobs) == (wire.Accepted, [])
    assert (ticket.segment, ticket.is_idle) == (2, False)


@pytest.mark.parametrize(
    ("order", "segment", "is_idle", "peer", "reason"),
    [
        (update(1, attempt=0), 0, True, PEER, "no such request"),
        (update(1), 0, True, Peer("h1/b", "h1"), "no such request"),
        (update(1), 0, True, Peer("h2/a", "h2"), "no such request"),
        (update(1), None, True, PEER, "not begun as one that comes in segments"),
        (update(2), 0, True, PEER, "segment 2 came behind segment 0"),
        (update(1), 0, False, PEER, "segment 0 has not ended yet"),
    ],
)
def test_a_segment_that_does_not_fit_is_refused(
    order: wire.Update, segment: int | None, is_idle: bool, peer: Peer, reason: str
) -> None:
    ledger, _ = opened(segment, is_idle=is_idle)
    answer, jobs = accept_update(ledger, peer, order)
    assert isinstance(answer, wire.Rejected)
    assert (answer.kind, jobs) == (wire.FailureKind.INVALID, [])
    assert reason in answer.reason


def orders(attempt: int) -> list[Order]:
    return [
        wire.Pause(epoch=5, request_id="r", attempt=attempt, paused=False),
        wire.Feed(epoch=5, request_id="r", attempt=attempt, from_stage=0, number=3, is_last=True),
        wire.PieceRoom(epoch=5, request_id="r", attempt=attempt, to_stage=2, number=4, again=True),
    ]


def test_each_order_about_a_request_is_a_job_of_its_own() -> None:
    ledger, ticket = opened()
    answers = [jobs_of(ledger, PEER, order) for order in orders(1)]
    accepted = wire.Accepted(epoch=5, request_id="r", attempt=1, queue_length=1)
    assert answers == [
        (accepted, [Pause(ticket.key, False)]),
        (None, [PieceArrived(ticket.key, 0, 3, None, True)]),
        (None, [WindowUpdate(ticket.key, 2, 4, True)]),
    ]
    (job,) = jobs_of(ledger, PEER, update(1))[1]
    assert isinstance(job, NextSegment)


def test_orders_about_another_attempt_or_request_do_nothing() -> None:
    ledger, _ = opened()
    assert all(jobs_of(ledger, PEER, order) == (None, []) for order in orders(0))
    assert all(jobs_of(Ledger(), PEER, order) == (None, []) for order in orders(1))


def test_hand_offs_are_released_also_where_the_request_is_over() -> None:
    released = jobs_of(Ledger(), PEER, wire.ReleasePayloads(epoch=5, request_id="r"))
    assert released == (None, [ReleasePayload("h1/r")])
