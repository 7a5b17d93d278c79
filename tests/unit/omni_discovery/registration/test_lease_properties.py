"""A lease under any sequence of answers, late, repeated, lost or about another lease."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.registration.lease import (
    DeclareHeld,
    DeclareLost,
    Granted,
    GrantFailed,
    Lease,
    LeaseAction,
    LeaseEvent,
    LeaseState,
    Renewed,
    RenewFailed,
    SendGrant,
    SendKeepAlive,
    ServerForgot,
    Tick,
)

TTL_S = 9.0
OWN, OTHER = 1, 77

STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 8.0),
        st.sampled_from(
            ["tick", "barred", "answer", "fail", "forget", "lose", "late", "other_renewed", "other_forgot"]
        ),
    ),
    max_size=60,
)


class Play:
    """A lease, a server that answers as told, and what must always hold."""

    def __init__(self) -> None:
        self.lease = Lease(TTL_S, jitter=lambda: 0.5)
        self.now_s = 0.0
        self.granted = 0
        self.sent: tuple[LeaseAction, float] | None = None
        self.answered: list[LeaseEvent] = []
        self.declared: list[LeaseAction] = []

    def feed(self, event: LeaseEvent) -> None:
        before, deadline_s = self.lease.lease_id, self.lease.deadline_s
        actions = self.lease.handle(event)
        if before and self.lease.lease_id != before:
            assert isinstance(event, ServerForgot)
            assert event.lease_id == before
        elif before:
            assert self.lease.deadline_s >= deadline_s
        for action in actions:
            if isinstance(action, SendGrant | SendKeepAlive):
                assert self.sent is None, "two questions at a time"
                assert isinstance(action, SendGrant) == (self.lease.lease_id == 0)
                self.sent = (action, self.now_s)
            else:
                self.declared.append(action)
        assert (self.lease.state in (LeaseState.HELD, LeaseState.SUSPECT)) == (self.lease.lease_id != 0)

    def step(self, delay_s: float, what: str) -> None:
        self.now_s += delay_s
        match what:
            case "tick" | "barred":
                self.feed(Tick(self.now_s, may_renew=what == "tick"))
            case "answer" | "fail" | "lose":
                self.answer(what)
            case "forget" if self.lease.lease_id:
                self.sent = None
                self.feed(ServerForgot(self.lease.lease_id, self.now_s))
            case "late" if self.answered and self.sent is None:
                self.feed(self.answered[len(self.answered) // 2])
            case "other_renewed":
                self.feed(Renewed(OTHER, TTL_S, self.now_s))
            case "other_forgot":
                self.feed(ServerForgot(OTHER, self.now_s))

    def answer(self, how: str) -> None:
        if self.sent is None:
            return
        (action, sent_at_s), self.sent = self.sent, None
        event: LeaseEvent
        if isinstance(action, SendGrant):
            if how == "answer":
                self.granted += 1
            event = Granted(self.granted, TTL_S, sent_at_s) if how == "answer" else GrantFailed("no answer", self.now_s)
        else:
            assert isinstance(action, SendKeepAlive)
            renewed = Renewed(action.lease_id, TTL_S, sent_at_s)
            event = renewed if how == "answer" else RenewFailed(action.lease_id, "no answer", self.now_s)
            if how == "answer":
                self.answered.append(event)
        self.feed(event)


@given(STEPS)
def test_only_the_server_ends_a_lease_and_one_question_is_out_at_a_time(steps: list[Any]) -> None:
    play = Play()
    for delay_s, what in steps:
        play.step(delay_s, what)


@given(STEPS)
def test_a_server_that_answers_again_is_followed_by_a_held_lease(steps: list[Any]) -> None:
    """Whatever went before: within a few answered questions the lease is held, and stays so."""
    play = Play()
    for delay_s, what in steps:
        play.step(delay_s, what)
    for _ in range(40):
        play.answer("answer")
        play.step(1.0, "tick")
    assert play.lease.state is LeaseState.HELD
    assert play.lease.deadline_s > play.now_s


@given(STEPS)
def test_held_and_lost_are_declared_in_turn(steps: list[Any]) -> None:
    play = Play()
    for delay_s, what in steps:
        play.step(delay_s, what)
    ends = [action for action in play.declared if isinstance(action, DeclareHeld | DeclareLost)]
    for former, latter in itertools.pairwise(ends):
        assert not (isinstance(former, DeclareLost) and isinstance(latter, DeclareLost))
