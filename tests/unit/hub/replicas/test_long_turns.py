"""Replicas that flood their hub share half of its time, however many they are."""

from __future__ import annotations

import heapq

import pytest

from hub.replicas.long_turns import _FEW_WAITING, _MOST_WAITING, LongTurns


@pytest.mark.attack("K3")
@pytest.mark.parametrize("sockets", [1, 2, 8, 40])
@pytest.mark.parametrize("turn_s", [0.03, 0.5])
def test_all_floods_together_take_half_of_the_time(sockets: int, turn_s: float) -> None:
    """Each has its next turn as soon as it may, or as soon as the loop is free."""
    turns, now_s, used_s = LongTurns(), 0.0, 0.0
    due = [(0.0, number) for number in range(sockets)]
    ran = dict.fromkeys(range(sockets), 0)
    while now_s < 400 * turn_s:
        at_s, number = heapq.heappop(due)
        now_s = max(now_s, at_s) + turn_s
        used_s += turn_s
        ran[number] += 1
        heapq.heappush(due, (now_s + turns.rest_s(turn_s, now_s), number))
    # The first turns of all come before any of them has rested.
    assert used_s - sockets * turn_s <= 0.51 * now_s
    assert used_s >= 0.45 * now_s
    assert max(ran.values()) - min(ran.values()) <= 1


def test_a_short_turn_needs_no_rest_whatever_the_others_do() -> None:
    turns = LongTurns()
    assert turns.rest_s(0.5, 10.0) == 0.5
    assert turns.rest_s(0.5, 10.0) == 1.5
    assert turns.rest_s(0.02, 10.0) == 0.0
    assert turns.rest_s(0.1, 100.0) == pytest.approx(0.1)


def test_one_dear_event_is_not_the_price_of_all_others() -> None:
    """1. a replica with hundreds of requests is lost, which takes 0.3 s; 2. a thousand messages still cost little"""
    turns = LongTurns()
    for _ in range(30):
        turns.note_handled(1000, 0.02)
    turns.posted += 1000
    usual_s = turns.owed_s(0)
    assert usual_s == pytest.approx(0.02, rel=0.01)
    turns.note_handled(1, 0.3)
    assert turns.owed_s(0) < 1.1 * usual_s


def test_what_events_count_is_bounded() -> None:
    turns = LongTurns()
    for _ in range(100):
        turns.note_handled(1000, 100.0)
    turns.posted += 1_000_000
    assert turns.owed_s(0) == 0.3


def test_sockets_wait_from_many_events_on_until_few_are_left() -> None:
    turns, behind = LongTurns(), []
    for count in (_MOST_WAITING, _MOST_WAITING + 1, _FEW_WAITING + 1, _FEW_WAITING, _MOST_WAITING):
        turns.note_waiting(count)
        behind.append(turns.is_behind)
    assert behind == [False, True, True, False, False]
