"""``omni top`` beside a real hub, etcd and replicas: what it shows is true, and its keys do what they say."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery.commands.top.command import TopCommand, hub_finder
from omni_discovery.commands.top.screen import TopApp
from omni_discovery.commands.top.source import TopSource
from omni_discovery.view.families import NamespaceReader
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.top import wait_shown


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    running = Hub.of_yaml(tmp_path_factory.mktemp("top"), ECHO_PAIR)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


async def test_it_shows_what_the_hub_has_done_cordons_a_replica_and_tells_of_a_killed_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. after a request, its replicas have a length of work, asked of the hub without a token
    2. c cordons 0/0, u takes that back
    3. 0/0 is killed: an event says it
    4. r lists the request, enter opens its way
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(hub.folder))
    assert hub.ask("one two three")[0] == 200
    parser, command = argparse.ArgumentParser(), TopCommand()
    command.add_arguments(parser)
    arguments = parser.parse_args(["--namespace", hub.namespace])
    kv = NamespaceReader(hub.namespace, hub.endpoint)
    app = TopApp(TopSource(kv, hub.namespace, hub_finder(arguments), Path(hub.folder) / "omni"), hub.namespace)
    try:
        async with app.run_test(size=(120, 40)) as pilot:
            await wait_shown(pilot, lambda text: re.search(r"^stage 1 +2 of 2 .* ms", text, re.MULTILINE) is not None)
            await pilot.press("c")
            await wait_shown(pilot, lambda text: "replica 0/0 is cordoned" in text and "up, cordoned" in text)
            await pilot.press("u")
            await wait_shown(pilot, lambda text: "replica 0/0 takes work again" in text and "cordoned  " not in text)
            [record] = [each for each in hub.replicas() if (each["stage_id"], each["replica_id"]) == (0, 0)]
            os.kill(record["pid"], signal.SIGKILL)
            # It has no slot any more, or another process has its id: the table goes on by itself.
            await wait_shown(
                pilot, lambda text: re.search(r"0/0 (is lost|has ended|reports an error)", text) is not None
            )
            await pilot.press("r")
            await wait_shown(pilot, lambda text: "chatcmpl-" in text)
            await pilot.press("enter")
            text = await wait_shown(pilot, lambda text: "stage 0/" in text)
            assert "its processes" not in text, "the list's enter is not that of the rows"
    finally:
        await kv.close()
