"""The metrics of a running product: of a hub with local replicas, and of a supervisor on what might be another host.

What both export is given to promtool, as Prometheus would have scraped it: the alerts fire on that.
"""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_discovery.etcd.embedded import EmbeddedEtcd
from tests.support.alerts import RULES, firing_alerts
from tests.support.hub import Hub
from tests.support.processes import Child, wait_for

pytestmark = pytest.mark.e2e

PAIR = """
model: echo-pair
stages:
  - stage_id: 0
    engine: echo
    engine_args: {fail_on: FAIL, broken_file: BROKEN}
    runtime: {num_replicas: 3}
    final_output: text
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, runtime: {num_replicas: 2}, final_output: image}
"""
#: Samples by their names with labels, as promtool writes series.
Scrape = Mapping[str, float]


def scrape(url: str, instance: str, job: str) -> Scrape:
    """What Prometheus stores of one place."""
    with urllib.request.urlopen(url, timeout=30) as response:
        text = response.read().decode()
    return {
        series(sample.name, {**sample.labels, "instance": instance, "job": job}): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def series(name: str, labels: Mapping[str, str]) -> str:
    inner = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}"


class Site:
    """A hub with two local replicas of stage 0, and a supervisor of two replicas of stage 1."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        for name in ("hub", "stage"):
            (folder / name).mkdir()
        registry = self._registry = ["--etcd-endpoints", endpoint]
        local = ["--stage-id", "0", "--omni-dp-size-local", "2"]
        self._broken = folder / "broken"
        self.hub = Hub.of_yaml(folder / "hub", PAIR.replace("BROKEN", str(self._broken)), *local, *registry)
        headless = ["serve", "--headless", "--stage-id", "1", "--omni-dp-size-local", "2", "--namespace", "test"]
        self.stage = Child([*headless, *registry, "--metrics-port", "0"], folder / "stage", "stage")

    def scrape_hub(self) -> Scrape:
        return scrape(f"{self.hub.url}/metrics", "hub:8000", "omni-hub")

    def break_one(self) -> Scrape:
        """One replica of stage 0 fails from now on; return the count of ejected ones, once it is ejected."""
        self._broken.write_text(
            str(next(each["pid"] for each in self.hub.replicas(*self._registry) if each["stage_id"] == 0))
        )
        name = at_hub("omni_hub_replicas_ejected", stage="0")

        def ask_and_look() -> Scrape | None:
            assert self.hub.ask("one", modalities=["text"])[0] == 200
            found = self.scrape_hub()
            return {name: found[name]} if found[name] else None

        return wait_for("an ejection", ask_and_look)

    def hub_begun(self) -> Scrape | None:
        """The hub's metrics, once its local replicas have told that they are up."""
        found = self.scrape_hub()
        return found if found.get(at_hub("omni_supervisor_replicas_up", namespace="test", stage="0")) == 2 else None

    def scrape_stage(self) -> Scrape:
        url = wait_for("the supervisor's port", lambda: re.search(r"supervisor\.metrics url=(\S+)", self.stage.text))
        return scrape(url[1], "stage:9100", "omni-stage")

    def wait_stage(self, name: str, value: float, **labels: str) -> Scrape:
        """The supervisor's metrics once one of them has this value."""
        wanted = at_stage(name, **labels)

        def found() -> Scrape | None:
            self.stage.must_run()
            scraped = self.scrape_stage()
            return scraped if scraped.get(wanted) == value else None

        return wait_for(f"{wanted} {value}", found, 60.0)


def at_hub(name: str, **labels: str) -> str:
    return series(name, {**labels, "instance": "hub:8000", "job": "omni-hub"})


def at_stage(name: str, **labels: str) -> str:
    return series(name, {**labels, "instance": "stage:9100", "job": "omni-stage"})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with EmbeddedEtcd() as etcd:
        running = Site(tmp_path, etcd.endpoint)
        try:
            running.hub.wait_ready()
            yield running
        finally:
            left = [pid for child in (running.hub, running.stage) for pid in child.stop()]
    assert left == []


def test_replicas_and_hub_tell_prometheus_what_they_do_and_the_alerts_fire_on_it(site: Site, tmp_path: Path) -> None:
    """1. two requests are answered, and twelve failed by the engine of stage 0; then one of its replicas is broken
    2. a replica of stage 1 is killed: its supervisor tells that one is missing, restarts it, and counts that
    3. the hub is stopped: the replicas see none
    4. every alert for this fires on what was scraped, and none did before
    """
    place = {"namespace": "test", "stage": "1"}
    stage, hub = site.wait_stage("omni_supervisor_replicas_up", 2, **place), wait_for("samples", site.hub_begun)
    begun = {**stage, **hub}
    for text in ("one two three", "four five six"):
        status, body = site.hub.ask(text, modalities=["text", "image"])
        assert status == 200, body
    assert {site.hub.ask("FAIL")[0] for _ in range(12)} == {500}
    worked = wait_for("samples of both replicas", lambda: attempts_counted(site.scrape_hub()))
    check_hub(worked)
    ejected = site.break_one()
    pictures = check_stage(site)

    info = next(name for name in pictures if name.startswith("omni_replica_info"))
    os.kill(int(re.search(r'pid="(\d+)"', info)[1]), signal.SIGKILL)  # type: ignore[index]
    missing = site.wait_stage("omni_supervisor_replicas_up", 1, **place)
    again = site.wait_stage("omni_supervisor_replicas_up", 2, **place)
    assert again[at_stage("omni_supervisor_restarts_total", **place)] == 1
    lost = at_hub("omni_hub_session_losses_total", stage="1")
    seen = wait_for("the lost session", lambda: found if lost in (found := site.scrape_hub()) else None)

    assert site.hub.stop() == []
    alone = site.wait_stage("omni_supervisor_hubs", 0, **place)
    assert fired(tmp_path, [begun, begun]) == {"OmniStageBelowCount"}
    failing = fired(tmp_path, [begun, {**begun, **worked, **ejected}])
    assert failing == {"OmniStageBelowCount", "OmniRequestsFail", "OmniReplicasEjected"}
    assert fired(tmp_path, [missing]) == {"OmniReplicasDown"}
    assert fired(tmp_path, [alone]) == {"OmniNoHub"}
    check_expressions({**seen, **alone})


def attempts_counted(found: Scrape) -> Scrape | None:
    """The scrape, once the replicas of stage 0 have told of all that they did, and that they rest."""

    def of_both(name: str, **labels: str) -> float:
        names = (at_hub(name, stage="0", replica=replica, **labels) for replica in ("0/0", "0/1"))
        return sum(found.get(each, float("nan")) for each in names)

    tokens, running = of_both("omni_replica_tokens_total", type="completion"), of_both("omni_replica_requests_running")
    failed = of_both("omni_replica_requests_total", outcome="engine")
    return found if (tokens, running) == (6, 0) and failed >= 12 else None


def check_hub(found: Scrape) -> None:
    assert found[at_hub("omni_hub_request_seconds_count")] == 2
    assert found[at_hub("omni_hub_request_first_output_seconds_count")] == 2
    first, whole = at_hub("omni_hub_request_first_output_seconds_sum"), at_hub("omni_hub_request_seconds_sum")
    assert 0 < found[first] <= found[whole]
    assert found[at_hub("omni_hub_tokens_total", stage="0", type="completion")] == 6
    failed = [name for name in found if name.startswith("omni_hub_request_failures_total")]
    assert sum(found[name] for name in failed) == 12
    assert all('stage="0"' in name and 'outcome="EngineFailedError"' in name for name in failed)
    assert {match[1] for name in failed if (match := re.search(r'replica="([^"]*)"', name))} <= {"0/0", "0/1"}
    assert found[at_hub("omni_hub_replicas_wanted", stage="0")] == 3
    build = [name for name in found if name.startswith("omni_build_info")]
    assert len(build) == 1
    assert 'component="hub"' in build[0]
    assert found[at_hub("omni_supervisor_replicas_up", namespace="test", stage="0")] == 2
    for replica in ("0/0", "0/1"):
        of_it = {"stage": "0", "replica": replica}
        assert found[at_hub("omni_replica_up", **of_it)] == 1
        assert 0 < found[at_hub("omni_replica_lease_seconds", **of_it)] <= 10
        assert found[at_hub("omni_replica_credits_lent", **of_it)] <= found[at_hub("omni_replica_slots", **of_it)]
        assert found[at_hub("omni_replica_requests_waiting", **of_it)] == 0


def check_stage(site: Site) -> Scrape:
    found = site.scrape_stage()
    assert 'component="supervisor"' in next(name for name in found if name.startswith("omni_build_info"))
    ok = [at_stage("omni_replica_requests_total", stage="1", replica=name, outcome="ok") for name in ("1/0", "1/1")]
    assert sum(found[name] for name in ok) == 2
    assert found[at_stage("omni_supervisor_hubs", namespace="test", stage="1")] == 1
    assert not [name for name in found if "kv_cache" in name or "gpu" in name]
    return found


def fired(folder: Path, scrapes: list[Scrape]) -> set[str]:
    """The alerts that fire in the end if each of these is what Prometheus gets for eleven minutes, every 15 s."""
    times = 44
    names = {name for scraped in scrapes for name in scraped}
    values = {
        name: " ".join(f"{scraped[name]:.17g}x{times - 1}" if name in scraped else f"_x{times}" for scraped in scrapes)
        for name in names
    }
    # Where something has changed, two minutes after that.
    at_s = 15 * times - 15 if len(scrapes) == 1 else 15 * times * (len(scrapes) - 1) + 120
    return firing_alerts(
        folder, {**values, **dict.fromkeys(map(up, ("omni-hub", "omni-stage")), f"1x{2 * times}")}, at_s
    )


def up(job: str) -> str:
    """What Prometheus itself notes of a place that answers."""
    return series("up", {"instance": "a:1", "job": job})


def check_expressions(found: Scrape) -> None:
    """Every metric that an alert asks for is there, with each label that it names."""
    known: dict[str, set[str]] = {}
    for name in found:
        metric, _, labels = name.partition("{")
        known.setdefault(metric, set()).update(re.findall(r'(\w+)="', labels))
    for alert, rule in RULES.items():
        for metric, selector in re.findall(r"\b(omni_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            assert metric in known, f"{alert}: {metric}"
            assert set(re.findall(r"(\w+)[=!]", selector)) <= known[metric], f"{alert}: {metric}"
