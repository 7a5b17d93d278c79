"""Of the parameters that vLLM-Omni's server settles, what differs from a stage's defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from hub.api.errors import NotServedError
from hub.api.vllm.omni.params import changed_params


class Tokens(msgspec.Struct):
    """As vLLM's, by the names of its fields."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    output_kind: int = 0
    detokenize: bool = True
    extra_args: dict[str, Any] | None = None
    structured_outputs: Any = None


@dataclass
class Drawn:
    """As vLLM-Omni's, by the names of its fields."""

    num_outputs_per_prompt: int = 1
    seed: int | None = None
    height: int | None = None
    num_inference_steps: int | None = None
    generator_device: str | None = None
    layers: int = 4
    lora_request: Any = None
    extra_args: dict[str, Any] = field(default_factory=dict)


def test_only_what_was_changed_is_sent() -> None:
    usual = Tokens(temperature=0.9, max_tokens=4096, stop_token_ids=[2150])
    assert changed_params(usual, usual) == {}
    asked = msgspec.structs.replace(usual, max_tokens=24, output_kind=2, detokenize=False, stop=[], temperature=1.0)
    assert changed_params(asked, usual) == {"max_tokens": 24, "temperature": 1.0}


def test_a_seed_is_sent_once() -> None:
    usual = Tokens()
    assert changed_params(Tokens(seed=7, extra_args={"tts_local_seed": 7}), usual) == {"seed": 7}
    with pytest.raises(NotServedError, match="tts_local_seed can't be asked"):
        changed_params(Tokens(seed=7, extra_args={"tts_local_seed": 8}), usual)


def test_a_pictures_parameters_have_our_names() -> None:
    asked = Drawn(seed=3, height=64, num_inference_steps=4, generator_device="cpu")
    assert changed_params(asked, Drawn()) == {"seed": 3, "height": 64, "num_inference_steps": 4}


def test_what_the_server_notes_for_other_models_is_no_change() -> None:
    noted = {"ar_task_mode": "comprehension", "tts_local_seed": 7, "target_h": 64, "target_w": 64}
    assert changed_params(Tokens(seed=7, extra_args=noted), Tokens()) == {"seed": 7}


@pytest.mark.parametrize(
    ("asked", "usual", "said"),
    [
        (Tokens(n=2), Tokens(), "n can't be asked here; --api vllm"),
        (Tokens(logprobs=1), Tokens(), "logprobs can't be asked here"),
        (Tokens(extra_args={"cfg": 2}), Tokens(), "cfg can't be asked of a stage"),
        (Tokens(extra_args={"ar_task_mode": "draw"}), Tokens(), "ar_task_mode can't be asked of a stage"),
        (Tokens(structured_outputs=Drawn()), Tokens(), "structured_outputs can't be asked of these stages"),
        (Tokens(max_tokens=None), Tokens(), "max_tokens: the stage's default can't be taken away"),
        (Drawn(num_outputs_per_prompt=2), Drawn(), "n: one request makes one picture"),
        (Drawn(layers=2), Drawn(), "layers can't be asked"),
        (Drawn(lora_request="/any/path"), Drawn(), "lora_request can't be asked"),
        (Drawn(extra_args={"bot_task": "x"}), Drawn(), "extra_args can't be asked"),
    ],
)
def test_what_no_stage_takes_is_refused_by_its_name(asked: Any, usual: Any, said: str) -> None:
    with pytest.raises(NotServedError, match=said):
        changed_params(asked, usual)
