"""Scenarios A, B and C, run from the very blocks of docs/scenarios.md: on one machine, and as hosts of their own."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.support.netns import Host, require_netns
from tests.support.processes import wait_for
from tests.support.running_scenarios import (
    COUNTS,
    DEMO,
    ECHO,
    PARTS,
    Running,
    assert_answered,
    assert_reached_by_its_own_address,
    on_hosts,
    on_one_machine,
    said,
)
from tests.support.scenarios import ROOT, parts_of, read_blocks

pytestmark = [pytest.mark.e2e, pytest.mark.long]
logger = logging.getLogger(__name__)

IS_LONG = bool(os.environ.get("OMNI_LONG"))
#: Start orders: a scenario, then its parts.
ORDERS = ["-".join((scenario, *order)) for scenario in ("B", "C") for order in itertools.permutations(PARTS[scenario])]


def test_the_page_has_the_parts_of_each_scenario_and_says_what_its_variables_are() -> None:
    blocks = read_blocks()
    assert {name: tuple(parts_of(name)) for name in PARTS} == PARTS
    named = set(re.findall(r"export|(\w+)=", blocks["settings"])) - {""}
    used = {name for text in blocks.values() for name in re.findall(r"\$(\w+)", text)}
    assert used - {"PWD"} <= named
    assert all("\n" not in text for name, text in blocks.items() if "/" in name)


@pytest.mark.parametrize("scenario", [*PARTS] if IS_LONG else ["A"])
def test_a_scenario_runs_on_one_machine_as_the_page_says(tmp_path: Path, scenario: str) -> None:
    with on_one_machine(tmp_path, scenario, ECHO) as (running, client):
        client.wait_ready(COUNTS[scenario])
        assert_answered(client.ask())
        running.stop()


@pytest.fixture(scope="module")
def on_their_way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[None]]]:
    """The cases with hosts of their own, two at a time: mostly they wait."""
    require_netns()
    folder = tmp_path_factory.mktemp("hosts")
    with ThreadPoolExecutor(2) as pool:
        cut_off = pool.submit(lose_a_host_and_get_it_back, folder / "cut")
        yield {"cut": cut_off} | {name: pool.submit(start_in_order, folder / name, *name.split("-")) for name in ORDERS}


@pytest.mark.parametrize("name", ORDERS)
def test_hosts_may_start_in_any_order(on_their_way: Mapping[str, Future[None]], name: str) -> None:
    """Each part on a host of its own, with the registry on one more."""
    on_their_way[name].result(300)


def start_in_order(folder: Path, scenario: str, *order: str) -> None:
    with on_hosts(folder, scenario, order, ECHO) as (running, client, network):
        client.wait_ready(COUNTS[scenario])
        assert_answered(client.ask())
        assert_reached_by_its_own_address(running, network)
        if order[0] == "hub":
            assert [is_up(network.hosts[name], running) for name in ("painters", "registry")] == [True, False]
        running.stop()


def is_up(host: Host, running: Running) -> bool:
    """What Kubernetes would find with the probe of its stages; the etcd here asks for no login."""
    documents = yaml.safe_load_all((ROOT / "compose/kubernetes/base/stage-1.yaml").read_text(encoding="utf-8"))
    (container,) = next(documents)["spec"]["template"]["spec"]["containers"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = [f"OMNI_ETCD_ENDPOINTS={running.settings.etcd}", f"HOSTNAME={host.name}", f"PATH={path}"]
    command = [re.sub(r"--etcd-[\w-]+ \S+", "", word) for word in container["startupProbe"]["exec"]["command"]]
    probe = host.command("env", *variables, *command)
    return subprocess.run(probe, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 0


def test_a_host_that_is_cut_off_loses_its_requests_to_others_and_takes_new_ones_when_it_is_back(
    on_their_way: Mapping[str, Future[None]],
) -> None:
    """1. C on four hosts, begun with the replicas: the hub comes last
    2. hand-offs of 256 KiB travel to the host of stage 1
    3. requests run on all three replicas of stage 0 when the host of two of them is cut off: each is answered in full
    4. the link is back: the same processes are picked again
    """
    on_their_way["cut"].result(300)


def lose_a_host_and_get_it_back(folder: Path) -> None:
    with on_hosts(folder, "C", ("painters", "thinkers", "hub"), ECHO) as (running, client, network):
        client.wait_ready(COUNTS["C"])
        before = network.received_bytes(network.hosts["painters"])
        assert_answered(client.ask())
        assert network.received_bytes(network.hosts["painters"]) - before > 262_144
        thinkers = running.parts["thinkers"]
        tree = thinkers.tree()
        words = " ".join(f"word{number}" for number in range(100))
        with ThreadPoolExecutor(9) as pool:
            asked = [pool.submit(client.ask, words) for _ in range(9)]
            wait_for("all of them", lambda: client.figure("omni_hub_requests_in_flight") == 9)
            network.cut(network.hosts["thinkers"])
            cut_at_s = time.monotonic()
            wait_for("the hub to notice", lambda: client.pickable().get(0) == 1, 20)
            logger.info("noticed after %.1f s", time.monotonic() - cut_at_s)
            assert [said(each.result(60)) for each in asked] == [words] * 9
        logger.info("all answered after %.1f s", time.monotonic() - cut_at_s)
        assert client.figure("omni_hub_retries_total") > 0
        if IS_LONG:
            # Its lease ends meanwhile.
            time.sleep(20)
        network.join(network.hosts["thinkers"])
        back_at_s = time.monotonic()
        client.wait_ready(COUNTS["C"])
        logger.info("picked again after %.1f s", time.monotonic() - back_at_s)
        assert thinkers.tree() == tree
        assert said(client.ask("once more")) == "once more"
        running.stop()


if IS_LONG:

    @pytest.mark.vllm
    @pytest.mark.parametrize("name", ORDERS)
    def test_the_demo_models_answer_across_hosts(tmp_path: Path, name: str) -> None:
        """Real engines, with a host for each part."""
        require_netns()
        scenario, *order = name.split("-")
        with on_hosts(tmp_path, scenario, order, DEMO) as (running, client, network):
            begun_s = time.monotonic()
            client.wait_ready(COUNTS[scenario], 300)
            logger.info("ready %.0f s after the last part had begun", time.monotonic() - begun_s)
            status, body = client.ask()
            assert status == 200, body
            text, picture = (choice["message"]["content"] for choice in body["choices"])
            assert text == "26 + 48 = 74"
            assert picture[0]["image_url"]["url"].startswith("data:image/png;base64,")
            assert_reached_by_its_own_address(running, network)
            running.stop()
