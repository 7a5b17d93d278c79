"""The control methods of a vLLM stage, on vLLM's CPU build: adapters, profiles, sleep, and what it can't."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from omni_discovery.deploy import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from stage_runtime.control import STANDARD, perform
from stage_runtime.engines.base import Engine, StageRequest, create_engine
from stage_runtime.jobs import Call, Called
from stage_runtime.testing import drain, run
from tests.support.engines import DEMO, THINKER, as_the_supervisor_has_it

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Scene:
    engine: Engine
    profiles: Path

    def call(self, method: str, *args: Any) -> Called:
        return perform(self.engine, Call("#1", method, args, {}, 1e9))

    def value(self, method: str, *args: Any) -> Any:
        called = self.call(method, *args)
        assert called.ok, called.error
        return msgspec.msgpack.decode(called.result)

    def answer(self, **more: Any) -> list[int]:
        params = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, **more}
        said = run(self.engine, StageRequest("k", "k", inputs={"prompt": "What is 1 + 2?"}, params=params))["k"]
        return [token_id for output in said for token_id in output.token_ids]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    profiles = tmp_path_factory.mktemp("profiles")
    more = {
        "enable_lora": True,
        "max_lora_rank": 8,
        # vLLM's CPU build takes what is in the last place for requests without an adapter, too: leave it empty.
        "max_loras": 2,
        "allow_rpc": ["list_loras"],
        "profiler_config": {"profiler": "torch", "torch_profiler_dir": str(profiles)},
    }
    with as_the_supervisor_has_it():
        engine = create_engine(msgspec.structs.replace(THINKER, engine_args={**THINKER.engine_args, **more}))
        engine.load(lambda _phase, _progress: None)
        yield Scene(engine, profiles)
        engine.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A small one for the demo's thinker, of noise."""
    config = json.loads((DEMO / "thinker" / "config.json").read_text())
    width = config["hidden_size"]
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "bias": "none"}))
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        noise = torch.Generator().manual_seed(layer)
        weights |= {
            f"{name}.lora_A.weight": torch.randn(4, width, generator=noise),
            f"{name}.lora_B.weight": torch.randn(width, 4, generator=noise),
        }
    save_file(weights, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_it_has_all_methods_there_are(scene: Scene) -> None:
    assert set(scene.engine.controls) == set(STANDARD)  # type: ignore[attr-defined]


def test_an_adapter_is_loaded_listed_pinned_and_unloaded(scene: Scene, adapter: Path) -> None:
    assert scene.value("add_lora", "mine", 3, str(adapter)) is True
    assert scene.value("list_loras") == [3]
    assert scene.value("pin_lora", 3) is True
    assert scene.value("collective_rpc", "list_loras") == [[3]]
    assert scene.value("remove_lora", 3) is True
    assert scene.value("list_loras") == []


def test_a_request_is_answered_with_the_adapter_that_it_names(scene: Scene, adapter: Path) -> None:
    """1. with the adapter the answer is another one, without it the same as ever, also side by side and resumed
    2. one that is not there, or not there any more, is refused with those that are
    """
    without = scene.answer()
    scene.value("add_lora", "mine", 3, str(adapter))
    with_it = scene.answer(lora="mine")
    assert with_it != without
    assert scene.answer() == without
    both = [
        StageRequest(name, name, inputs={"prompt": "What is 1 + 2?"}, params={"temperature": 0.0, **more})
        for name, more in {
            "base": {"max_tokens": 5, "ignore_eos": True},
            "lora": {"lora": "mine", "max_tokens": 5},
        }.items()
    ]
    said = {
        key: [token_id for output in outputs for token_id in output.token_ids]
        for key, outputs in run(scene.engine, *both).items()
    }
    assert said["base"] == without
    assert said["lora"] == with_it[: len(said["lora"])]
    scene.engine.add(
        StageRequest("k", "k", inputs={"prompt": "What is 1 + 2?"}, params={**both[1].params, "ignore_eos": True})
    )
    first = scene.engine.step()
    scene.engine.pause("k", True)  # type: ignore[attr-defined]
    scene.engine.pause("k", False)  # type: ignore[attr-defined]
    rest = drain(scene.engine)
    assert [token_id for output in (*first, *rest) for token_id in output.token_ids] == with_it
    for name in ("yours", 3):
        with pytest.raises(InvalidRequestError, match=r"lora: .*there are: mine"):
            scene.answer(lora=name)
    scene.value("remove_lora", 3)
    with pytest.raises(InvalidRequestError, match=r"there are: none"):
        scene.answer(lora="mine")


def test_an_adapter_that_is_not_there_is_that_calls_error_and_the_engine_lives(scene: Scene, tmp_path: Path) -> None:
    assert scene.call("add_lora", "mine", 3, str(tmp_path / "nowhere")).error.startswith("LoRAAdapterNotFoundError: ")
    assert scene.call("pin_lora", 77).error
    assert len(scene.answer()) == 5


def test_sleep_without_giving_memory_back_works_and_the_answer_after_it_is_the_same(scene: Scene) -> None:
    before = scene.answer()
    assert scene.call("sleep", 0).is_asleep is True
    assert scene.value("is_sleeping") is True
    assert scene.call("wake_up").is_asleep is False
    assert scene.answer() == before
    refused = scene.call("sleep", 1)
    assert refused.error.startswith(
        "ControlRefusedError: memory is only given back where engine_args.enable_sleep_mode"
    )
    assert refused.is_asleep is False
    assert scene.call("sleep", 7).error.startswith("ValueError: ")


def test_a_profile_is_written_and_prefixes_are_forgotten(scene: Scene) -> None:
    assert scene.call("start_profile").ok
    assert scene.call("start_profile").error.startswith("ProfilerAlreadyActiveError: ")
    scene.answer()
    assert scene.call("stop_profile").ok
    assert [path for path in scene.profiles.iterdir() if ".trace.json" in path.name]
    assert scene.value("reset_prefix_cache") is True


def test_workers_methods_that_the_operator_has_not_named_are_not_called(scene: Scene) -> None:
    assert scene.call("collective_rpc", "shutdown").error == (
        "ControlRefusedError: engine_args.allow_rpc of this stage does not name 'shutdown', but list_loras"
    )


def test_what_is_no_list_of_names_is_refused_at_the_door() -> None:
    stage: StageConfig = msgspec.structs.replace(THINKER, engine_args={**THINKER.engine_args, "allow_rpc": [1]})
    with pytest.raises(ConfigError, match=r"engine_args\.allow_rpc"):
        create_engine(stage)
