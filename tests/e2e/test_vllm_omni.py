"""The whole product with a speaking model: HTTP, hub, etcd, and replicas of vLLM-Omni in a Python of their own.

Needs the environment that `make omni-test` makes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub
from tests.support.omni_cluster import MARKS, PYTHON, assert_same_sound, hub_with, speak, speaking, write_model
from tests.support.processes import wait_for

pytestmark = MARKS

_READY_S = 120.0
_MOST_KILLS = 6


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("omni")
    with hub_with(folder, speaking(write_model(folder), talkers=2, python=PYTHON)) as running:
        yield running


def pids(hub: Hub, *stages: int) -> list[int]:
    """The living processes of these stages that are up: of 0, the talkers, and of 1, which make sound of codes."""
    up = [each["pid"] for each in hub.replicas() if each["stage_id"] in stages and each["status"] == "up"]
    return [pid for pid in up if Path(f"/proc/{pid}").exists()]


def lost_at_work(hub: Hub, stage_id: int) -> bool:
    return f"replica.lost_at_work replica={stage_id}/" in hub.text


def say(hub: Hub, **fields: Any) -> tuple[int, bytes]:
    """Status and body of POST /v1/audio/speech."""
    body = {"input": "hello world", "response_format": "pcm", "seed": 7, "max_new_tokens": 40, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{hub.url}/v1/audio/speech", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_no_sample_is_missing_or_heard_twice_when_a_decoder_dies(hub: Hub) -> None:
    """1. the same request sounds the same every time, whichever replicas make it
    2. decoders are killed while a client listens, until it was the client's own: what the client hears is the same,
       sample by sample
    """
    expected = speak(hub.url, 160)
    assert len(set(expected)) > 100, "that is silence"
    assert speak(hub.url, 160) == expected
    wait_for("both decoders", lambda: len(pids(hub, 1)) == 2, _READY_S)
    for pid in pids(hub, 1):
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(str(PYTHON).encode())
    for number in range(_MOST_KILLS):
        killed = pids(hub, 1)[number % 2]
        assert speak(hub.url, 160, lambda: os.kill(killed, signal.SIGKILL)) == expected  # noqa: B023
        if lost_at_work(hub, 1):
            break
        wait_for("another decoder", lambda: len(set(pids(hub, 1)) - {killed}) == 2, _READY_S)  # noqa: B023
    assert lost_at_work(hub, 1)
    assert "request.failed" not in hub.text


def test_no_sample_is_missing_or_heard_twice_when_a_talker_dies_behind_the_first_sound(hub: Hub) -> None:
    """1. all replicas say in their records that they repeat themselves
    2. talkers are killed once a client hears the first sound, until it was the client's own and still at work: so the
       sound was made while the talker went on, and what the client hears is the same, sample by sample
    """
    wait_for("all replicas", lambda: len(pids(hub, 0, 1)) == 4, _READY_S)
    assert all(each["deterministic"] for each in hub.replicas())
    expected = speak(hub.url, 300)
    for number in range(_MOST_KILLS):
        killed = pids(hub, 0)[number % 2]
        assert speak(hub.url, 300, lambda: os.kill(killed, signal.SIGKILL), 1) == expected  # noqa: B023
        if lost_at_work(hub, 0):
            break
        wait_for("another talker", lambda: len(set(pids(hub, 0)) - {killed}) == 2, _READY_S)  # noqa: B023
    assert lost_at_work(hub, 0)
    assert "request.failed" not in hub.text


def test_talker_and_decoder_die_together_and_the_sound_goes_on(hub: Hub) -> None:
    """With a seed of the hub's, by which the talker draws: the same request's sound is its own to the end.

    1. a talker and a decoder are killed at the third sound, as with a host; no request fails
    2. the samples before are not heard again: their number is that of an undisturbed answer
    """
    wait_for("all replicas", lambda: len(pids(hub, 0, 1)) == 4, _READY_S)
    before = hub.text.count("replica.lost_at_work")
    expected = len(speak(hub.url, 300, seed=None, min_tokens=300))
    for number in range(_MOST_KILLS):
        killed = {pids(hub, 0)[number % 2], pids(hub, 1)[number % 2]}

        def kill_both(killed: set[int] = killed) -> None:
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

        assert len(speak(hub.url, 300, kill_both, seed=None, min_tokens=300)) == expected
        if hub.text.count("replica.lost_at_work") > before + 1:
            break
        wait_for("two others", lambda: len(set(pids(hub, 0, 1)) - killed) == 4, _READY_S)  # noqa: B023
    assert "request.failed" not in hub.text


def test_the_speech_route_says_what_a_chat_says_in_a_voice_of_the_model(hub: Hub) -> None:
    with urllib.request.urlopen(f"{hub.url}/v1/audio/voices", timeout=30) as response:
        voices = json.load(response)["voices"]
    assert voices
    for voice in voices:
        expected = speak(hub.url, 40, speaker=voice)
        assert say(hub, voice=voice) == say(hub, voice=voice, stream_format="audio") == (200, expected)
    status, refused = say(hub, voice="nobody")
    assert status == 400
    assert f"this model has {', '.join(voices)}, not 'nobody'" in json.loads(refused)["error"]["message"]
    assert say(hub, language="Klingon", voice=voices[0])[0] == 400


#: Loaded by every Python of the test: in the replicas, a step of vLLM's with this text in it fails.
_FAILING_STEPS = """
import importlib.machinery, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "stage_runtime.engines.vllm_omni.engine":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            step = module.OmniStage.step

            def failing(self):
                if any(run.has_begun and "POISON" in str(run.request.inputs) for run in self._runs.values()):
                    raise RuntimeError("a step that fails")
                return step(self)

            module.OmniStage.step = failing

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.attack("C19")
def test_a_request_whose_steps_fail_takes_two_of_three_talkers_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a step of vLLM-Omni's fails with a certain request in it, on every replica, while others are spoken
    2. two talkers end with it and are started again; the third never gets it; its client is told, the log names it
    3. the others are heard to their ends
    """
    (tmp_path / "sitecustomize.py").write_text(_FAILING_STEPS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with hub_with(tmp_path, speaking(write_model(tmp_path), talkers=3, decoders=1, python=PYTHON)) as hub:
        wait_for("all talkers", lambda: len(pids(hub, 0)) == 3, _READY_S)
        before = set(pids(hub, 0))
        expected = speak(hub.url, 160)
        with ThreadPoolExecutor(2) as threads:
            others = [threads.submit(speak, hub.url, 160) for _ in range(2)]
            status, body = say(hub, input="this is POISON")
            for other in others:
                assert_same_sound(other.result(), expected)
        assert status == 500, body
        wait_for("two others", lambda: len(pids(hub, 0)) == 3, _READY_S)
        assert len(before & set(pids(hub, 0))) == 1, "the third lives on"
        text = hub.text
    assert text.count("supervisor.restarting") == 2
    (culprit,) = re.findall(r"request\.poisonous request=(\S+) stage=0 replicas=(?:0/\d+, 0/\d+|0/\d+ twice):", text)
    died = re.findall(r"engine\.died requests=(\S+)", text)
    assert [culprit in names for names in died] == [True, True]
    assert "RuntimeError: a step that fails" in text
