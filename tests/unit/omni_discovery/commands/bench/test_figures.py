"""The figures of a load test."""

from __future__ import annotations

from array import array

import pytest

from omni_discovery.commands.bench.figures import ClientLoad, Seen, Spread, Tally, find_doubts, percentile, spread_of

IDLE = ClientLoad(0.1, spread_of([0.0001] * 10))


def answered(due_s: float, whole_s: float, **more: object) -> Seen:
    firsts = {"text": due_s + whole_s / 2}
    return Seen(due_s, due_s, due_s + whole_s, firsts, status=200, **more)  # type: ignore[arg-type]


def test_percentiles_are_values_that_occurred_by_nearest_rank() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, part) for part in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 50.0, 90.0, 99.0, 100.0]
    assert spread_of([3.0, 1.0, 2.0]) == Spread(3, 2.0, 3.0, 3.0, 3.0)
    assert spread_of([7.0]) == Spread(1, 7.0, 7.0, 7.0, 7.0)
    assert spread_of([]) is None


def test_the_wait_for_a_late_send_counts() -> None:
    """Due at 1 s, sent at 3 s, first output at 3.2 s, whole at 3.5 s: a user has waited 2.5 s."""
    tally = Tally()
    tally.add(Seen(1.0, 3.0, 3.5, {"text": 3.2}, status=200), array("d"))
    summary = tally.summary(4.0, IDLE)
    assert summary.first is not None
    assert summary.whole is not None
    assert summary.late is not None
    assert summary.first.max_s == pytest.approx(2.2)
    assert summary.whole.max_s == pytest.approx(2.5)
    assert summary.late.max_s == pytest.approx(2.0)


def test_refusals_and_failures_stand_apart_and_have_no_part_in_latencies() -> None:
    tally = Tally()
    tally.add(answered(0.0, 1.0, tokens=10, characters=40, pictures=1, sound_s=2.0), array("d", [0.1, 0.3]))
    tally.add(Seen(0.0, 0.0, 9.0, {"text": 8.0}, failure="cut off", status=200), array("d", [5.0]))
    tally.add(Seen(0.0, 0.0, 9.0, failure="503 stage_unavailable", status=503), array("d"), "nobody there")
    tally.add(Seen(0.0, 0.0, 0.001, failure="429 overloaded", status=429), array("d"))
    summary = tally.summary(2.0, IDLE, waiting_since_s=[0.5, 1.5], unsent=3)
    assert (summary.answered, summary.refused, summary.unfinished, summary.unsent) == (1, 1, 2, 3)
    assert summary.failed == {"cut off": 1, "503 stage_unavailable": 1}
    assert summary.messages == {"503 stage_unavailable": "nobody there"}
    assert summary.requests == 9
    assert summary.oldest_s == 1.5
    assert summary.whole == Spread(1, 1.0, 1.0, 1.0, 1.0)
    assert summary.between == spread_of([0.1, 0.3])
    rates = (summary.requests_per_s, summary.tokens_per_s, summary.characters_per_s, summary.pictures_per_s)
    assert (*rates, summary.sound_s_per_s) == (0.5, 5.0, 20.0, 0.5, 1.0)


def test_an_answer_without_output_is_counted_and_has_no_first() -> None:
    tally = Tally()
    tally.add(Seen(0.0, 0.0, 1.0, status=200), array("d"))
    summary = tally.summary(2.0, IDLE)
    assert (summary.answered, summary.without_output, summary.first) == (1, 1, None)


def test_a_test_that_was_ended_at_once_has_figures_too() -> None:
    summary = Tally().summary(0.0, ClientLoad(0.0, None))
    assert (summary.requests, summary.whole, summary.doubts) == (0, None, [])


def test_a_client_that_kept_up_is_not_doubted() -> None:
    assert find_doubts(IDLE, spread_of([0.05])) == []
    # Late by 8 ms is nothing beside answers of a second.
    assert find_doubts(ClientLoad(0.3, spread_of([0.008])), spread_of([1.0])) == []


@pytest.mark.parametrize(
    ("client", "unsent", "word"),
    [
        (ClientLoad(0.95, None), 0, "95 % of a core"),
        (ClientLoad(0.1, spread_of([0.03])), 0, "30 ms late"),
        (IDLE, 5, "5 requests were due and never sent"),
    ],
)
def test_a_client_that_was_the_bottleneck_says_so(client: ClientLoad, unsent: int, word: str) -> None:
    (doubt,) = find_doubts(client, spread_of([0.05]), unsent=unsent)
    assert word in doubt
