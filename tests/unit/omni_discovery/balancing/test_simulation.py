"""The balancing benchmark's simulation in a short form: the shipped pool and credit book, against one central queue."""

from __future__ import annotations

import pytest

from tests.bench.balancing_arrivals import Setting, arrivals, central_waits, push_waits
from tests.bench.balancing_simulation import Mode, Simulation
from tests.bench.report import percentile

_COUNT = 4000


def _p99_s(waits_s: list[float]) -> float:
    return percentile(waits_s, 0.99)


@pytest.mark.parametrize(("hubs", "at_most"), [(1, 1.3), (4, 2.5)])
@pytest.mark.parametrize(("slots", "load"), [(1, 0.85), (8, 0.97)])
def test_late_binding_waits_about_as_long_as_one_central_queue(
    slots: int, load: float, hubs: int, at_most: float
) -> None:
    """1. hubs share 16 replicas; the service is heavy-tailed
    2. each hub has its own pool, each replica its own credit book; messages take 0.5 ms
    3. requests wait little longer than if all of them stood in one queue
    """
    setting = Setting(load, slots, hubs, report_s=1.0)
    requests = arrivals(setting, _COUNT, seed=1)
    central_s = _p99_s(central_waits(requests, setting))
    assert central_s > 0.02, "nobody waits: the comparison says nothing"

    waits_s = Simulation(setting, Mode(), seed=1).run(requests)

    assert len(waits_s) == _COUNT
    assert _p99_s(waits_s) <= at_most * central_s


def test_without_credits_the_estimate_still_beats_the_least_reported_queue() -> None:
    """1. four hubs share replicas that grant no credits; each hub sends at once to the least load it knows of
    2. the other policy goes by reports up to five seconds old alone
    3. it waits at least twice as long
    """
    setting = Setting(0.85, 1, 4, report_s=5.0)
    requests = arrivals(setting, _COUNT, seed=1)

    waits_s = Simulation(setting, Mode(credits=False), seed=1).run(requests)

    assert 2 * _p99_s(waits_s) <= _p99_s(push_waits(requests, setting, "least-reported", seed=1))


def test_hubs_that_all_ask_at_once_get_slots_in_the_order_of_their_requests() -> None:
    """1. four hubs, one slot for each of 16 replicas, far more work than that for a while
    2. slots go to the hub whose oldest request waits longest
    3. no hub's requests wait much longer than another's
    """
    setting = Setting(0.95, 1, 4, report_s=1.0)
    requests = arrivals(setting, _COUNT, seed=2)
    simulation = Simulation(setting, Mode(), seed=2)
    simulation.run(requests)

    by_hub = [simulation.waits_by_hub[f"hub-{number}"] for number in range(4)]

    means_s = [sum(waits_s) / len(waits_s) for waits_s in by_hub]
    assert max(means_s) <= 1.5 * min(means_s) + 0.05
