"""The engine of vLLM-Omni's diffusion stages, with a tiny Qwen-Image.

Needs vLLM-Omni's environment, which `make omni-test` makes.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni has an environment of its own: make omni-test", allow_module_level=True)

from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from stage_runtime.supervisor.environment import stage_environment
from stage_runtime.testing import EngineContract, run
from tests.support.omni_pictures import PICTURE, picture_stage
from tests.support.tiny_qwen_image import EMBEDS_SIZE, write_model

pytestmark = [
    pytest.mark.vllm,
    # Of the libraries, about each other.
    pytest.mark.filterwarnings("ignore"),
]
_WAIT_S = 60.0


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model") / "tiny-qwen-image"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**stage_environment(picture_stage("x"), True), "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setitem(os.environ, name, value)
        write_model(folder)
        yield str(folder)


def loaded(model: str, **engine_args: Any) -> Engine:
    engine = create_engine(picture_stage(model, 1, **engine_args))
    engine.load(lambda *_: None)
    return engine


@pytest.fixture(scope="module")
def painter(model: str) -> Iterator[Engine]:
    """Draws up to three pictures at once."""
    engine = loaded(model, max_num_seqs=3)
    yield engine
    engine.close()


def ask(key: str, prompt: str = "a red cat", **params: Any) -> StageRequest:
    return StageRequest(key, key, inputs={"prompt": prompt}, params={**PICTURE, **params})


def handed(key: str, handoff: dict[str, Any], negative: dict[str, Any] | None = None, **params: Any) -> StageRequest:
    companions = {} if negative is None else {"negative": {0: negative}}
    return StageRequest(key, key, payloads={0: handoff}, companions=companions, params={**PICTURE, **params})


def embeds(seed: int, tokens: int = 5) -> dict[str, Any]:
    return {"prompt_embeds": torch.randn(tokens, EMBEDS_SIZE, generator=torch.Generator().manual_seed(seed))}


def picture(outputs: Sequence[EngineOutput]) -> np.ndarray[Any, Any]:
    end = outputs[-1]
    assert (end.finish_reason, end.error) == ("stop", None)
    assert end.image_png is not None
    return np.asarray(Image.open(io.BytesIO(end.image_png)), dtype=int)


def drawn(engine: Engine, request: StageRequest) -> np.ndarray[Any, Any]:
    return picture(run(engine, request)[request.key])


class TestOmniDiffusionKeepsTheContract(EngineContract):
    """First, and closed before the others load theirs: vLLM-Omni has room for one diffusion engine in a process."""

    offers = frozenset({"update"})
    folder: ClassVar[str] = ""

    @pytest.fixture(autouse=True, scope="class")
    def _model(self, model: str) -> None:
        type(self).folder = model

    def make_engine(self) -> Engine:
        return create_engine(picture_stage(self.folder, max_num_seqs=2))

    def good_request(self, key: str) -> StageRequest:
        return ask(key)

    def bad_request(self, key: str) -> StageRequest:
        return ask(key, num_inference_steps=0)


def test_a_picture_depends_on_its_text_and_seed_and_on_no_attempt(painter: Engine) -> None:
    first = drawn(painter, ask("a"))
    assert first.shape == (64, 64, 3)
    assert len(np.unique(first)) > 20, "that is one colour"
    assert np.array_equal(drawn(painter, ask("b")), first)
    assert not np.array_equal(drawn(painter, ask("c", "the blue moon")), first)
    assert not np.array_equal(drawn(painter, ask("d", seed=4)), first)
    unseeded = ask("e", seed=None)
    again = replace(unseeded, key="f")
    assert np.array_equal(drawn(painter, unseeded), drawn(painter, again))
    assert drawn(painter, ask("g", height=32, width=48)).shape == (32, 48, 3)


def test_pictures_that_are_drawn_together_differ_by_rounding_alone(painter: Engine) -> None:
    requests = [ask("a"), ask("b", seed=4), ask("c", "the blue moon")]
    alone = [drawn(painter, request) for request in requests]
    together = run(painter, *requests)
    assert [np.abs(picture(together[key]) - one).max() <= 1 for key, one in zip("abc", alone, strict=True)] == [
        True
    ] * 3
    assert np.abs(alone[0] - alone[1]).max() > 1


def test_steps_are_told_and_an_abort_is_heard_between_two_of_them(painter: Engine) -> None:
    """1. each step is told, then comes the picture; 2. of a thousand steps, few are done after an abort"""
    said = run(painter, ask("a"))["a"]
    assert [output.usage["steps"] for output in said if output.usage] == [1, 2, 3, 4, 4]
    painter.add(ask("long", num_inference_steps=1000))
    steps, outputs = 0, list[EngineOutput]()
    until_s = time.monotonic() + _WAIT_S
    while not (outputs and outputs[-1].finished):
        assert time.monotonic() < until_s
        outputs += painter.step()
        steps = max((output.usage.get("steps", 0) for output in outputs), default=0)
        if steps:
            painter.abort("long")
    assert outputs[-1].finish_reason == "abort"
    while painter.has_unfinished():
        assert time.monotonic() < until_s
        painter.step()
    assert steps < 1000
    assert drawn(painter, ask("after")).any()


def test_what_a_stage_before_hands_over_is_drawn_and_a_companion_leads_away(painter: Engine) -> None:
    """Embeddings, or text; the companion ``negative`` by the same way, as a negative prompt of the request's own."""
    plain = drawn(painter, handed("a", embeds(1)))
    assert not np.array_equal(drawn(painter, handed("b", embeds(2))), plain)
    led = drawn(painter, handed("c", embeds(1), embeds(2, 3), true_cfg_scale=4.0))
    assert not np.array_equal(led, plain)
    assert not np.array_equal(drawn(painter, handed("d", embeds(1), embeds(3, 3), true_cfg_scale=4.0)), led)
    by_text = drawn(painter, handed("e", {"text": "a red cat"}, {"text": "moon"}, true_cfg_scale=4.0))
    assert np.array_equal(drawn(painter, ask("f", negative_prompt="moon", true_cfg_scale=4.0)), by_text)
    assert not np.array_equal(drawn(painter, ask("g", true_cfg_scale=4.0)), by_text)


def test_a_request_with_a_negative_prompt_is_not_drawn_with_one_without(painter: Engine) -> None:
    """vLLM-Omni's own batches fail where one of two has it: both must come out as alone."""
    requests = [ask("a", negative_prompt="moon", true_cfg_scale=4.0), ask("b", true_cfg_scale=4.0)]
    alone = [drawn(painter, request) for request in requests]
    together = run(painter, *requests)
    assert [np.array_equal(picture(together[key]), one) for key, one in zip("ab", alone, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"height": 63}, "height: 63 is no multiple of 16 pixels"),
        ({"width": 4096}, "width: this stage draws at most 2048 pixels, not 4096"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"seed": -1}, "seed"),
        ({"steps": 4}, "'steps' is not known"),
    ],
)
def test_a_request_that_cannot_be_drawn_is_refused(painter: Engine, params: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        painter.add(ask("bad", **params))
    assert not painter.has_unfinished()


def test_a_prompt_that_the_pipeline_refuses_fails_its_request_alone(painter: Engine) -> None:
    said = run(painter, ask("bad", "word " * 4000), ask("good"))
    error = said["bad"][-1].error
    assert error is not None
    assert error[0] is FailureKind.INVALID
    assert "Shorten the prompt" in error[1]
    assert picture(said["good"]).any()


@pytest.mark.parametrize(
    ("engine_args", "said"),
    [
        ({"max_nmu_seqs": 1}, "max_nmu_seqs"),
        ({"model_class_name": "FluxPipeline"}, "'FluxPipeline' was not run with this engine"),
    ],
)
def test_what_does_not_fit_is_the_operators_mistake(model: str, engine_args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(model, **engine_args)


def test_a_folder_without_a_pipeline_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model_index.json in .*: it holds no diffusion pipeline"):
        loaded(str(tmp_path))


def listening() -> set[str]:
    """The addresses on which this process listens beyond its own host, by the kernel."""
    mine = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            is_open = set(fields[1].partition(":")[0]) == {"0"}
            if fields[3] == "0A" and is_open and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1])
    return found


def test_a_stage_opens_no_port_to_other_hosts_and_leaves_the_log_as_it_was(painter: Engine) -> None:
    """vLLM-Omni alone would open its process group's store to every address, and put its worker's name before lines."""
    assert listening() == set()
    assert not any(hasattr(stream.write, "__code__") for stream in (sys.stdout, sys.stderr))
    assert painter.model_details == {"dtype": "float32"}  # type: ignore[attr-defined]


def test_closing_ends_every_thread_and_makes_room_for_another(model: str, painter: Engine) -> None:
    painter.close()
    before = {thread.name for thread in threading.enumerate()}
    engine = loaded(model)
    assert drawn(engine, ask("a")).any()
    engine.close()
    engine.close()
    until_s = time.monotonic() + _WAIT_S
    while left := {thread.name for thread in threading.enumerate()} - before - {"tqdm_monitor"}:
        assert time.monotonic() < until_s, left
        time.sleep(0.05)
