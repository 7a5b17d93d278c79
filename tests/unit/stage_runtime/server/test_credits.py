"""Slots lent before the requests come: never more than there are, and to those who wait."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stage_runtime.server.credits import CreditBook, DoubtHub, GrantCredits, LostSlots, RecallCredits

#: The most that the wire lets a hub say.
ENDLESS = (1 << 53) - 1


def book(capacity: int, *peers: str) -> CreditBook:
    """A book whose hubs have opened their sessions one after the other."""
    made = CreditBook(recall_timeout_s=0.5)
    made.set_capacity(capacity)
    for peer in peers:
        made.open_account(peer, 1)
        made.lend_and_recall(0.0)
    return made


def test_the_only_hub_gets_all_and_the_next_what_is_free() -> None:
    """1. a gets all 8, and b nothing; 2. a session ends with 4 of them unspent: b gets those, and c nothing."""
    one = book(8)
    one.open_account("a", 1)
    assert one.lend_and_recall(0.0) == [GrantCredits("a", 1, 8)]
    one.open_account("b", 1)
    assert one.lend_and_recall(0.0) == []
    for _ in range(4):
        one.begin_request("a", credit=True)
    one.close_account("a")
    assert one.lend_and_recall(0.0) == [GrantCredits("b", 1, 4)]
    one.open_account("c", 1)
    assert one.lend_and_recall(0.0) == []


def test_hubs_that_were_there_before_the_replica_was_ready_share_alike() -> None:
    """1. three hubs greet a replica that loads its model; 2. it is ready with 8 slots: nobody gets more than 3."""
    loading = book(0, "a", "b", "c")
    loading.set_capacity(8)
    granted = {action.peer: action.credits for action in loading.lend_and_recall(0.0)}
    assert sum(granted.values()) == 8
    assert max(granted.values()) == 3


def test_a_slot_that_nobody_wants_goes_back_to_the_hub_whose_request_ended() -> None:
    shared = book(2, "a", "b")
    assert shared.begin_request("a", credit=True)
    assert shared.lend_and_recall(0.0) == []
    shared.end_request("a")
    assert shared.lend_and_recall(0.0) == [GrantCredits("a", 1, 1)]


def test_what_was_lent_for_requests_that_went_elsewhere_is_recalled_at_once_for_others() -> None:
    """1. b waits, and is lent the only slot; 2. its request went to another replica, and it says that none waits;
    3. a waits: the slot is recalled now, not when b has had time to spend it
    """
    one = book(1, "a", "b")
    one.begin_request("a", credit=True)
    one.record_demand("b", 1, 1, 0.0, now_s=10.0)
    one.lend_and_recall(10.0)
    one.end_request("a")
    assert one.lend_and_recall(10.1) == [GrantCredits("b", 1, 1)]
    one.record_demand("a", 1, 1, 0.0, now_s=10.11)
    assert one.lend_and_recall(10.11) == []
    one.record_demand("b", 1, 0, 0.0, now_s=10.12)
    assert one.lend_and_recall(10.12) == [RecallCredits("b", 1, 1)]


def test_a_freed_slot_goes_to_the_hub_that_waits_longest_and_then_to_the_next() -> None:
    """1. a has all 4 slots running; b waits for 1 s with two requests, c for 2 s with one; 2. slots come free."""
    busy = book(4, "a", "b", "c")
    for _ in range(4):
        assert busy.begin_request("a", credit=True)
    busy.record_demand("b", 1, 2, 1.0, now_s=10.0)
    busy.record_demand("c", 1, 1, 2.0, now_s=10.0)
    granted = []
    for _ in range(4):
        busy.end_request("a")
        granted += [(action.peer, action.credits) for action in busy.lend_and_recall(10.0)]
    assert granted == [("c", 1), ("b", 1), ("b", 1), ("a", 1)]


def test_hubs_with_many_waiting_take_turns_by_how_long_each_request_has_waited() -> None:
    """Both queues are taken to be evenly filled since their oldest came: the longer one does not shut the other out."""
    busy = book(8, "a", "b", "c")
    for _ in range(8):
        busy.begin_request("a", credit=True)
    busy.record_demand("b", 1, 100, 1.02, now_s=10.0)
    busy.record_demand("c", 1, 4, 1.0, now_s=10.0)
    for _ in range(8):
        busy.end_request("a")
    granted = {action.peer: action.credits for action in busy.lend_and_recall(10.0)}
    assert set(granted) == {"b", "c"}


def test_credits_that_lie_idle_are_asked_back_for_a_hub_that_waits() -> None:
    """1. a holds all 4; b wants 3; 2. a has spent one meanwhile and gives 2 back; 3. b gets those, and asks a again."""
    one = book(4, "a", "b")
    one.record_demand("b", 1, 3, 0.1, now_s=1.0)
    assert one.lend_and_recall(1.0) == [RecallCredits("a", 1, 3)]
    assert one.lend_and_recall(1.1) == []
    for _ in range(2):
        assert one.begin_request("a", credit=True)
    assert one.take_back("a", 1, 2)
    assert one.lend_and_recall(1.2) == [GrantCredits("b", 1, 2)]
    assert (one.unspent_of("a"), one.free) == (0, 0)


def test_hubs_that_want_themselves_are_not_asked() -> None:
    one = book(4, "a", "b")
    one.record_demand("a", 1, 1, 0.0, now_s=1.0)
    one.record_demand("b", 1, 1, 0.0, now_s=1.0)
    assert one.lend_and_recall(1.0) == []


def test_a_recall_without_an_answer_forfeits_and_the_late_answer_takes_nothing_more() -> None:
    """1. a does not answer for 0.5 s: b gets what was asked for; 2. a's answer comes: it keeps the rest."""
    one = book(4, "a", "b")
    one.record_demand("b", 1, 2, 0.0, now_s=1.0)
    assert one.lend_and_recall(1.0) == [RecallCredits("a", 1, 2)]
    assert one.lend_and_recall(1.4) == []
    assert one.lend_and_recall(1.5) == [GrantCredits("b", 1, 2)]
    assert one.take_back("a", 1, 2)
    assert (one.unspent_of("a"), one.unspent_of("b")) == (2, 2)


def test_a_hub_that_left_a_recall_unanswered_is_lent_nothing_it_did_not_ask_for() -> None:
    one = book(2, "a", "b")
    one.begin_request("a", credit=True)
    one.record_demand("b", 1, 1, 0.0, now_s=1.0)
    one.lend_and_recall(1.0)
    one.lend_and_recall(2.0)
    one.end_request("a")
    assert one.lend_and_recall(2.0) == [GrantCredits("b", 1, 1)]


def test_credits_that_only_we_believe_in_are_gone_after_a_recall() -> None:
    """A hub that has lost count gives back less than was asked: so it has nothing left but what came since."""
    one = book(4, "a", "b")
    one.record_demand("b", 1, 3, 0.0, now_s=1.0)
    one.lend_and_recall(1.0)
    one.take_back("a", 1, 1)
    assert one.unspent_of("a") == 0
    assert one.lend_and_recall(1.1) == [GrantCredits("b", 1, 3), GrantCredits("a", 1, 1)]


def test_a_new_session_voids_what_the_old_one_held_and_the_same_again_changes_nothing() -> None:
    one = book(4, "a")
    one.open_account("a", 1)
    assert one.lend_and_recall(0.0) == []
    one.open_account("a", 2)
    assert one.lend_and_recall(0.0) == [GrantCredits("a", 2, 4)]
    assert not one.take_back("a", 1, 4)
    assert not one.record_demand("a", 1, 1, 0.0, 0.0)
    assert one.unspent_of("a") == 4


def test_what_a_lost_hub_held_goes_to_the_others() -> None:
    one = book(4, "a", "b")
    one.close_account("a")
    one.close_account("a")
    assert one.lend_and_recall(0.0) == [GrantCredits("b", 1, 4)]


def test_work_without_a_credit_takes_a_slot_all_the_same() -> None:
    """1. two requests come without a credit while all 4 slots are lent; 2. as much less is lent until they end."""
    one = book(4, "a")
    assert not one.begin_request("x", credit=False)
    assert not one.begin_request("x", credit=True)
    for _ in range(2):
        one.begin_request("a", credit=True)
    one.lend_and_recall(0.0)
    for _ in range(2):
        one.end_request("a")
    assert one.free == 0
    one.end_request("x")
    one.end_request("x")
    assert one.lend_and_recall(0.0) == [GrantCredits("a", 1, 2)]


def test_a_replica_that_takes_nothing_lends_nothing_and_asks_everything_back() -> None:
    draining = book(4, "a")
    draining.begin_request("a", credit=True)
    draining.set_capacity(0)
    assert draining.lend_and_recall(1.0) == [RecallCredits("a", 1, 3)]
    draining.take_back("a", 1, 3)
    draining.end_request("a")
    assert draining.lend_and_recall(1.1) == []
    assert draining.unspent == 0


class AnyOrder(RuleBasedStateMachine):
    """Hubs of which some follow the protocol; a replica whose capacity changes."""

    peers = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.book = CreditBook(recall_timeout_s=0.5)
        self.capacity = 0
        self.now_s = 0.0
        self.sessions: dict[str, int] = {}
        self.on_credit: list[str] = []
        self.uncredited: list[str] = []
        #: Whether the capacity has shrunk below what is out; then nothing may be lent until that is over.
        self.is_over = False

    def settle(self) -> None:
        before = len(self.on_credit) + self.book.unspent
        granted = 0
        for action in self.book.lend_and_recall(self.now_s):
            assert action.credits > 0
            if isinstance(action, DoubtHub):
                continue
            assert action.session == self.sessions[action.peer]
            if isinstance(action, GrantCredits):
                granted += action.credits
        if granted:
            assert len(self.on_credit) + len(self.uncredited) + self.book.unspent <= self.capacity, before

    @rule(peer=peers, session=st.integers(1, 3))
    def hello(self, peer: str, session: int) -> None:
        self.sessions[peer] = session
        self.book.open_account(peer, session)

    @rule(peer=peers)
    def lose(self, peer: str) -> None:
        self.sessions.pop(peer, None)
        self.book.close_account(peer)

    @rule(peer=peers, session=st.integers(1, 3), waiting=st.integers(0, 5), wait_s=st.floats(0, 10))
    def want(self, peer: str, session: int, waiting: int, wait_s: float) -> None:
        assert self.book.record_demand(peer, session, waiting, wait_s, self.now_s) == (
            self.sessions.get(peer) == session
        )

    @rule(peer=peers, session=st.integers(1, 3), count=st.integers(0, 9))
    def give_back(self, peer: str, session: int, count: int) -> None:
        self.book.take_back(peer, session, count)

    @rule(peer=peers, credit=st.booleans())
    def submit(self, peer: str, credit: bool) -> None:
        had = self.book.unspent_of(peer)
        spent = self.book.begin_request(peer, credit=credit)
        assert spent == (credit and had > 0)
        (self.on_credit if spent else self.uncredited).append(peer)

    @rule(peer=peers)
    def refuse(self, peer: str) -> None:
        self.book.spend_credit(peer)

    @precondition(lambda self: self.on_credit)
    @rule()
    def end_credited(self) -> None:
        self.book.end_request(self.on_credit.pop())

    @precondition(lambda self: self.uncredited)
    @rule()
    def end_uncredited(self) -> None:
        self.book.end_request(self.uncredited.pop())

    @rule(capacity=st.integers(0, 6))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.book.set_capacity(capacity)
        self.is_over = len(self.on_credit) + self.book.unspent > capacity

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.6]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.settle()

    @invariant()
    def never_more_than_there_are(self) -> None:
        out = len(self.on_credit) + self.book.unspent
        if out <= self.capacity:
            self.is_over = False
        assert out <= self.capacity or self.is_over
        assert self.book.unspent == sum(self.book.unspent_of(peer) for peer in "abc")
        assert self.book.free == self.capacity - out - len(self.uncredited)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@st.composite
def scenes(draw: Any) -> tuple[int, dict[str, int], int, bool]:
    """Capacity, how much each holder runs, how much the last hub wants, and whether holders answer."""
    capacity = draw(st.integers(1, 12))
    running = {peer: draw(st.integers(0, 3)) for peer in "ab"}
    return capacity, running, draw(st.integers(1, 12)), draw(st.booleans())


@given(scenes())
def test_who_wants_gets_all_that_others_let_lie_in_bounded_steps(scene: tuple[int, dict[str, int], int, bool]) -> None:
    """1. a and b hold every slot and run some; 2. c wants; 3. within four recalls it has what the others do not run."""
    capacity, running, wanted, they_answer = scene
    shared = book(0, "a", "b")
    shared.set_capacity(capacity)
    shared.lend_and_recall(0.0)
    began = sum(shared.begin_request(peer, credit=True) for peer, count in running.items() for _ in range(count))
    idle = capacity - sum(running.values())
    shared.open_account("c", 1)
    shared.record_demand("c", 1, wanted, 0.0, 0.0)
    now_s, got = 0.0, 0
    for _ in range(5):
        for action in shared.lend_and_recall(now_s):
            if isinstance(action, RecallCredits) and they_answer:
                shared.take_back(action.peer, 1, min(action.credits, shared.unspent_of(action.peer)))
            elif isinstance(action, GrantCredits) and action.peer == "c":
                got += action.credits
        now_s += 0.6
    assert began <= capacity
    assert got >= min(wanted, idle)


def hoard(one: CreditBook, peer: str, waiting: int, now_s: float) -> None:
    """A hub that wants everything, has waited for ever, spends nothing and answers no recall says so once more."""
    one.record_demand(peer, 1, waiting, 1e9, now_s)
    one.lend_and_recall(now_s)


@pytest.mark.attack("H3")
@pytest.mark.parametrize("words", [(ENDLESS,), (ENDLESS, 0), (0, ENDLESS, ENDLESS), (4,), (1,)])
def test_a_hub_that_wants_everything_and_spends_nothing_keeps_one_slot_at_most(words: tuple[int, ...]) -> None:
    """1. x says all the time, or on and off, that more wait than there can be, for ever; b has one request after the
    other; 2. from the third second on, b never finds fewer than three of the four slots
    """
    one, now_s, waits = book(4, "x", "b"), 0.0, []
    for turn in range(400):
        now_s += 0.05
        hoard(one, "x", words[turn % len(words)], now_s)
        one.record_demand("b", 1, 3 - min(3, one.unspent_of("b")), 0.0, now_s)
        one.lend_and_recall(now_s)
        if now_s > 3.0:
            waits.append(one.unspent_of("x"))
            while one.unspent_of("b"):
                one.begin_request("b", credit=True)
            for _ in range(one.used):
                one.end_request("b")
    assert max(waits) <= 1, waits


@pytest.mark.attack("H3")
@pytest.mark.parametrize("renews", [False, True])
def test_many_connections_and_new_sessions_of_one_hub_are_that_one_hub(renews: bool) -> None:
    """1. x asks over 20 connections, gives all back all the time, and may begin new sessions
    2. b, who waits with one request at a time, has a slot within three seconds, each time
    """
    peers = [f"x/{number}" for number in range(20)]
    one, now_s, session, waits = book(4, *peers, "b/1"), 0.0, 1, []
    asked_s = now_s
    for turn in range(1, 600):
        now_s += 0.05
        session += renews and turn % 15 == 0
        for peer in peers:
            one.open_account(peer, session)
            one.take_back(peer, session, one.unspent_of(peer))
            one.record_demand(peer, session, ENDLESS, 1e9, now_s)
        if not one.unspent_of("b/1"):
            one.record_demand("b/1", 1, 1, now_s - asked_s, now_s)
        one.lend_and_recall(now_s)
        if one.unspent_of("b/1"):
            waits.append(now_s - asked_s)
            one.begin_request("b/1", credit=True)
            one.end_request("b/1")
            asked_s = now_s
    assert max([*waits, now_s - asked_s]) < 3.0, waits
    assert len(waits) > 10


@pytest.mark.attack("H3")
def test_the_only_slot_goes_to_the_hub_that_spends() -> None:
    """1. x has the only slot, wants more and spends nothing; 2. b waits: within two seconds the slot is its"""
    one, now_s = book(1, "x", "b"), 0.0
    for _ in range(5):
        asked_s = now_s
        while not one.unspent_of("b"):
            now_s += 0.05
            assert now_s - asked_s < 2.0
            hoard(one, "x", ENDLESS, now_s)
            one.record_demand("b", 1, 1, now_s - asked_s, now_s)
            one.lend_and_recall(now_s)
        one.begin_request("b", credit=True)
        one.end_request("b")
        hoard(one, "x", ENDLESS, now_s)


def test_the_operator_hears_once_of_a_hub_that_hoards_and_a_spent_credit_clears_it() -> None:
    """1. a wants, and spends nothing for a second; 2. it spends all that it held: it is lent to as any other"""
    one = book(4, "a")
    one.record_demand("a", 1, 2, 0.0, 1.0)
    assert one.lend_and_recall(1.0) == []
    assert one.lend_and_recall(1.9) == []
    assert one.lend_and_recall(2.0) == [DoubtHub("a", 4)]
    one.record_demand("a", 1, 2, 0.0, 2.1)
    assert one.lend_and_recall(3.5) == []
    assert one.held() == {"a": 4}
    for _ in range(4):
        assert one.begin_request("a", credit=True)
    assert one.held() == {}
    for _ in range(4):
        one.end_request("a")
    assert one.lend_and_recall(3.6) == [GrantCredits("a", 1, 4)]


def test_a_hub_under_load_that_spends_what_it_gets_is_never_doubted() -> None:
    """Its requests wait for a minute, and it holds fresh credits at every moment."""
    busy, now_s, seen = book(4, "a", "b"), 0.0, []
    for _ in range(300):
        now_s += 0.2
        for peer in "ab":
            busy.record_demand(peer, 1, 50, 30.0, now_s)
        seen += busy.lend_and_recall(now_s)
        for peer in "ab":
            for _ in range(busy.unspent_of(peer)):
                busy.begin_request(peer, credit=True)
                busy.end_request(peer)
        seen += busy.lend_and_recall(now_s)
    assert not [action for action in seen if isinstance(action, DoubtHub)]
    assert sum(isinstance(action, GrantCredits) for action in seen) > 100


def test_credits_that_an_asking_hub_leaves_for_long_are_lost_slots_until_it_spends_or_goes() -> None:
    """1. a waits beside four credits; it is doubted, and five seconds later its credits serve nobody
    2. it asks no more: nobody waits for them; 3. it asks again, and spends them: all is well
    """
    one = book(4, "a")
    for tenth in range(10, 71):
        one.record_demand("a", 1, 2, 0.0, tenth / 10)
        one.lend_and_recall(tenth / 10)
        if tenth < 70:
            assert one.lost_slots(0, tenth / 10) == LostSlots()
    lost = one.lost_slots(0, 7.1)
    assert lost.count == 4
    assert lost.reason == (
        "4 of its 4 slots serve nobody: hub a waits for slots and has used none of the 4 lent to it for over 5 s"
    )
    assert one.lost_slots(0, 8.2) == LostSlots()
    one.record_demand("a", 1, 2, 0.0, 9.0)
    assert one.lost_slots(0, 9.0).count == 4
    for _ in range(4):
        assert one.begin_request("a", credit=True)
    assert one.lost_slots(4, 9.0) == LostSlots()


def test_slots_that_are_booked_for_requests_which_have_ended_are_lost() -> None:
    one = book(2, "a")
    one.lend_and_recall(0.0)
    one.begin_request("a", credit=True)
    assert one.lost_slots(1, 0.1) == LostSlots()
    lost = one.lost_slots(0, 0.1)
    assert lost == LostSlots(1, "1 of its 2 slots serve nobody: 1 taken by requests that have ended")


class Liar:
    """A hub that asks for 1000 slots, as if it had waited for ever, and ends each request at once."""

    def __init__(self, shared: CreditBook, hold_s: float) -> None:
        self._shared, self._hold_s = shared, hold_s
        self._lent_s: list[float] = []

    def act(self, now_s: float) -> None:
        self._shared.record_demand("evil", 1, 1000, 1e9, now_s)
        while self._lent_s and now_s - self._lent_s[0] >= self._hold_s:
            self._lent_s.pop(0)
            self._shared.begin_request("evil", credit=True)
            self._shared.end_request("evil")

    def lend(self, credits_: int, now_s: float) -> None:
        self._lent_s += [now_s] * credits_


class Honest:
    """A hub with one short request after the other, from second 5 on."""

    def __init__(self, shared: CreditBook) -> None:
        self._shared = shared
        self._held, self._since_s, self._ends_s = 0, 5.0, inf
        self.waits: list[float] = []

    def act(self, now_s: float) -> None:
        if self._ends_s <= now_s:
            self._shared.end_request("good")
            self._since_s, self._ends_s = now_s, inf
        if now_s < self._since_s or self._ends_s < inf:
            return
        if self._held:
            self._held -= 1
            self._shared.begin_request("good", credit=True)
            self._shared.record_demand("good", 1, 0, 0.0, now_s)
            self.waits.append(now_s - self._since_s)
            self._ends_s = now_s + 0.1
        else:
            self._shared.record_demand("good", 1, 1, now_s - self._since_s, now_s)

    def lend(self, credits_: int, now_s: float) -> None:
        self._held += credits_

    def give_back(self, credits_: int) -> None:
        given = min(self._held, credits_)
        self._held -= given
        self._shared.take_back("good", 1, given)


@pytest.mark.attack("P31")
@pytest.mark.parametrize("capacity", [1, 4, 8])
@pytest.mark.parametrize("hold_s", [0.05, 0.75, 0.9])
def test_a_hub_that_lies_of_its_waits_and_spends_each_slot_at_once_keeps_nobody_waiting(
    capacity: int, hold_s: float
) -> None:
    shared = book(capacity)
    for peer in ("evil", "good"):
        shared.open_account(peer, 1)
    hubs: dict[str, Liar | Honest] = {"evil": Liar(shared, hold_s), "good": (honest := Honest(shared))}
    for step in range(1200):
        now_s = step / 20
        for each in hubs.values():
            each.act(now_s)
        for action in shared.lend_and_recall(now_s):
            if isinstance(action, GrantCredits):
                hubs[action.peer].lend(action.credits, now_s)
            elif isinstance(action, RecallCredits) and action.peer == "good":
                honest.give_back(action.credits)
    assert len(honest.waits) > 30
    assert max(honest.waits) <= 2.0


def test_hubs_within_their_share_are_served_by_the_age_of_their_requests() -> None:
    busy = book(4, "a", "b", "c")
    for peer in ("a", "b", "c", "c"):
        busy.begin_request(peer, credit=True)
    for step in range(200):
        busy.record_demand("a", 1, 1, 1.0 + step / 10, now_s=step / 10)
        busy.record_demand("b", 1, 1, 2.0 + step / 10, now_s=step / 10)
        busy.record_demand("c", 1, 1, 4.0 + step / 10, now_s=step / 10)
        busy.lend_and_recall(step / 10)
    busy.end_request("c")
    granted = [action.peer for action in busy.lend_and_recall(20.0) if isinstance(action, GrantCredits)]
    assert granted == ["b"]


def held_book(capacity: int, waits: str, **held: int) -> CreditBook:
    """A book whose hubs run so many requests, all without credits, while one of them waits for a slot."""
    made = CreditBook(recall_timeout_s=0.5)
    made.set_capacity(capacity)
    for peer, count in held.items():
        made.open_account(peer, 1)
        for _ in range(count):
            made.begin_request(peer, credit=False)
    made.lend_and_recall(0.0)
    made.record_demand(waits, 1, 1, 0.0, 1.0)
    return made


@pytest.mark.parametrize(
    ("capacity", "held", "waits", "excess", "rounding"),
    [
        (2, {"a": 2, "b": 0}, "b", {"a": 1}, {"a": 1}),
        (5, {"a": 4, "b": 1}, "b", {"a": 1}, {"a": 2}),
        # Nobody has more than a share, rounded up; but another hub has not got its own.
        (1, {"a": 1, "b": 0}, "b", {}, {"a": 1}),
        (2, {"a": 1, "b": 1, "c": 0}, "c", {}, {"a": 1, "b": 1}),
        (4, {"a": 2, "b": 2, "c": 0}, "c", {}, {"a": 1, "b": 1}),
        (5, {"a": 3, "b": 2}, "b", {}, {}),
        (5, {"a": 3, "b": 2}, "a", {}, {}),
        (2, {"a": 2, "b": 0}, "a", {}, {}),
    ],
)
def test_a_hub_is_beyond_its_share_by_whole_slots(
    capacity: int, held: dict[str, int], waits: str, excess: dict[str, int], rounding: dict[str, int]
) -> None:
    one = held_book(capacity, waits, **held)
    assert (one.excess(), one.rounding_excess()) == (excess, rounding)


def test_while_there_are_no_slots_to_share_nobody_has_too_many() -> None:
    """A replica that drains or sleeps lends nothing: to end requests would help nobody."""
    one = held_book(2, "b", a=2, b=0)
    one.set_capacity(0)
    assert (one.excess(), one.rounding_excess(), one.has_room_without_credit("a")) == ({}, {}, True)


def test_who_is_within_its_share_has_room_for_what_fills_it() -> None:
    """Five slots for two hubs are three for each: that many may begin, and one more is beyond them."""
    one = held_book(5, "b", a=2, b=3)
    assert one.has_room_without_credit("a")
    one.begin_request("a", credit=False)
    assert (one.excess(), one.has_room_without_credit("a")) == ({}, False)
    one.begin_request("a", credit=False)
    assert one.excess() == {"a": 1}


def test_credits_that_were_forfeited_are_good_for_a_request_each_for_a_while() -> None:
    one = book(4, "a", "b")
    one.record_demand("b", 1, 3, 0.0, now_s=1.0)
    one.lend_and_recall(1.0)
    assert not one.use_voided("a", 1.4)
    one.lend_and_recall(1.5)
    assert [one.use_voided("a", 11.4) for _ in range(2)] == [True, True]
    assert not one.use_voided("b", 2.0)
    assert not one.use_voided("a", 11.5)


def test_forfeited_credits_that_come_back_late_are_good_for_nothing() -> None:
    one = book(4, "a", "b")
    one.record_demand("b", 1, 3, 0.0, now_s=1.0)
    one.lend_and_recall(1.0)
    one.lend_and_recall(1.5)
    one.take_back("a", 1, 2)
    assert [one.use_voided("a", 2.0) for _ in range(2)] == [True, False]


def test_credits_of_a_lost_session_are_good_for_a_request_each_however_many_sessions_there_were() -> None:
    """1. a's connection breaks with 3 of 4 credits unspent; 2. its sessions break without end: 4 are good at most"""
    one = book(4, "a")
    one.begin_request("a", credit=True)
    one.open_account("a", 2)
    assert [one.use_voided("a", 1.0) for _ in range(4)] == [True, True, True, False]
    one.end_request("a")
    for session in range(3, 9):
        one.lend_and_recall(2.0)
        one.open_account("a", session)
    assert [one.use_voided("a", 3.0) for _ in range(5)] == [True, True, True, True, False]


def test_what_a_hub_still_runs_counts_for_its_share_after_one_of_its_requests_has_ended() -> None:
    """1. of four slots a runs three, and b waits: a may begin none without a credit; 2. one ends, then another"""
    one = book(4, "a", "b")
    for _ in range(3):
        assert one.begin_request("a", credit=True)
    assert one.take_back("a", 1, 1)
    one.record_demand("b", 1, 2, 0.1, now_s=1.0)
    assert not one.has_room_without_credit("a")
    rooms = []
    for _ in range(3):
        one.end_request("a")
        rooms.append(one.has_room_without_credit("a"))
    assert rooms == [False, True, True]
    assert one._running_of == {}
