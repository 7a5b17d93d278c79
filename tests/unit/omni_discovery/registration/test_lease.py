"""Lease: events in, actions out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_discovery.errors import ConfigError
from omni_discovery.registration.lease import (
    DeclareHeld,
    DeclareLost,
    DeclareSuspect,
    Granted,
    GrantFailed,
    Lease,
    LeaseEvent,
    LeaseState,
    Renewed,
    RenewFailed,
    SendGrant,
    SendKeepAlive,
    ServerForgot,
    Tick,
)


def no_jitter() -> float:
    return 0.0


def held(ttl_s: float = 9.0, granted_ttl_s: float | None = None) -> Lease:
    lease = Lease(ttl_s, jitter=no_jitter)
    assert lease.handle(Tick(0.0)) == [SendGrant(ttl_s)]
    assert lease.handle(Granted(7, granted_ttl_s or ttl_s, 0.0)) == [DeclareHeld(7)]
    return lease


def test_a_new_lease_is_asked_for_at_the_first_tick_and_only_once() -> None:
    lease = Lease(9.0, jitter=no_jitter)
    assert lease.handle(Tick(0.0)) == [SendGrant(9.0)]
    assert lease.handle(Tick(0.1)) == []
    assert lease.next_tick_s is None


def test_a_failed_grant_is_tried_again_ever_later_but_within_a_bound() -> None:
    lease = Lease(60.0, jitter=lambda: 1.0)
    now_s, gaps = 0.0, []
    for _ in range(12):
        assert lease.handle(Tick(now_s)) == [SendGrant(60.0)]
        lease.handle(GrantFailed("no answer", now_s))
        assert lease.next_tick_s is not None
        gaps.append(lease.next_tick_s - now_s)
        now_s = lease.next_tick_s
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(0.1)
    assert gaps[-1] == pytest.approx(2.0)


def test_renewals_go_out_each_third_of_the_ttl_that_was_granted() -> None:
    """1. 2 s are asked for, a slow cluster grants 9 s
    2. the renewal is due after 3 s, not after two thirds of a second
    """
    lease = held(2.0, granted_ttl_s=9.0)
    assert lease.handle(Tick(2.9)) == []
    assert lease.next_tick_s == 3.0
    assert lease.handle(Tick(3.0)) == [SendKeepAlive(7)]


def test_jitter_only_ever_makes_a_renewal_earlier() -> None:
    lease = Lease(9.0, jitter=lambda: 1.0)
    lease.handle(Tick(0.0))
    lease.handle(Granted(7, 9.0, 0.0))
    assert lease.next_tick_s == pytest.approx(2.7)


def test_the_deadline_counts_from_when_the_renewal_was_sent() -> None:
    """The answer took two seconds; the server may have begun its countdown at the first of them."""
    lease = held()
    lease.handle(Tick(3.0))
    lease.handle(Renewed(7, 9.0, sent_at_s=3.0))
    assert lease.deadline_s == 12.0


def test_an_overtaken_answer_takes_nothing_back() -> None:
    lease = held()
    lease.handle(Renewed(7, 9.0, sent_at_s=6.0))
    lease.handle(Renewed(7, 9.0, sent_at_s=3.0))
    assert lease.deadline_s == 15.0


def test_past_the_deadline_the_lease_is_suspect_and_renewals_go_on() -> None:
    """1. no renewal gets through for a whole TTL
    2. the lease is suspect, its id is kept, and it is still renewed
    3. the server comes back and takes the renewal: nothing was lost
    """
    lease = held()
    lease.handle(Tick(3.0))
    lease.handle(RenewFailed(7, "no answer", 8.0))
    assert lease.handle(Tick(9.0)) == [DeclareSuspect(7, "no answer"), SendKeepAlive(7)]
    assert (lease.state, lease.lease_id) == (LeaseState.SUSPECT, 7)
    assert lease.handle(Tick(9.5)) == []
    assert lease.handle(Renewed(7, 9.0, sent_at_s=9.0)) == [DeclareHeld(7)]
    assert lease.state is LeaseState.HELD


def test_only_the_server_ends_a_lease() -> None:
    """1. suspect for an hour: still the same lease
    2. the server says that there is none: lost, and a new one is asked for
    """
    lease = held()
    for second in range(9, 3600):
        lease.handle(Tick(float(second)))
        lease.handle(RenewFailed(7, "no answer", float(second)))
    assert lease.lease_id == 7
    assert lease.handle(ServerForgot(7, 3600.0)) == [
        DeclareLost(7, "the server has no such lease after: no answer"),
    ]
    assert (lease.state, lease.lease_id) == (LeaseState.LOST, 0)
    assert lease.handle(Tick(3600.0)) == [SendGrant(9.0)]
    assert lease.handle(Granted(8, 9.0, 3600.0)) == [DeclareHeld(8)]


def test_a_failed_renewal_is_repeated_well_before_the_next_third() -> None:
    lease = held()
    lease.handle(Tick(3.0))
    lease.handle(RenewFailed(7, "reset", 3.0))
    assert lease.next_tick_s is not None
    assert lease.next_tick_s <= 3.1


def test_while_the_gate_is_shut_nothing_is_renewed_and_then_it_is() -> None:
    """Alive is not able: an engine without progress lets its lease run out; when it moves again, the lease goes on."""
    lease = held()
    for tenth in range(30, 200):
        actions = lease.handle(Tick(tenth / 10, may_renew=False))
        assert SendKeepAlive(7) not in actions
    assert lease.state is LeaseState.SUSPECT
    assert SendKeepAlive(7) in lease.handle(Tick(30.0))


def test_a_shut_gate_holds_back_the_next_lease_too() -> None:
    lease = held()
    lease.handle(ServerForgot(7, 10.0))
    assert lease.handle(Tick(11.0, may_renew=False)) == []
    assert lease.handle(Tick(13.0)) == [SendGrant(9.0)]


@pytest.mark.parametrize("event", [Renewed(6, 9.0, 1.0), RenewFailed(6, "late", 1.0), ServerForgot(6, 1.0)])
def test_news_of_another_lease_changes_nothing(event: LeaseEvent) -> None:
    lease = held()
    before = (lease.state, lease.lease_id, lease.deadline_s, lease.next_tick_s)
    assert lease.handle(event) == []
    assert (lease.state, lease.lease_id, lease.deadline_s, lease.next_tick_s) == before


def test_a_second_grant_does_not_replace_the_lease_that_is_held() -> None:
    lease = held()
    assert lease.handle(Granted(8, 9.0, 1.0)) == []
    assert lease.lease_id == 7


def test_a_lease_of_no_length_is_refused() -> None:
    with pytest.raises(ConfigError):
        Lease(0.0, jitter=no_jitter)


_events = st.one_of(
    st.builds(Tick, st.floats(0, 100), st.booleans()),
    st.builds(Granted, st.integers(1, 3), st.floats(1, 20), st.floats(0, 100)),
    st.builds(GrantFailed, st.just("x"), st.floats(0, 100)),
    st.builds(Renewed, st.integers(1, 3), st.floats(1, 20), st.floats(0, 100)),
    st.builds(RenewFailed, st.integers(1, 3), st.just("x"), st.floats(0, 100)),
    st.builds(ServerForgot, st.integers(1, 3), st.floats(0, 100)),
)


@settings(deadline=None)
@given(st.lists(_events, max_size=60))
def test_in_any_order_of_events_an_id_is_held_exactly_while_one_was_granted_and_not_forgotten(
    events: list[LeaseEvent],
) -> None:
    lease = Lease(5.0, jitter=no_jitter)
    expected = 0
    for event in events:
        if isinstance(event, Granted) and not expected:
            expected = event.lease_id
        elif isinstance(event, ServerForgot) and event.lease_id == expected:
            expected = 0
        lease.handle(event)
        assert lease.lease_id == expected
        assert (lease.state in {LeaseState.HELD, LeaseState.SUSPECT}) == bool(expected)


def test_a_lease_shows_itself_and_tells_what_happened_to_it() -> None:
    """1. granted, renewed twice; 2. none for its TTL; 3. renewed; 4. gone on the server's word"""
    lease = held(9.0)
    lease.handle(Renewed(7, 9.0, 3.0))
    lease.handle(Renewed(7, 9.0, 6.0))
    lease.handle(Tick(7.8))
    assert repr(lease) == "Lease(id=7, HELD, expires in 7.2 s, renewals=2)"
    lease.handle(RenewFailed(7, "no answer", 9.5))
    lease.handle(Tick(15.0))
    assert repr(lease) == "Lease(id=7, SUSPECT, renewals=2)"
    lease.handle(Renewed(7, 9.0, 16.0))
    lease.handle(ServerForgot(7, 20.0))
    assert list(lease.story) == [
        (0.0, "held: granted for 9 s as 7"),
        (9.5, "renewal failed: no answer"),
        (15.0, "suspect: no answer"),
        (16.0, "held: renewed"),
        (20.0, "lost: the server has no such lease"),
    ]


def test_a_story_is_bounded() -> None:
    lease = held()
    for number in range(1000):
        lease.handle(RenewFailed(7, "no answer", float(number)))
    assert len(lease.story) == 100
