"""Pipelines of diffusers, tiny and with random weights, as stages. Made once, from configurations."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from stage_runtime.engines.capabilities import capabilities_of
from stage_runtime.testing import EngineContract
from tests.support.engines import as_the_supervisor_has_it, run
from tests.support.pipelines import EMBEDS_SIZE, SAVE, embeds, stage_of

pytest.importorskip("diffusers", reason="diffusers is not installed")

# What diffusers and transformers say about themselves is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)

STEPS = {"num_inference_steps": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    with as_the_supervisor_has_it():
        for name, save in SAVE.items():
            made[name] = tmp_path_factory.mktemp(name)
            save(made[name])
    return made


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Iterator[Callable[..., Engine]]:
    """Loads a pipeline; the same one once only."""
    loaded: dict[str, Engine] = {}

    def of(name: str, **engine_args: Any) -> Engine:
        if repr((name, engine_args)) not in loaded:
            engine = create_engine(stage_of(name, folders[name], **engine_args))
            engine.load(lambda phase, progress: None)
            loaded[repr((name, engine_args))] = engine
        return loaded[repr((name, engine_args))]

    yield of
    for engine in loaded.values():
        engine.close()


def ask(name: str, key: str, seed: int = 0, **params: Any) -> StageRequest:
    """A request for the pipeline of that name; another seed gives another prompt, too."""
    request = StageRequest(key, key, params={**STEPS, "seed": seed, **params})
    match name:
        case "qwen":
            small = {"height": 32, "width": 32, **request.params}
            return replace(request, params=small, payloads={0: {"prompt_embeds": embeds(seed)}})
        case "dit":
            return replace(request, inputs={"prompt": str(seed)})
        case _:
            return replace(request, inputs={"prompt": "a red cat " * (seed + 1)})


def picture(outputs: list[EngineOutput]) -> Any:
    """The picture at the end of these outputs, as numbers."""
    end = outputs[-1]
    assert end.finish_reason == "stop", end
    assert end.image_png is not None
    return np.asarray(Image.open(io.BytesIO(end.image_png)), dtype=int)


class TestDiffusersKeepsTheContract(EngineContract):
    """What every engine promises."""

    offers = frozenset({"update"})
    folder: ClassVar[Path]

    @pytest.fixture(autouse=True)
    def made(self, folders: dict[str, Path]) -> None:
        type(self).folder = folders["dit"]

    def make_engine(self) -> Engine:
        return create_engine(stage_of("dit", self.folder))

    def good_request(self, key: str) -> StageRequest:
        return ask("dit", key)

    def bad_request(self, key: str) -> StageRequest:
        return ask("dit", key, num_inference_steps=0)


class TestQwenImageKeepsTheContract(TestDiffusersKeepsTheContract):
    """It shows unfinished pictures, too."""

    offers = frozenset({"gives_partial_images", "update"})

    @pytest.fixture(autouse=True)
    def made(self, folders: dict[str, Path]) -> None:
        type(self).folder = folders["qwen"]

    def make_engine(self) -> Engine:
        return create_engine(stage_of("qwen", self.folder))

    def good_request(self, key: str) -> StageRequest:
        return ask("qwen", key)

    def bad_request(self, key: str) -> StageRequest:
        return ask("qwen", key, num_inference_steps=0)


def test_an_unfinished_picture_is_decoded_as_the_pipeline_decodes_the_finished_one(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. shown behind the very last step too, it is the picture itself: no noise is left to go along with
    2. of four in a batch, each gets its own, and one that asks for none gets none
    """
    monkeypatch.setattr("stage_runtime.engines.diffusers.pipeline.steps_shown", lambda count, asked: (2, count)[:asked])
    asked = [ask("qwen", f"k{seed}", seed, partial_images=count) for seed, count in enumerate((2, 0, 1, 2))]
    said = run(load("qwen"), *asked)
    for request, count in zip(asked, (2, 0, 1, 2), strict=True):
        outputs = said[request.key]
        shown = [output.image_png for output in outputs if output.partial_image is not None]
        assert [output.partial_image for output in outputs if output.partial_image is not None] == list(range(count))
        assert (outputs[-1].image_png in shown) is (count == 2)
    assert len({each.image_png for outputs in said.values() for each in outputs if each.image_png}) == 4 + 3


def test_a_pipeline_whose_steps_are_not_understood_gives_none(load: Callable[..., Engine]) -> None:
    engine = load("dit")
    assert not capabilities_of(engine).gives_partial_images()
    with pytest.raises(InvalidRequestError, match="partial_images"):
        engine.add(ask("dit", "k", partial_images=2))
    assert not engine.has_unfinished()


def test_a_replica_says_what_its_pipeline_computes_in(load: Callable[..., Engine]) -> None:
    assert load("dit").model_details == {"dtype": "float32", "revision": ""}  # type: ignore[attr-defined]
    half = load("dit", dtype="bfloat16")
    assert half.model_details == {"dtype": "bfloat16", "revision": ""}  # type: ignore[attr-defined]
    assert picture(run(half, ask("dit", "k"))["k"]).any()


@pytest.mark.parametrize(("name", "tolerance"), [("qwen", 0), ("dit", 0), ("pixart", 1)])
def test_a_picture_depends_on_its_seed_and_not_on_its_company(
    load: Callable[..., Engine], name: str, tolerance: int
) -> None:
    """1. each alone; 2. all in one batch: the same, PixArt's but for the last bit of a colour; 3. no two are alike"""
    engine = load(name)
    alone = [picture(run(engine, ask(name, "k", seed))["k"]) for seed in range(4)]
    together = run(engine, *(ask(name, f"k{seed}", seed) for seed in range(4)))
    for seed in range(4):
        assert np.abs(picture(together[f"k{seed}"]) - alone[seed]).max() <= tolerance
    assert len({one.tobytes() for one in alone}) == 4


def test_without_a_seed_a_second_attempt_draws_the_same(load: Callable[..., Engine]) -> None:
    first = replace(ask("dit", "k"), params=STEPS, request_id="r")
    again = replace(first, key="other", attempt=1)
    stranger = replace(first, key="stranger", request_id="s")
    said = run(load("dit"), first, again, stranger)
    assert picture(said["k"]).tobytes() == picture(said["other"]).tobytes() != picture(said["stranger"]).tobytes()


@pytest.mark.parametrize("name", list(SAVE))
def test_each_step_is_told_and_then_comes_the_picture(load: Callable[..., Engine], name: str) -> None:
    said = run(load(name), ask(name, "k"))["k"]
    assert [output.usage for output in said] == [{"steps": n} for n in (1, 2, 3, 4, 4)]
    assert [output.finished for output in said] == [False] * 4 + [True]
    assert picture(said).ndim == 3


@pytest.mark.parametrize("name", ["qwen", "dit"])
def test_an_abort_is_heard_between_two_steps(load: Callable[..., Engine], name: str) -> None:
    """1. 1000 steps are begun; 2. aborted after the first; 3. it ends at once, the pipeline within a step or two"""
    engine = load(name)
    before = picture(run(engine, ask(name, "k"))["k"])
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = pipe_of(engine).transformer.register_forward_pre_hook(count)
    engine.add(ask(name, "k", num_inference_steps=1000))
    said: list[EngineOutput] = []
    while not said:
        said = engine.step()
    engine.abort("k")
    ends = engine.step()
    while engine.has_unfinished():
        ends += engine.step()
    hook.remove()
    assert [output.finish_reason for output in ends if output.finished] == ["abort"]
    assert passes < 500
    assert (picture(run(engine, ask(name, "k"))["k"]) == before).all()


def test_only_the_culprit_of_a_batch_fails(load: Callable[..., Engine]) -> None:
    """1. one of four makes the pipeline raise; 2. the others are as they would have been; 3. it says what it was"""
    engine = load("qwen")
    wanted = {seed: picture(run(engine, ask("qwen", "k", seed))["k"]) for seed in range(3)}

    def raise_on_poison(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        if given["encoder_hidden_states"].abs().max() > 1000:
            raise torch.OutOfMemoryError("tried to allocate too much")

    poison = replace(ask("qwen", "poison"), payloads={0: {"prompt_embeds": embeds(0) * 1e6}})
    hook = pipe_of(engine).transformer.register_forward_pre_hook(raise_on_poison, with_kwargs=True)
    said = run(engine, *(ask("qwen", f"k{seed}", seed) for seed in range(3)), poison)
    hook.remove()
    for seed in range(3):
        assert (picture(said[f"k{seed}"]) == wanted[seed]).all()
    error = said["poison"][-1].error
    assert error is not None
    assert error[0] is FailureKind.ENGINE
    assert "OutOfMemoryError: tried to allocate too much" in error[1]
    assert "(5, 16)" in error[1]


def test_sizes_are_as_asked_and_need_not_be_equal(load: Callable[..., Engine]) -> None:
    asked = [ask("qwen", "a", height=32, width=64), ask("qwen", "b", height=16, width=16), ask("qwen", "c", seed=1)]
    said = run(load("qwen"), *asked)
    assert [picture(said[key]).shape for key in "abc"] == [(32, 64, 3), (16, 16, 3), (32, 32, 3)]


def test_a_companion_is_what_a_picture_is_guided_away_from(load: Callable[..., Engine]) -> None:
    """Of other lengths than the prompt, too: where a pipeline wants them equal they are filled up."""
    for name, args in (("qwen", {}), ("pixart", {"leave_out": ["text_encoder", "tokenizer"]})):
        engine = load(name, **args)
        assert capabilities_of(engine).takes_companions()
        plain = replace(ask(name, "plain"), inputs={}, payloads={0: {"hidden_states": embeds(0)}})
        others = [
            replace(plain, key=f"k{length}", companions={"negative": {0: {"prompt_embeds": embeds(9, length)[None]}}})
            for length in (5, 3, 8)
        ]
        said = run(engine, plain, *others)
        assert len({picture(outputs).tobytes() for outputs in said.values()}) == 4


def test_a_negative_prompt_is_text_where_the_pipeline_reads_text(load: Callable[..., Engine]) -> None:
    companion = {"negative": {0: {"text": "the blue moon"}}}
    said = run(
        load("pixart"),
        ask("pixart", "plain"),
        ask("pixart", "negative", negative_prompt="the blue moon"),
        replace(ask("pixart", "companion"), companions=companion),
        replace(ask("pixart", "handed"), inputs={}, payloads={0: {"pieces": [{"text": "a red"}, {"text": " cat "}]}}),
    )
    pictures = {key: picture(outputs) for key, outputs in said.items()}
    assert np.abs(pictures["negative"] - pictures["companion"]).max() <= 1
    assert np.abs(pictures["plain"] - pictures["handed"]).max() <= 1
    assert np.abs(pictures["plain"] - pictures["negative"]).max() > 1


@pytest.mark.parametrize(
    ("name", "params", "named"),
    [
        ("dit", {"num_inference_steps": 0}, "num_inference_steps"),
        ("dit", {"num_inference_steps": 1001}, "num_inference_steps"),
        ("dit", {"seed": -1}, "seed"),
        ("dit", {"guidance_scale": float("nan")}, "guidance_scale"),
        ("dit", {"height": 64}, "height: DiTPipeline takes no such parameter"),
        ("dit", {"negative_prompt": "x"}, "negative_prompt: DiTPipeline takes none"),
        ("dit", {"sepia": 1}, "sepia"),
        ("qwen", {"height": 33}, "height: 33 is no multiple of 4 "),
        ("qwen", {"width": 4096}, "width: this stage draws at most 2048"),
        ("qwen", {"width": "64"}, "width"),
        ("qwen", {"negative_prompt": "x"}, "companion 'negative'"),
        ("pixart", {"negative_prompt": 5}, "negative_prompt"),
    ],
    ids=str,
)
def test_a_parameter_that_is_wrong_is_named(
    load: Callable[..., Engine], name: str, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        load(name).add(ask(name, "k", **params))
    assert not load(name).has_unfinished()


@pytest.mark.parametrize(
    ("name", "changed", "named"),
    [
        ("qwen", {"payloads": {}, "inputs": {"prompt": "a cat"}}, "reads no text"),
        ("qwen", {"payloads": {0: {"token_ids": torch.zeros(3)}}}, "holds token_ids; .*draws prompt_embeds"),
        ("qwen", {"payloads": {0: {"prompt_embeds": torch.zeros(2, 3, 4)}}}, r"\(2, 3, 4\)"),
        ("qwen", {"payloads": {0: {"prompt_embeds": torch.zeros(0, 16)}}}, "prompt_embeds"),
        ("qwen", {"payloads": {0: {"prompt_embeds": torch.full((2, 16), torch.inf)}}}, "no number"),
        ("qwen", {"payloads": {0: {"prompt_embeds": [[1, 2]]}}}, "float"),
        ("qwen", {"payloads": {0: {"prompt_embeds": "x"}}}, "can't be read"),
        (
            "qwen",
            {"payloads": {0: {"prompt_embeds": torch.ones(2, 16), "prompt_embeds_mask": torch.ones(3)}}},
            "prompt_embeds_mask .* 3 tokens",
        ),
        ("qwen", {"companions": {"style": {0: {"prompt_embeds": torch.ones(2, 16)}}}}, "'style'"),
        ("dit", {"inputs": {"prompt": "1000"}}, "0 to 999"),
        ("dit", {"inputs": {"prompt": "unicorn"}}, "0 to 999"),
        ("pixart", {"inputs": {}}, "prompt"),
        ("pixart", {"inputs": {"messages": [{"role": "user", "content": 5}]}}, "content"),
    ],
    ids=str,
)
def test_what_can_not_be_drawn_is_refused(
    load: Callable[..., Engine], name: str, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        load(name).add(replace(ask(name, "k"), **changed))
    assert not load(name).has_unfinished()


def test_embeddings_of_another_size_fail_with_their_shape_and_the_engine_lives(load: Callable[..., Engine]) -> None:
    engine = load("qwen")
    wrong = replace(ask("qwen", "wrong"), payloads={0: {"prompt_embeds": torch.ones(5, EMBEDS_SIZE + 1)}})
    said = run(engine, wrong, ask("qwen", "right"))
    assert said["wrong"][-1].error is not None
    assert "(5, 17)" in said["wrong"][-1].error[1]
    assert picture(said["right"]).any()


def test_without_a_means_to_read_text_guidance_needs_a_companion(load: Callable[..., Engine]) -> None:
    engine = load("pixart", leave_out=["text_encoder", "tokenizer"])
    handed = replace(ask("pixart", "k"), inputs={}, payloads={0: {"prompt_embeds": embeds(0)}})
    with pytest.raises(InvalidRequestError, match=r"guidance_scale: .*'negative'"):
        engine.add(replace(handed, params={**handed.params, "guidance_scale": 3.0}))
    assert picture(run(engine, handed)["k"]).any()


# ---- what the operator has to mend


def copy_of(folder: Path, to: Path) -> Path:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(folder)).write_bytes(path.read_bytes())
    return to


def refusal(folder: Path, **engine_args: Any) -> str:
    engine = create_engine(stage_of("dit", folder, **engine_args))
    with pytest.raises(ConfigError) as caught:
        engine.load(lambda phase, progress: None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "weights", "pickled"),
    [
        ("dit", "transformer/diffusion_pytorch_model", "transformer/diffusion_pytorch_model"),
        ("pixart", "text_encoder/model", "text_encoder/pytorch_model"),
    ],
)
def test_pickled_weights_are_not_loaded(
    folders: dict[str, Path], tmp_path: Path, name: str, weights: str, pickled: str
) -> None:
    """The same weights, but written by torch.save; of diffusers' own classes and of those of transformers."""
    from safetensors.torch import load_file

    path = copy_of(folders[name], tmp_path) / f"{weights}.safetensors"
    torch.save(load_file(path), tmp_path / f"{pickled}.bin")
    path.unlink()
    assert "only safetensors are" in refusal(tmp_path)


def test_weights_that_are_cut_off_are_the_operators(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = copy_of(folders["dit"], tmp_path) / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"_class_name": ["mine", "MyPipeline"]}, "own code is not run"),
        ({"transformer": ["os", "system"]}, "transformer is of 'os'"),
        ({"transformer": ["mine.code", "Model"]}, "only diffusers and transformers"),
        ({"_class_name": "NoSuchPipeline"}, "NoSuchPipeline"),
    ],
    ids=str,
)
def test_code_that_came_with_the_model_is_not_run(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    index = copy_of(folders["dit"], tmp_path) / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **change}))
    assert named in refusal(tmp_path)


def test_a_pipeline_that_needs_a_picture_is_not_served() -> None:
    from stage_runtime.engines.diffusers.pipeline import PipelineSource, traits_of

    class Brightener:
        def __call__(self, image: Any, prompt: str = "") -> Any:
            raise AssertionError("it is never called")

    with pytest.raises(ConfigError, match="stage 1: Brightener takes image; stages draw prompts"):
        traits_of(Brightener(), PipelineSource(where="stage 1", model="x"), {}, 64)


def test_arguments_that_the_pipeline_has_not_are_named(folders: dict[str, Path]) -> None:
    assert "call_args.eta" in refusal(folders["dit"], call_args={"eta": 1.0})
    assert "call_args.output_type" in refusal(folders["dit"], call_args={"output_type": "latent"})
    assert "no 'tokenizer' to leave out; it has" in refusal(folders["dit"], leave_out=["tokenizer"])


def pipe_of(engine: Any) -> Any:
    return engine._drawer._thread._draw.__self__._pipe
