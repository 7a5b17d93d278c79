"""When a hub beats, and when it stops believing its watch."""

from __future__ import annotations

import pytest

from omni_discovery.view.freshness import LONGEST_ECHO_S, Distrust, Freshness, WriteBeat


def opened() -> Freshness:
    freshness = Freshness(echo_timeout_s=3.0)
    freshness.watch_opened(10.0, 10.1)
    return freshness


def test_a_watch_that_was_quiet_for_a_second_is_asked_for_an_echo() -> None:
    freshness = opened()
    assert freshness.tick(11.0, 1) is None
    assert freshness.tick(11.1, 1) == WriteBeat(1)
    assert freshness.due_s(1) == pytest.approx(14.1)


def test_it_shows_itself() -> None:
    freshness = opened()
    assert repr(freshness) == "Freshness(fresh at 10.0, beats=0)"
    freshness.tick(11.5, 1)
    assert repr(freshness) == "Freshness(fresh at 10.0, beat 1 sent at 11.5)"


def test_a_watch_that_brings_news_is_left_alone() -> None:
    freshness = opened()
    for tenth in range(1, 50):
        freshness.news_arrived(10.1 + tenth / 10)
        assert freshness.tick(10.1 + tenth / 10 + 0.05, 1) is None
    assert freshness.tick(16.0, 1) == WriteBeat(1)


def test_an_echo_proves_what_was_written_before_the_beat() -> None:
    freshness = opened()
    freshness.tick(12.0, 1)
    assert freshness.beat_echoed(12.25) == 0.25
    assert freshness.fresh_at_s == 12.0
    assert freshness.beat_echoed(12.3) is None, "it was counted already"
    assert freshness.tick(12.5, 1) is None
    assert freshness.tick(13.0, 1) == WriteBeat(2)


def test_without_an_echo_the_view_is_true_as_of_the_last_proof() -> None:
    """1. listed at 10; the beat of 12 never comes back
    2. at 15 the watch is distrusted; the view is as old as the list
    3. a new watch starts over
    """
    freshness = opened()
    freshness.tick(12.0, 1)
    assert freshness.tick(14.9, 1) is None
    assert freshness.tick(15.0, 1) == Distrust(10.0)
    freshness.watch_opened(15.5, 15.6)
    assert freshness.fresh_at_s == 15.5
    assert freshness.tick(16.6, 1) == WriteBeat(2)


@pytest.mark.parametrize(("hubs", "interval_s"), [(1, 1.0), (20, 1.0), (40, 2.0), (1000, 50.0)])
def test_all_hubs_together_beat_twenty_times_a_second_at_most(hubs: int, interval_s: float) -> None:
    freshness, beats, now_s = opened(), 0, 20.0
    while now_s < 20.0 + 10 * interval_s - 0.01:
        now_s = max(now_s, freshness.due_s(hubs))
        if freshness.tick(now_s, hubs) is not None:
            beats += 1
            freshness.beat_echoed(now_s)
    assert beats == pytest.approx(10, abs=1)
    assert hubs * beats / (10 * interval_s) <= 22.0


def test_a_hub_that_is_asked_answers_though_the_watch_is_busy() -> None:
    freshness = opened()
    freshness.tick(11.1, 1)
    freshness.beat_echoed(11.1)
    freshness.news_arrived(11.5)
    freshness.request_beat()
    assert freshness.tick(11.6, 1) == WriteBeat(2)


def test_many_hubs_that_are_asked_at_once_keep_to_their_common_rate() -> None:
    freshness = opened()
    freshness.tick(20.0, 100)
    freshness.beat_echoed(20.0)
    freshness.request_beat()
    assert freshness.due_s(100) == pytest.approx(25.0)
    assert freshness.due_s(1) == pytest.approx(20.05)


def test_a_beat_that_could_not_be_written_is_tried_again_later() -> None:
    freshness = opened()
    freshness.tick(12.0, 1)
    freshness.beat_refused(12.5, 13.0)
    assert freshness.fresh_at_s == 12.5
    assert freshness.tick(17.9, 1) is None
    assert freshness.tick(18.0, 1) == WriteBeat(2)


def test_a_change_that_arrives_is_a_proof() -> None:
    freshness = opened()
    freshness.news_arrived(10.7)
    assert freshness.fresh_at_s == 10.7


def test_while_a_beat_is_out_only_its_echo_is_a_proof() -> None:
    """A watch that lags brings old changes: they do not prove what the beat does not."""
    freshness = opened()
    freshness.tick(12.0, 1)
    freshness.news_arrived(12.5)
    assert freshness.fresh_at_s == 10.0
    assert freshness.tick(15.0, 1) == Distrust(10.0)


@pytest.mark.parametrize(("hubs", "longest_s"), [(1, 3.0), (20, 3.0), (40, 4.0), (200, 12.0)])
def test_a_silent_etcd_is_noticed_within_a_beats_pause_and_its_way_back(hubs: int, longest_s: float) -> None:
    """1. a beat of 20 comes back: the last proof
    2. nothing comes any more: the next beat is written, and trust ends ``longest_s`` after the proof
    """
    freshness = Freshness(LONGEST_ECHO_S)
    freshness.watch_opened(10.0, 10.1)
    freshness.tick(70.0, hubs)
    freshness.beat_echoed(70.1)
    assert isinstance(freshness.tick(freshness.due_s(hubs), hubs), WriteBeat)
    assert freshness.due_s(hubs) == pytest.approx(70.0 + longest_s)
    assert freshness.tick(freshness.due_s(hubs), hubs) == Distrust(70.0)
    assert freshness.longest_unproved_s(hubs) == longest_s


def test_a_report_that_changed_is_beaten_though_the_watch_is_never_quiet() -> None:
    freshness = opened()
    freshness.tick(11.2, 1)
    freshness.beat_echoed(11.2)
    freshness.news_arrived(11.5)
    assert freshness.tick(11.5, 1) is None
    freshness.request_beat()
    assert freshness.tick(11.5, 1) == WriteBeat(2)


def test_before_a_watch_is_open_there_is_no_echo_to_wait_for() -> None:
    assert Freshness(echo_timeout_s=3.0).beat_echoed(1.0) is None


def test_a_new_watch_waits_for_no_echo_of_a_beat_of_the_last_one() -> None:
    freshness = opened()
    freshness.tick(12.0, 1)
    freshness.watch_opened(12.5, 12.6)
    assert freshness.beat_echoed(12.7) is None
    assert freshness.due_s(1) == pytest.approx(13.6)


def test_a_watch_is_distrusted_once_for_each_beat_that_is_missed() -> None:
    freshness = opened()
    freshness.tick(12.0, 1)
    assert freshness.tick(15.0, 1) == Distrust(10.0)
    assert freshness.tick(15.1, 1) == WriteBeat(2)
