"""What ``/metrics`` says where several API servers share a port."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from hub.exposition import Exposition, merged
from omni_discovery.errors import OmniError


def counting(*labels: str, name: str = "omni_hub_things") -> Exposition:
    """An exposition of one counter, with a series for each label."""
    registry = CollectorRegistry()
    counter = Counter(name, "Things.", ["kind"], registry=registry)
    for label in labels:
        counter.labels(label).inc()
    return Exposition(registry.collect)


def series(text: str) -> dict[str, float]:
    """Each series that a scraper reads, but the moments of creation."""
    read = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{each.name}{sorted(each.labels.items())}": each.value for each in read if "created" not in each.name}


async def test_one_server_alone_has_no_label_of_a_server() -> None:
    exposition = counting("a")
    assert series(await exposition.whole()) == {"omni_hub_things_total[('kind', 'a')]": 1.0}
    assert await exposition.whole() == await exposition.own()


async def test_each_family_stands_together_and_no_series_is_lost_or_doubled() -> None:
    first, second = counting("a", "b"), counting("a", "c")
    second.share(1, dict)
    theirs = await second.own()
    first.share(0, lambda: {1: lambda: theirs})
    text = await first.whole()
    kinds = {(kind, server) for kind, server in (("a", 0), ("b", 0), ("a", 1), ("c", 1))}
    assert set(series(text)) == {
        f"omni_hub_things_total[('kind', '{kind}'), ('server', '{server}')]" for kind, server in kinds
    }
    assert text.count("# TYPE omni_hub_things_total ") == text.count("# HELP omni_hub_things_total ") == 1
    assert merged([text]) == text


async def test_series_of_replicas_belong_to_no_server() -> None:
    exposition = counting("a", name="omni_replica_things")
    exposition.share(0, dict)
    assert series(await exposition.whole()) == {"omni_replica_things_total[('kind', 'a')]": 1.0}


async def test_a_server_that_asks_for_all_others_is_not_asked_itself() -> None:
    first = counting("a")
    first.share(0, lambda: {1: lambda: "# HELP x X.\nx 1.0\n", 2: lambda: pytest.fail("the asker is asked")})
    assert "x 1.0" in await first.whole(asker=2)


async def test_a_server_that_does_not_answer_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str:
        raise OmniError("the hub of process 7 does not answer")

    first = counting("a")
    first.share(0, lambda: {1: fail, 2: lambda: '# HELP x X.\n# TYPE x gauge\nx{server="2"} 1.0\n'})
    with caplog.at_level(logging.WARNING):
        texts = await asyncio.gather(first.whole(), first.whole())
    assert all('x{server="2"} 1.0' in text for text in texts)
    assert [record.message for record in caplog.records] == [
        "api_server.metrics_missing number=1: the hub of process 7 does not answer"
    ]


@pytest.mark.attack("R42")
async def test_many_who_ask_at_once_share_few_answers() -> None:
    """Each costs all API servers some milliseconds, and its client nearly nothing."""
    collected = 0

    def collect() -> list[Metric]:
        nonlocal collected
        collected += 1
        return [CounterMetricFamily("omni_hub_things", "Things.", collected)]

    exposition = Exposition(collect)
    assert "things_total 1.0" in await exposition.shown()
    assert "things_total 2.0" in await exposition.shown()
    answers = await asyncio.gather(*(exposition.shown() for _ in range(100)))
    # A few more than eight if the machine is slow.
    assert 8 <= collected < 30
    assert f"things_total {collected}.0" in answers[-1]
    await asyncio.sleep(0.3)
    assert f"things_total {collected + 1}.0" in await exposition.shown()


async def test_who_stops_waiting_for_the_metrics_takes_them_from_nobody() -> None:
    exposition = counting("a")
    first = asyncio.create_task(exposition.shown())
    others = [asyncio.create_task(exposition.shown()) for _ in range(20)]
    await asyncio.sleep(0)
    first.cancel()
    assert all("things_total" in text for text in await asyncio.gather(*others))
