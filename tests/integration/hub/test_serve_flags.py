"""``omni serve`` with the flags of vLLM-Omni's commands: a real hub that does what they say."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import httpx
import yaml

from tests.support.processes import OMNI, Child, wait_for
from tests.support.replica_stage import Deployment, echo_stages

CHAIN = """
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, engine_args: {modality: image}, final_output: image}
"""


def test_the_flags_of_vllm_omni_s_commands_do_what_they_say(tmp_path: Path) -> None:
    """1. a command as for vLLM-Omni starts a hub; 2. the pipeline in force is as its flags say
    3. a request is served, and counted in the log
    """
    (tmp_path / "d.yaml").write_text(CHAIN)
    words = ["serve", "--omni", "--stage-configs-path", "d.yaml", "--async-chunk", "--port", "0", "--log-stats"]
    more = ["--shm-threshold-bytes", "0", "--default-sampling-params", '{"0": {"max_tokens": 2}}']
    child = Child([*words, *more, "--init-timeout", "60", "--stage-init-timeout", "60"], tmp_path)
    try:
        url = wait_for("its URL", lambda: re.search(r"hub.listening url=(\S+)", child.text))[1]
        wait_for("both stages", lambda: httpx.get(f"{url}/ready").status_code == 200)
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        asked = subprocess.run([*OMNI, "pipeline", "show"], capture_output=True, env=environment, check=True)
        document = yaml.safe_load(asked.stdout)
        assert document["async_chunk"] is True
        threshold = {"name": "AutoConnector", "extra": {"shm_threshold_bytes": 0}}
        assert document["connectors"] == {"AutoConnector": threshold}
        body = {"messages": [{"role": "user", "content": "one two three"}], "modalities": ["text"]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
        assert answer["choices"][0]["message"]["content"].split() == ["one", "two"]
        wait_for("its numbers", lambda: "hub.stats in_flight=0 ended=1 ok=1" in child.text)
        assert "stage.stats stage=1 pickable=1" in child.text
    finally:
        assert child.stop() == []


def test_a_hub_whose_stages_are_not_there_in_time_ends_and_says_which(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(CHAIN)
    child = Child(["serve", "--deploy-config", "d.yaml", "--port", "0", "--hub-only", "--init-timeout", "3"], tmp_path)
    try:
        assert child.process.wait(60) == 1
    finally:
        assert child.stop() == []
    last = child.text.strip().splitlines()[-1]
    assert last.startswith("omni: not ready within 3 s (--init-timeout): no replica can take work of stage 0 (none is")


def test_a_replica_whose_engine_does_not_load_in_time_is_ended_with_the_reason_and_started_again(
    endpoint: str, namespace: str, tmp_path: Path
) -> None:
    with Deployment(endpoint, namespace, echo_stages({"load_s": 60}), tmp_path) as deployment:
        deployment.start(0, 1, "--stage-init-timeout", "1")
        wait_for("two attempts", lambda: deployment.log().read_text().count("replica.load_timeout stage=0") > 1, 60)
        assert "its engine had not loaded within 1 s (--stage-init-timeout)" in deployment.log().read_text()
