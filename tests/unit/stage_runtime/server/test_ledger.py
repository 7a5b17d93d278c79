"""Which attempts are in flight, which count, and which may not begin any more."""

from __future__ import annotations

import pytest

from omni_discovery import wire
from omni_discovery.wire.session import Peer
from stage_runtime.server.ledger import Ledger, work_of

PEER = Peer("h1/a", "h1")
OTHER = Peer("h2/a", "h2")


def test_the_attempt_that_counts_is_the_one_that_was_opened_last() -> None:
    """1. attempt 0, then 1; 2. the end of attempt 0 leaves attempt 1 in place; 3. its own end does not"""
    ledger = Ledger()
    first = ledger.open_ticket(PEER, "r", 0, 5)
    second = ledger.open_ticket(PEER, "r", 1, 5)
    assert first.key != second.key
    assert ledger.current_ticket("h1", "r") is second
    assert ledger.close_ticket(first)
    assert ledger.current_ticket("h1", "r") is second
    assert ledger.close_ticket(second)
    assert ledger.current_ticket("h1", "r") is None
    assert len(ledger) == 0
    assert repr(ledger) == "Ledger(in_flight=0, ended=1, accepted=2)"


def test_a_request_ends_once() -> None:
    ledger = Ledger()
    ticket = ledger.open_ticket(PEER, "r", 0, 5)
    assert ledger.close_ticket(ticket)
    assert not ledger.close_ticket(ticket)


@pytest.mark.parametrize("is_over", [False, True])
def test_an_attempt_that_runs_or_ended_does_not_begin_again_and_a_later_one_does(is_over: bool) -> None:
    ledger = Ledger()
    ticket = ledger.open_ticket(PEER, "r", 3, 5)
    if is_over:
        ledger.close_ticket(ticket)
    seen = [attempt for attempt in range(6) if ledger.has_seen_attempt(PEER, "r", attempt)]
    assert seen == [0, 1, 2, 3]
    assert not ledger.has_seen_attempt(OTHER, "r", 0)
    assert not ledger.has_seen_attempt(PEER, "q", 0)


def test_attempts_that_were_barred_stay_so_when_an_earlier_one_is() -> None:
    ledger = Ledger()
    ledger.bar_attempts(PEER, "r", 4)
    ledger.bar_attempts(PEER, "r", 1)
    assert ledger.has_seen_attempt(PEER, "r", 4)
    assert not ledger.has_seen_attempt(PEER, "r", 5)


def test_of_ended_requests_the_oldest_are_forgotten() -> None:
    """What is barred again counts as new."""
    ledger = Ledger(max_ended=2)
    for request_id in ("a", "b", "a", "c"):
        ledger.bar_attempts(PEER, request_id, 0)
    assert [name for name in "abc" if ledger.has_seen_attempt(PEER, name, 0)] == ["a", "c"]


def test_parked_requests_are_known_by_the_order_in_which_they_were_parked() -> None:
    ledger = Ledger()
    assert ledger.longest_parked is None
    first, second = (ledger.open_ticket(PEER, name, 0, 5) for name in "ab")
    for ticket in (second, first):
        ledger.park(ticket, is_parked=True)
    assert (ledger.parked_count, ledger.longest_parked) == (2, second)
    ledger.park(second, is_parked=False)
    assert (second.is_parked, first.is_parked) == (False, True)
    assert (ledger.parked_count, ledger.longest_parked) == (1, first)
    ledger.close_ticket(first)
    assert ledger.parked_count == 0


def test_the_requests_of_a_connection_are_its_own() -> None:
    ledger = Ledger()
    mine, _ = ledger.open_ticket(PEER, "r", 0, 5), ledger.open_ticket(OTHER, "r", 0, 5)
    assert ledger.tickets_of_peer("h1/a") == [mine]


def test_work_is_due_by_our_own_clock_and_awaits_more_input_only_where_it_was_said() -> None:
    ledger = Ledger()
    ticket = ledger.open_ticket(PEER, "r", 2, 5)
    work = work_of(ticket, wire.Submit(epoch=5, request_id="r", attempt=2, remaining_s=7.0, priority=-1), 100.0)
    assert (work.key, work.owner, work.attempt, work.priority) == (ticket.key, ticket.owner, 2, -1)
    assert (work.accepted_at_s, work.deadline_s, work.segment) == (100.0, 107.0, None)
    assert work_of(ticket, wire.Submit(epoch=5, request_id="r", segmented=True), 100.0).segment == 0
    assert work.client == ""
    assert work_of(ticket, wire.Submit(epoch=5, request_id="r", client="7a"), 100.0).client == "7a"


@pytest.mark.attack("Z35")
def test_a_next_stage_that_is_named_again_and_again_gets_its_hand_off_once() -> None:
    ledger = Ledger()
    ticket = ledger.open_ticket(PEER, "r", 0, 5)
    stages = (2, 1, 2, *(1,) * 200)
    work = work_of(ticket, wire.Submit(epoch=5, request_id="r", next_stages=stages, stream_to=stages), 0.0)
    assert work.next_stages == work.stream_to == (2, 1)
