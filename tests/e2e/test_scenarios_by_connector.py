"""Scenarios B and C over each connector, chosen by one line of the deploy file: what each of them really carried."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.connector_choices import CHOICES, Choice
from tests.support.netns import Network
from tests.support.processes import wait_for
from tests.support.running_scenarios import (
    COUNTS,
    DEMO,
    ECHO,
    PARTS,
    Running,
    assert_answered,
    on_hosts,
    on_one_machine,
)
from tests.support.scenarios import Client

pytestmark = [pytest.mark.e2e, pytest.mark.long]
logger = logging.getLogger(__name__)

IS_LONG = bool(os.environ.get("OMNI_LONG"))
#: The line of compose's deploy files that says who carries hand-offs.
_LINE = re.compile(r"^edges: .*\bAutoConnector\b.*$", re.MULTILINE)
#: What compose's echo stages hand over with each request.
_PAYLOAD_BYTES = 262_144
_QUESTIONS = ("26 plus 48", "13 plus 24", "35 plus 57", "what is 8 plus 7?")
#: What has no test beside these, and starts nothing that takes long.
SOON = ["B-shared-memory", "B-mooncake-transfer", "B-mooncake-store"]
CASES = [f"{scenario}-{name}" for scenario in ("B", "C") for name in CHOICES] if IS_LONG else SOON


@pytest.fixture(scope="module")
def on_their_way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[None]]]:
    """Those that are asked for, two at a time: mostly they wait."""
    folder = tmp_path_factory.mktemp("connectors")
    wanted = [case for case in CASES if any(item.name.endswith(f"[{case}]") for item in request.session.items)]
    for case in wanted:
        CHOICES[case.partition("-")[2]].require()
    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(hand_over, folder / case, *case.split("-", 1)) for case in wanted}


@pytest.mark.parametrize("case", CASES)
def test_stages_hand_over_by_the_connector_that_one_line_names(
    on_their_way: Mapping[str, Future[None]], case: str
) -> None:
    """1. pictures are asked for, all at once, of the stage behind the edge
    2. the answers are right, and between hosts the hand-offs were on the wire
    3. the replicas, stopped, say that this connector stored each of them and fetched it once, and that nothing failed
    """
    on_their_way[case].result(400)


def hand_over(folder: Path, scenario: str, name: str) -> None:
    with running_by(CHOICES[name], folder, scenario, ECHO) as (running, client, network):
        client.wait_ready(COUNTS[scenario], 120)
        before = network.received_bytes(network.hosts["painters"]) if network else 0
        with ThreadPoolExecutor(6) as pool:
            for answer in pool.map(client.ask, ["26 plus 48"] * 6):
                assert_answered(answer)
        if network:
            assert network.received_bytes(network.hosts["painters"]) - before > 6 * _PAYLOAD_BYTES
        running.stop()
    assert_carried(CHOICES[name], running, 6)


@contextmanager
def running_by(
    choice: Choice, folder: Path, scenario: str, source: Path, extra: str = ""
) -> Iterator[tuple[Running, Client, Network | None]]:
    """A scenario; what runs beside its stages begins when they wait for it."""
    pair = _written(choice, folder, source, extra)
    if choice.on_one_machine:
        with on_one_machine(folder, scenario, pair) as (running, client):
            yield running, client, None
        return
    with on_hosts(folder, scenario, PARTS[scenario], pair) as (running, client, network):
        if choice.beside is None:
            yield running, client, network
            return
        parts = running.parts.values()
        wait_for("all to wait", lambda: all("replica.out_of_reach" in part.text for part in parts), 60)
        with choice.beside(network):
            yield running, client, network


def _written(choice: Choice, folder: Path, source: Path, extra: str) -> Path:
    """A deploy file that differs from its source in the line of the connector alone."""
    text, number = _LINE.subn(choice.line(extra), source.read_text())
    assert number == 1
    # Models are named by their way from the file's folder.
    made = folder / "compose" / source.name
    made.parent.mkdir(parents=True)
    (folder / "stage_runtime").symlink_to(source.parents[1] / "stage_runtime")
    made.write_text(text)
    return made


def assert_carried(choice: Choice, running: Running, number: int) -> None:
    """All of it was carried by this connector."""
    counts = choice.counted(part.text for part in running.parts.values())
    choice.assert_carried(counts, sum(COUNTS[running.scenario].values()), number)
    logger.info("%s over %s: %s", running.scenario, choice.connector, dict(counts))


if IS_LONG:

    @pytest.fixture(scope="module")
    def by_default(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        """What the demo answers over the default connector."""
        return answered_by_the_demo(CHOICES["auto"], tmp_path_factory.mktemp("default"))

    @pytest.mark.vllm
    @pytest.mark.parametrize("name", [name for name in CHOICES if name != "auto"])
    def test_the_demo_says_and_draws_the_same_by_each_connector(
        tmp_path: Path, by_default: list[str], name: str
    ) -> None:
        """The models of the demo on hosts of their own: every byte of the texts and pictures."""
        assert answered_by_the_demo(CHOICES[name], tmp_path / "it") == by_default


def answered_by_the_demo(choice: Choice, folder: Path) -> list[str]:
    choice.require()
    # Its hand-offs are small.
    with running_by(choice, folder, "B", DEMO, "shm_threshold_bytes: 0") as (running, client, _):
        client.wait_ready(COUNTS["B"], 400)
        # One after the other: pictures that are drawn together share their arithmetic.
        answers = [client.ask(question, seed=7) for question in _QUESTIONS]
        running.stop()
    assert [status for status, _ in answers] == [200] * len(_QUESTIONS)
    assert_carried(choice, running, len(_QUESTIONS))
    return [json.dumps(body["choices"], sort_keys=True) for _, body in answers]
