"""Each alert of ``compose/monitoring`` fires in a real Prometheus for a fault that is made, and ends with it.

Three sites of real processes are scraped each second. The rules are the shipped ones, their durations thirty times
shorter. The faults of one site follow each other, those of different sites happen at the same time.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import pytest

from omni_discovery.metrics.samples import GpuMemory, ReplicaSample
from stage_runtime.supervisor.exporter import MetricsExporter
from tests.support.alerts import FILE, RULES, shorten_rules
from tests.support.hub import Hub, asking
from tests.support.processes import Child, wait_for
from tests.support.prometheus import Prometheus, Target
from tests.support.registry import EtcdServer, compact, etcdctl, quiet_port

logger = logging.getLogger(__name__)

#: Those of the three documents, and the one on the device.
REPLICAS: Final = 3 + 6 + 1 + 1
#: How much shorter the rules' durations are here: five minutes are ten seconds, thirty seconds are one.
TIMES: Final = 30
#: A loaded machine may take long for each.
WITHIN_S: Final = 120.0
QUOTA_BYTES: Final = 32 << 20
BOARD: Final = FILE.with_name("grafana-dashboard.json")
TTL: Final = ("--omni-heartbeat-timeout", "3")
#: What Prometheus scrapes; ``device`` is made up here.
INSTANCES: Final = {
    *("hub-site-a", "hub-site-b", "hub-site-c"),
    *("stage0-site-b", "stage1-site-b", "stage0-site-c", "device"),
    *("etcd-site-a", "etcd-site-b"),
}

#: Three replicas beside the hub; BROKEN names the processes that fail every request.
ONE_STAGE: Final = """
model: one-echo
stages:
  - stage_id: 0
    engine: echo
    engine_args: {capacity: 2, delay_s: 0.05, fail_on: FAIL, broken_file: BROKEN}
    runtime: {num_replicas: 3}
    final_output: text
"""
PAIR: Final = """
model: echo-pair
stages:
  - {stage_id: 0, engine: echo, runtime: {num_replicas: 4}, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, runtime: {num_replicas: 2}, final_output: image}
"""
SINGLE: Final = """
model: single-echo
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 8}, runtime: {num_replicas: 1}, final_output: text}
"""
#: The same stages, another version of the first; and other stages.
NEWER: Final = SINGLE.replace("capacity: 8", "capacity: 9")
OTHER: Final = PAIR
#: Which alerts the faults of a site may fire. No other may.
EXPECTED: Final = {
    "site-a": {
        "OmniViewStale",
        "OmniRequestsFail",
        "OmniReplicasEjected",
        "OmniRequestsRefused",
        "OmniEtcdNearlyFull",
    },
    # Replicas that are killed take some of the load's requests with them.
    "site-b": {
        "OmniSessionsLost",
        "OmniReplicasDown",
        "OmniStageBelowCount",
        "OmniSupervisorDown",
        "OmniStageWithoutReplicas",
        "OmniRequestsFail",
    },
    "site-c": {
        "OmniRecordUnreadable",
        "OmniPipelineNotFollowed",
        "OmniStageWithoutReplicas",
        "OmniStageBelowCount",
        "OmniHubDown",
        "OmniNoHub",
        "OmniReplicasRefused",
    },
}


class Site:
    """Processes of one namespace, and what Prometheus says of the alerts about them."""

    def __init__(self, name: str, folder: Path, etcd: EtcdServer, document: str) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.etcd = etcd
        self.hub_port, self.stage_ports = quiet_port(), [quiet_port(), quiet_port()]
        (self.folder / "deploy.yaml").write_text(document)
        self.children: dict[str, Child] = {}
        #: Alerts that were seen to fire, not having fired before; and those that ended after that.
        self.fired: set[str] = set()
        self.ended: set[str] = set()
        self.prometheus: Prometheus

    @property
    def registry(self) -> list[str]:
        return ["--etcd-endpoints", self.etcd.endpoint, "--namespace", self.name]

    def start_hub(self, *flags: str) -> Hub:
        words = ["--deploy-config", "deploy.yaml", "--port", str(self.hub_port), *flags, *self.registry, *TTL]
        hub = self.children["hub"] = Hub(self.folder, words, self.name)
        return hub

    @property
    def hub(self) -> Hub:
        hub = self.children["hub"]
        assert isinstance(hub, Hub)
        return hub

    def start_stage(self, stage_id: int, count: int) -> None:
        words = ["serve", "--headless", "--stage-id", str(stage_id), "--omni-dp-size-local", str(count)]
        port = ["--metrics-port", str(self.stage_ports[stage_id])]
        name = f"stage{stage_id}"
        self.children[name] = Child([*words, *self.registry, *TTL, *port], self.folder, name)

    def omni(self, *words: str) -> str:
        """Run a command of an operator; return what it prints."""
        child = Child([*words, *self.registry], self.folder, "operator")
        assert child.process.wait(60) == 0, child.text
        return child.text

    def apply(self, document: str) -> None:
        """Put a deploy document in force."""
        (self.folder / "deploy.yaml").write_text(document)
        self.omni("pipeline", "apply", "deploy.yaml")

    def pids(self, stage_id: int) -> dict[str, int]:
        """The replicas that a supervisor runs now, by name."""
        found = self.prometheus.query(f'omni_replica_info{{instance="stage{stage_id}-{self.name}"}}')
        tree = self.children[f"stage{stage_id}"].tree()
        return {each["metric"]["replica"]: pid for each in found if (pid := int(each["metric"]["pid"])) in tree}

    def has_all(self) -> bool:
        """Whether the hub can use all replicas that are asked for."""
        return self.hub.metric("omni_hub_replicas_pickable") == self.hub.metric("omni_hub_replicas_wanted")

    # ---- what Prometheus says

    def firing(self) -> set[str]:
        """The alerts about this site that fire now; each links to its section."""
        found = [each for each in self.prometheus.alerts() if site_of(each["labels"]) == self.name]
        for each in found:
            name = each["labels"]["alertname"]
            link = f"https://git.example/docs/operations/trouble.md#{name.lower()}"
            assert each["annotations"]["runbook_url"] == link
            assert "<no value>" not in each["annotations"]["summary"]
        return {each["labels"]["alertname"] for each in found}

    def wait_quiet(self, *names: str) -> None:
        """Wait until none of these fires."""
        self._until(f"{names} not to fire", lambda: not self.firing() & set(names))

    @contextmanager
    def fault(self, *names: str, prod: Callable[[], object] = lambda: None) -> Iterator[None]:
        """The body makes a fault: before it none of these fires, after it each does.

        ``prod`` is called again and again until then.
        """
        self.wait_quiet(*names)
        yield
        missing = set(names)

        def all_fired() -> bool:
            prod()
            missing.difference_update(self.firing())
            return not missing

        self._until(f"{names} to fire", all_fired)
        self.fired |= set(names)

    def wait_ended(self, *names: str) -> None:
        """Wait until none of these fires any more."""
        self.wait_quiet(*names)
        self.ended |= set(names) & self.fired

    def _until(self, what: str, probe: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        while not probe():
            waited_s = time.monotonic() - began_s
            assert waited_s < WITHIN_S, f"{self.name}: waited {WITHIN_S} s for {what}; {self.firing()} fire"
            time.sleep(0.3)
        logger.info("%s: waited %.1f s for %s", self.name, time.monotonic() - began_s, what)

    def stop(self) -> list[int]:
        return [pid for child in reversed(self.children.values()) for pid in child.stop()]


def site_of(labels: dict[str, str]) -> str:
    """The site that an alert, or a series, is about."""
    return re.sub(r"^(hub|stage\d|etcd)-", "", labels.get("instance", labels.get("namespace", "")))


# ---- the faults


def spoil_site_a(site: Site) -> None:
    """1. etcd stands still; meanwhile the engine fails requests, one replica is broken, and clients overload the stage
    2. etcd goes on
    3. etcd's store is filled to four fifths, and emptied
    """
    broken = site.folder / "broken"
    info = site.prometheus.query(f'omni_replica_info{{instance="hub-{site.name}"}}')
    try:
        with site.fault("OmniViewStale"):
            site.etcd.signal(signal.SIGSTOP)
            with site.fault("OmniRequestsFail"):
                assert [site.hub.ask("FAIL")[0] for _ in range(3)] == [500, 500, 500]
            site.wait_ended("OmniRequestsFail")
            with site.fault("OmniReplicasEjected", prod=lambda: site.hub.ask("one")):
                broken.write_text(info[0]["metric"]["pid"])
            broken.unlink()
            with asking(site.hub, 24, "a b c d e f g h i j k l m n o p"), site.fault("OmniRequestsRefused"):
                pass
        assert site.hub.ask("still there")[0] == 200
    finally:
        site.etcd.signal(signal.SIGCONT)
    site.wait_ended("OmniViewStale", "OmniRequestsRefused")
    # With no space left at all, the replicas, whose leases have ended, could not come back.
    wait_for("the replicas to be back", site.has_all, WITHIN_S)
    with site.fault("OmniEtcdNearlyFull"):
        for number in itertools.count():
            if used_bytes(site.etcd) > 0.83 * QUOTA_BYTES:
                break
            etcdctl(site.etcd.endpoint, "put", f"/junk/{number}", given=b"x" * 1_000_000)
    site.etcd.etcdctl("del", "--prefix", "/junk/")
    compact(site.etcd.endpoint)
    site.etcd.etcdctl("defrag")
    site.wait_ended("OmniEtcdNearlyFull", "OmniReplicasEjected")


def used_bytes(etcd: EtcdServer) -> int:
    """How large its store is."""
    (status,) = json.loads(etcd.etcdctl("endpoint", "status", "-w", "json"))
    return int(status["Status"]["dbSize"])


def spoil_site_b(site: Site) -> None:
    """1. a replica of stage 1 is stopped, and goes on; meanwhile all replicas of stage 0 are killed again and again
    2. the supervisor of stage 1 is killed, and started again
    """
    frozen = site.pids(1)["1/0"]
    try:
        with site.fault("OmniReplicasDown", "OmniStageBelowCount"):
            os.kill(frozen, signal.SIGSTOP)
            with site.fault("OmniSessionsLost", prod=lambda: kill_all(site)):
                pass
    finally:
        os.kill(frozen, signal.SIGCONT)
    site.wait_ended("OmniReplicasDown", "OmniStageBelowCount", "OmniSessionsLost")
    with site.fault("OmniSupervisorDown", "OmniStageWithoutReplicas"):
        site.children["stage1"].stop(signal.SIGKILL)
    site.start_stage(1, 2)
    site.wait_ended("OmniSupervisorDown", "OmniStageWithoutReplicas")


def kill_all(site: Site) -> None:
    """Kill the replicas of stage 0, if all are up."""
    pids = site.pids(0)
    if len(pids) == 4:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def spoil_site_c(site: Site) -> None:
    """1. clients leave before their answers end; somebody writes a record that can't be read, and deletes it
    2. a document with other stages is put in force, and the one before again
    3. the hub is revoked, and allowed again
    4. the hub is killed; a newer document of the same stages is put in force, and the hub started again with it
    5. the replica, which has run the older one since, is started again
    """
    wait_for("a frame that nobody wants", lambda: leave_early(site.hub), WITHIN_S)
    key = f"/omni/v1/{site.name}/replicas/0/7"
    with site.fault("OmniRecordUnreadable"):
        site.etcd.etcdctl("put", key, "{not json")
    site.etcd.etcdctl("del", key)
    site.wait_ended("OmniRecordUnreadable")
    with site.fault("OmniPipelineNotFollowed"):
        site.apply(OTHER)
    site.apply(SINGLE)
    site.wait_ended("OmniPipelineNotFollowed")
    hub_id = json.loads(site.omni("hubs", "--json"))["hub_id"]
    with site.fault("OmniStageWithoutReplicas"):
        site.omni("hub", "revoke", hub_id)
    site.omni("hub", "allow", hub_id)
    site.wait_ended("OmniStageWithoutReplicas")
    with site.fault("OmniHubDown", "OmniNoHub"):
        site.children["hub"].stop(signal.SIGKILL)
    site.apply(NEWER)
    with site.fault("OmniReplicasRefused"):
        # As on another host: from its saved view it would know the older document, and serve that, too.
        shutil.rmtree(site.folder / "state")
        site.start_hub("--hub-only")
        site.wait_ended("OmniHubDown", "OmniNoHub")
    assert site.children["stage0"].stop() == []
    site.start_stage(0, 1)
    site.wait_ended("OmniReplicasRefused", "OmniStageWithoutReplicas", "OmniStageBelowCount")


def leave_early(hub: Hub) -> float:
    """Ask for a long answer, and go once it begins; return how many frames the hub has dropped so far."""
    body = {"messages": [{"role": "user", "content": "word " * 2000}], "stream": True}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(f"{hub.url}/v1/chat/completions", data, headers), timeout=30) as response:
        response.readline()
    return hub.metric("omni_hub_dropped_frames_total")


# ---- the run


class Run:
    """What the faults of the three sites have shown."""

    def __init__(self, prometheus: Prometheus, sites: list[Site]) -> None:
        self.prometheus = prometheus
        self.sites = sites
        self.began_s = self.ended_s = time.time()
        self.errors: list[str] = []

    def spoil(self) -> None:
        """Make the faults of all sites at the same time."""
        with ThreadPoolExecutor() as threads:
            spoiling = [
                threads.submit(spoil, site)
                for site, spoil in zip(self.sites, (spoil_site_a, spoil_site_b, spoil_site_c), strict=True)
            ]
            self.errors = [
                f"{error} {getattr(error, 'stderr', '')}"
                for each in spoiling
                if (error := each.exception()) is not None
            ]
        self.ended_s = time.time()

    def series(self, expression: str) -> list[Any]:
        """What Grafana would have drawn of an expression."""
        return self.prometheus.query_range(expression, self.began_s, self.ended_s)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("alerts")
    with ExitStack() as stack:
        first, second = (stack.enter_context(etcd_in(folder / name)) for name in ("first", "second"))
        sites = [
            Site("site-a", folder, first, ONE_STAGE.replace("BROKEN", str(folder / "site-a" / "broken"))),
            Site("site-b", folder, second, PAIR),
            Site("site-c", folder, second, SINGLE),
        ]
        device = stack.enter_context(device_metrics())
        stack.enter_context(running(sites))
        prometheus = Prometheus(folder, shorten_rules(FILE.read_text(), TIMES), [*targets_of(sites), device])
        stack.callback(prometheus.stop)
        prometheus.start()
        for site in sites:
            site.prometheus = prometheus
            site.hub.wait_ready(WITHIN_S)
            wait_for("all replicas", site.has_all, WITHIN_S)
            stack.enter_context(asking(site.hub, 1, "a load that goes on", 0.2))
        wait_for("Prometheus to find all well", lambda: is_well(prometheus), WITHIN_S)
        found = Run(prometheus, sites)
        found.spoil()
        yield found


@contextmanager
def etcd_in(folder: Path) -> Iterator[EtcdServer]:
    folder.mkdir()
    server = EtcdServer(folder, flags=[f"--quota-backend-bytes={QUOTA_BYTES}"])
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def running(sites: list[Site]) -> Iterator[None]:
    """One hub with its replicas beside it; two hubs alone, with supervisors of three stages."""
    first, second, third = sites
    try:
        first.start_hub("--max-waiting", "4")
        second.start_hub("--hub-only")
        third.start_hub("--hub-only")
        second.start_stage(0, 4)
        second.start_stage(1, 2)
        third.start_stage(0, 1)
        yield
    finally:
        with ThreadPoolExecutor() as threads:
            left = list(threads.map(Site.stop, sites))
    assert left == [[], [], []]


@contextmanager
def device_metrics() -> Iterator[Target]:
    """A supervisor's metrics as those of a replica with a GPU and a KV cache, of which there is none here."""
    exporter, port, stop = MetricsExporter(), quiet_port(), threading.Event()
    sample = ReplicaSample(
        stage_id=9, replica_id=0, engine={"kv_cache_usage": 0.5}, gpus=(GpuMemory(0, 1 << 30, 4 << 30),)
    )

    def export() -> None:
        while not stop.wait(1.0):
            exporter.export(sample)

    exporter.serve("127.0.0.1", port)
    thread = threading.Thread(target=export)
    thread.start()
    try:
        yield Target("omni-stage", "device", port)
    finally:
        stop.set()
        thread.join(10)
        exporter.close()


def targets_of(sites: list[Site]) -> Iterator[Target]:
    for site in sites:
        yield Target("omni-hub", f"hub-{site.name}", site.hub_port)
        for name in site.children:
            if name != "hub":
                yield Target("omni-stage", f"{name}-{site.name}", site.stage_ports[int(name[-1])])
    # The third site uses the etcd of the second.
    for site in sites[:2]:
        yield Target("etcd", f"etcd-{site.name}", int(site.etcd.endpoint.rpartition(":")[2]))


def is_well(prometheus: Prometheus) -> bool:
    """Whether all answer, all replicas have told what they are, and no alert fires or is about to."""
    answering = {each["metric"]["instance"] for each in prometheus.query("up == 1")}
    replicas = len(prometheus.query("omni_replica_info"))
    return answering == INSTANCES and replicas == REPLICAS and not prometheus.query("ALERTS")


@pytest.mark.parametrize("name", RULES)
def test_an_alert_fires_for_its_fault_and_ends_with_it(run: Run, name: str) -> None:
    """It did not fire before the fault."""
    assert name in {each for site in run.sites for each in site.fired}, run.errors
    assert name in {each for site in run.sites for each in site.ended}, run.errors


def test_no_alert_fires_for_a_fault_that_is_not_its_own(run: Run) -> None:
    """At no time. A scrape that takes too long on a loaded machine is a fault, too."""
    fired = {
        (site_of(each["metric"]), each["metric"]["alertname"])
        for each in run.prometheus.query_range('ALERTS{alertstate="firing"}', run.began_s, run.ended_s, 1.0)
    }
    expected = {(site, name) for site, names in EXPECTED.items() for name in names}
    assert {each for each in fired - expected if each[1] not in ("OmniHubDown", "OmniSupervisorDown")} == set()
    assert run.errors == []


def panels() -> list[Any]:
    return list(json.loads(BOARD.read_text())["panels"])


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_each_query_of_the_board_draws_something(run: Run, panel: Any) -> None:
    """Whether under load or by a fault."""
    silent = [each["expr"] for each in panel["targets"] if not run.series(as_grafana_asks(each["expr"]))]
    assert silent == [], run.errors


def test_the_board_lets_choose_each_hub(run: Run) -> None:
    (variable,) = (each for each in json.loads(BOARD.read_text())["templating"]["list"] if each["type"] == "query")
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
    assert found
    assert set(run.prometheus.label_values(*found.groups())) == {"hub-site-a", "hub-site-b", "hub-site-c"}


def as_grafana_asks(expression: str) -> str:
    """The expression for all hubs."""
    return expression.replace("$__rate_interval", "10s").replace("$hub", ".*")
