"""One model in two stages: replicas with real vLLM engines, the KV through vLLM's ExampleConnector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omni_discovery import wire
from omni_discovery.wire import FailureKind, Resume
from tests.support.prefill_decode import PROMPTS, alone, pair
from tests.support.replica_hub import RawHub
from tests.support.replica_stage import Deployment

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@dataclass
class Running:
    """Sessions with the prefill replica, the decode replica, and one that does both."""

    prefill: RawHub
    decode: RawHub
    alone: RawHub
    kv: Path


@pytest.fixture
def running(endpoint: str, namespace: str, tmp_path: Path) -> Iterator[Running]:
    kv, both, one = tmp_path / "kv", tmp_path / "both", tmp_path / "one"
    for folder in (kv, both, one):
        folder.mkdir()
    with (
        Deployment(endpoint, namespace, pair(kv), both) as two,
        Deployment(endpoint, f"{namespace}-one", alone(), one) as single,
    ):
        two.start(0)
        two.start(1)
        single.start(0)
        # Three engines load at once.
        found = [two.wait_up(0, timeout_s=240.0), two.wait_up(1, timeout_s=240.0), single.wait_up(0, timeout_s=240.0)]
        yield Running(two.session(found[0][0]), two.session(found[1][0]), single.session(found[2][0]), kv)


def ask(hub: RawHub, request_id: str, prompt: str, **fields: Any) -> tuple[list[int], str, Any]:
    """Token ids, text and the end of one request."""
    hub.submit(request_id, prompt, params=GREEDY, **fields)
    assert isinstance(hub.acknowledged(), wire.Accepted)
    chunks, end, _ = hub.collect(request_id, 30.0)
    return [each for chunk in chunks for each in chunk.token_ids], "".join(chunk.text for chunk in chunks), end


def test_two_stages_say_what_one_says(running: Running) -> None:
    """1. the prefill stage reads a prompt, says nothing, and hands over
    2. the decode stage makes the answer: token for token what one stage makes of the prompt
    3. it does so from the KV that came: with other KV in the folder, it says something else
    4. a second attempt, and one behind tokens that were shown, say what the first would have said
    5. a hand-off without its parameters, and a wrong prompt, fail their own request and no other
    """
    expected = [ask(running.alone, f"one-{index}", prompt)[:2] for index, prompt in enumerate(PROMPTS)]
    handed = []
    for index, prompt in enumerate(PROMPTS):
        tokens, text, done = ask(running.prefill, f"r-{index}", prompt, next_stages=(1,))
        assert (tokens, text) == ([], "")
        assert isinstance(done, wire.StageDone), done
        assert done.usage["completion_tokens"] == 0
        (ref,) = done.payloads
        assert ref.metadata["kv_transfer_params"]["do_remote_prefill"] is True
        assert ref.metadata["kv_transfer_params"]["remote_engine_id"]
        handed.append(done.payloads)
    assert list(running.kv.rglob("*.safetensors"))
    for index, prompt in enumerate(PROMPTS):
        tokens, text, done = ask(running.decode, f"r-{index}", prompt, payloads=handed[index])
        assert (tokens, text) == expected[index]
        assert isinstance(done, wire.StageDone)

    tokens, text = expected[0]
    again = ask(running.decode, "r-0", PROMPTS[0], payloads=handed[0], attempt=1)
    assert again[:2] == expected[0]
    shown = next(length for length in range(5, 20) if whole(running, tokens[:length]))
    seen = Resume(token_ids=tuple(tokens[:shown]), text=whole(running, tokens[:shown]))
    rest = ask(running.decode, "r-0", PROMPTS[0], payloads=handed[0], attempt=2, resume=seen)
    assert (rest[0], seen.text + rest[1]) == (tokens[shown:], text)

    other_kv(running.kv)
    assert ask(running.decode, "other", PROMPTS[1], payloads=handed[1])[0] != expected[1][0]

    nobody = handed[0][0]
    _, _, failed = ask(running.decode, "lost", PROMPTS[0], payloads=(without_handoff(nobody),))
    assert isinstance(failed, wire.StageFailed)
    assert failed.kind is FailureKind.PAYLOAD
    _, _, failed = ask(running.prefill, "wrong", "", inputs={"prompt_token_ids": [640]}, next_stages=(1,))
    assert isinstance(failed, wire.StageFailed)
    assert failed.kind is FailureKind.INVALID
    assert isinstance(ask(running.prefill, "well", PROMPTS[0], next_stages=(1,))[2], wire.StageDone)


def whole(running: Running, tokens: list[int]) -> str:
    """The text of the tokens, empty where a character is not whole yet."""
    from transformers import AutoTokenizer

    from tests.support.engines import DEMO

    text = str(AutoTokenizer.from_pretrained(DEMO / "thinker").decode(tokens, skip_special_tokens=True))
    return "" if "\N{REPLACEMENT CHARACTER}" in text else text


def without_handoff(ref: wire.PayloadRef) -> wire.PayloadRef:
    import msgspec

    return msgspec.structs.replace(ref, key="gone", metadata={})


def other_kv(folder: Path) -> None:
    """Turn what is stored into other numbers."""
    from safetensors.torch import load_file, save_file

    for file in folder.rglob("*.safetensors"):
        save_file({name: -tensor for name, tensor in load_file(file).items()}, file)
