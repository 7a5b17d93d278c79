"""The control methods of a vLLM stage, on vLLM's CPU build: adapters, profiles, sleep, and what it can't."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.log_once import LogOnce
from stage_runtime.engine_loop.control import perform
from stage_runtime.engine_loop.jobs import Call, Called
from stage_runtime.engines.base import CONTROL_METHODS, Engine, StageRequest, create_engine
from stage_runtime.engines.capabilities import capabilities_of
from stage_runtime.engines.vllm.engine import VllmEngine
from stage_runtime.testing import drain, run
from tests.support.engines import DEMO, THINKER, as_the_supervisor_has_it, skip_without_vllms_server
from tests.support.local_replica import LocalReplica
from tests.support.serving import HUBS, hub_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Scene:
    engine: Engine
    profiles: Path

    def call(self, method: str, *args: Any) -> Called:
        return perform(capabilities_of(self.engine), Call("#1", method, args, {}, 1e9), LogOnce())

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


def build_adapter(folder: Path) -> Path:
    """A small one for the demo's thinker, of noise."""
    config = json.loads((DEMO / "thinker" / "config.json").read_text())
    width = config["hidden_size"]
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps({**about, "bias": "none"}))
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        noise = torch.Generator().manual_seed(layer)
        weights |= {
            f"{name}.lora_A.weight": torch.randn(4, width, generator=noise),
            f"{name}.lora_B.weight": torch.randn(width, 4, generator=noise),
        }
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return build_adapter(tmp_path)


def test_it_has_all_methods_there_are(scene: Scene) -> None:
    assert set(scene.engine.controls) == set(CONTROL_METHODS)  # type: ignore[attr-defined]


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
    each: dict[str, dict[str, Any]] = {
        "base": {"max_tokens": 5, "ignore_eos": True},
        "lora": {"lora": "mine", "max_tokens": 5},
    }
    both = [
        StageRequest(name, name, inputs={"prompt": "What is 1 + 2?"}, params={"temperature": 0.0, **more})
        for name, more in each.items()
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


def test_a_request_that_says_where_its_adapter_is_needs_no_call(scene: Scene, adapter: Path, tmp_path: Path) -> None:
    """1. it is loaded with the first request for it, and answers as one that a call has brought
    2. the same name with another path is another adapter; what can't be loaded is that request's error
    3. a call loads it anew, in place; once it is taken out, the next request for it brings it again
    """
    without = scene.answer()
    scene.value("add_lora", "mine", 3, str(adapter))
    with_it = scene.answer(lora="mine")
    assert with_it != without
    scene.value("remove_lora", 3)
    mine = {"name": "sql", "path": str(adapter)}
    assert scene.answer(lora=mine) == scene.answer(lora=mine) == with_it
    (lora_id,) = scene.value("list_loras")
    for more in ({}, {"load_inplace": True}):
        assert scene.value("add_lora", "sql", None, str(adapter), more) is True
    assert scene.value("list_loras") == [lora_id]
    assert scene.answer(lora=mine) == with_it
    other = tmp_path / "other"
    shutil.copytree(adapter, other, ignore=shutil.ignore_patterns("other"))
    weights = load_file(other / "adapter_model.safetensors")
    save_file({name: -each for name, each in weights.items() if "lora_B" in name} | {
        name: each for name, each in weights.items() if "lora_A" in name
    }, other / "adapter_model.safetensors")  # fmt: skip
    theirs = {"name": "sql", "path": str(other)}
    assert scene.answer(lora=theirs) != with_it
    assert scene.answer(lora=mine) == with_it
    with pytest.raises(Exception, match="No adapter found for /no/such/path"):
        scene.answer(lora={"name": "sql", "path": "/no/such/path"})
    for wrong in (
        {"name": "sql"},
        {"path": "/l"},
        {"name": "", "path": "/l"},
        {**mine, "planet": 1, "name": "new"},
        [1],
    ):
        with pytest.raises(InvalidRequestError, match="lora: "):
            scene.answer(lora=wrong)
    for each in scene.value("list_loras"):
        scene.value("remove_lora", each)
    assert scene.answer(lora=mine) == with_it
    for each in scene.value("list_loras"):
        scene.value("remove_lora", each)
    assert scene.answer() == without


async def test_through_vllms_server_an_adapter_is_asked_by_its_name(
    scene: Scene, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. one that the hub was started with, and one that is added, are answered as the stage itself does with them
    2. one that no replica finds is not added; one whose path turns out wrong fails its requests, and no others
    """
    skip_without_vllms_server()
    from hub.api.vllm.server import VllmFrontend

    # So the environment variable of that name, which vLLM has read by now, has it show the routes for adapters.
    monkeypatch.setattr("vllm.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING", True)
    assert isinstance(scene.engine, VllmEngine)
    stage = msgspec.structs.replace(scene.engine._stage, final_output="text", default_sampling_params={})
    flags = f"--lora-modules sql={adapter} lost=/no/such/path"
    with as_the_supervisor_has_it():
        frontend = VllmFrontend(DeployConfig(stages=(stage,), model="m"), flags)
    without, with_it = scene.answer(), scene.answer(lora={"name": "sql", "path": str(adapter)})
    document = "stages: [{stage_id: 0, engine: vllm, model: m, final_output: text}]"
    told: dict[str, Any] = {}
    with LocalReplica(HUBS, engine=scene.engine) as replica:
        async with hub_of(document, replica) as omni:
            transport = httpx.ASGITransport(app=await frontend.build(omni), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://hub/v1", timeout=60) as client:
                more = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
                for path in ("/no/such/path", str(adapter)):
                    named = {"lora_name": "added", "lora_path": path}
                    told[path] = (await client.post("/load_lora_adapter", json=named)).status_code
                for model in ("m", "sql", "added", "lost", "none", "m"):
                    body = {"model": model, "prompt": "What is 1 + 2?", **more}
                    told[model] = await client.post("/completions", json=body)
                listed = [each["id"] for each in (await client.get("/models")).json()["data"]]
    assert (told["/no/such/path"], told[str(adapter)]) == (404, 200)
    assert listed == ["m", "sql", "lost", "added"]
    said = {model: told[model].json()["choices"][0]["token_ids"] for model in ("m", "sql", "added")}
    assert said == {"m": without, "sql": with_it, "added": with_it}
    assert (told["lost"].status_code, told["none"].status_code) == (500, 404)
    assert "No adapter found for /no/such/path" in told["lost"].text


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
    from vllm import exceptions

    assert scene.call("start_profile").ok
    # Before 0.32, vLLM takes a second start as the first.
    due = "ProfilerAlreadyActiveError" if hasattr(exceptions, "ProfilerAlreadyActiveError") else ""
    assert scene.call("start_profile").error.partition(":")[0] == due
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
