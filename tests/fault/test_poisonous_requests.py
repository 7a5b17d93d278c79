"""One request that ends the replicas that run it, under load: it costs two replicas at most, and no other client."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench.soak_client import SteadyClient
from tests.support.hub import Hub
from tests.support.processes import wait_for

_DEPLOY = """
model: echo
stages:
  - stage_id: 0
    engine: echo
    engine_args: {{capacity: 16, delay_s: {delay_s}, {how}: POISON}}
    runtime: {{num_replicas: {replicas}}}
    final_output: text
"""
_WORDS = 5


async def _ask_all(hub: Hub, client: SteadyClient) -> tuple[int, dict[str, Any]]:
    """A steady load and, amid it, one poisonous request; what that was answered."""

    async def spoil() -> tuple[int, dict[str, Any]]:
        await asyncio.sleep(0.5)
        return await asyncio.to_thread(hub.ask, "this is POISON")

    async with asyncio.TaskGroup() as group:
        poison = group.create_task(spoil())
        for _ in range(60):
            await client.ask_for(1.0, 40.0)
            if poison.done():
                break
    return poison.result()


@pytest.mark.attack("C19")
@pytest.mark.parametrize(
    ("how", "replicas", "delay_s"),
    [("kill_on", 3, 0.0), ("kill_on", 2, 0.01), ("crash_on", 2, 0.01), ("hang_on", 3, 0.01)],
)
def test_a_poisonous_request_takes_two_replicas_at_most_and_no_other_request(
    how: str, replicas: int, delay_s: float, tmp_path: Path
) -> None:
    """1. echo replicas serve 40 requests a second, half of them as streams; one request kills, crashes or hangs who
    runs it, without a delay before the word that it was accepted has left
    2. it is tried once more, while another replica stays free of it; then its client is told what happened
    3. all other answers are exactly their prompts, and the log says which request it was
    """
    document = _DEPLOY.format(how=how, replicas=replicas, delay_s=delay_s)
    hub = Hub.of_yaml(tmp_path, document, "--stall-after", "1", "--omni-heartbeat-timeout", "3")
    try:
        hub.wait_ready()
        client = SteadyClient(hub.url, _WORDS)
        status, body = asyncio.run(_ask_all(hub, client))
        # One that hangs is given up at once, and ends a second later.
        wait_for("both to be started anew", lambda: hub.text.count("supervisor.restarting") >= 2, 30.0)
        text = hub.text
    finally:
        left = hub.stop()

    assert not client.errors, client.examples
    assert status == 500, body
    both = r"(?:0/\d+, 0/\d+|0/\d+ twice)"
    assert re.search(rf"stage 0 replica 0/\d+: .*not given to another \(lost with it: {both}\)", str(body))
    assert text.count("supervisor.restarting") == 2
    (culprit,) = re.findall(rf"request\.poisonous request=(\S+) stage=0 replicas={both}:", text)
    lost = re.findall(r"replica\.lost_at_work .* requests=(\S+)", text)
    assert [culprit in names.split(",") for names in lost] == [True, True]
    if how == "hang_on":
        assert len(re.findall(rf"replica\.hopeless .*requests=\S*{culprit}", text)) == 2
    assert not left
