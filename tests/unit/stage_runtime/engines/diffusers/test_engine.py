"""The engine around a pipeline, with a pipeline that does as it is told."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engine_loop.jobs import Outcome, Work
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import EngineOutput, StageRequest, create_engine
from stage_runtime.engines.diffusers.engine import DiffusersEngine
from stage_runtime.engines.diffusers.pipeline import PipelineSource, fetch
from stage_runtime.engines.pictures.drawer import PictureDrawer
from stage_runtime.engines.pictures.request import Embeds, Picture, Traits, read_picture
from stage_runtime.lifecycle import stalled
from tests.support.engines import run
from tests.support.processes import wait_for

TRAITS = Traits("Fake", frozenset({"prompt", "num_inference_steps", "height"}), True, 8, 512)


class Pipeline:
    """Takes two steps for each batch, each when ``go`` is set; keeps the prompts of what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.go = threading.Event()
        self.go.set()
        self.is_broken = False

    def draw(self, pictures: Sequence[Picture], heard: Callable[[int], None]) -> list[bytes]:
        prompts = [picture.prompt for picture in pictures]
        self.batches.append(prompts)
        if "refused" in prompts:
            raise ValueError("that is no prompt")
        for step in (1, 2):
            assert self.go.wait(60)
            if "poison" in prompts:
                raise MemoryError("too much")
            heard(step)
        return [f"{picture.prompt} {picture.seed}".encode() for picture in pictures]

    def is_lost(self) -> bool:
        return self.is_broken


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


def stage_of(model: str, **engine_args: Any) -> StageConfig:
    return StageConfig(stage_id=1, engine="diffusion", model=model, engine_args=engine_args)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What looks like a pipeline, on a machine that looks as if it had diffusers."""
    (tmp_path / "model_index.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return tmp_path


@pytest.fixture
def engine(folder: Path, pipeline: Pipeline) -> Iterator[DiffusersEngine]:
    made = create_engine(stage_of(str(folder), capacity=3))
    assert isinstance(made, DiffusersEngine)
    made._traits, made._drawer = TRAITS, PictureDrawer(3, pipeline.draw, pipeline.is_lost)
    yield made
    pipeline.go.set()
    made.close()


def ask(prompt: str, priority: int = 0, **params: Any) -> StageRequest:
    return StageRequest(prompt, prompt, inputs={"prompt": prompt}, params={"seed": 7, **params}, priority=priority)


def ends(said: dict[str, list[EngineOutput]]) -> dict[str, bytes | None]:
    return {key: outputs[-1].image_png for key, outputs in said.items()}


def test_alike_pictures_are_drawn_together_each_from_its_seed(engine: DiffusersEngine, pipeline: Pipeline) -> None:
    said = run(engine, ask("a"), ask("b", height=64), ask("c", seed=8), ask("d"), ask("e"))
    assert pipeline.batches == [["a", "c", "d"], ["b"], ["e"]]
    assert ends(said) == {"a": b"a 7", "b": b"b 7", "c": b"c 8", "d": b"d 7", "e": b"e 7"}
    assert [output.usage for output in said["e"]] == [{"steps": 1}, {"steps": 2}, {"steps": 2}]


def test_the_engine_hears_while_a_step_stands_still(engine: DiffusersEngine, pipeline: Pipeline) -> None:
    """1. a batch of two stands in its first step; 2. steps return, one is aborted and says so, a third comes
    3. the first goes on and is drawn; the aborted one says nothing more; the third is drawn
    """
    pipeline.go.clear()
    engine.add(ask("stays"))
    engine.add(ask("goes"))
    assert engine.step() == []
    engine.abort("goes")
    engine.add(ask("comes"))
    assert engine.step() == [EngineOutput("goes", finish_reason="abort")]
    with pytest.raises(InvalidRequestError, match="running already"):
        engine.add(ask("stays"))
    pipeline.go.set()
    said = finish(engine)
    assert {output.key for output in said} == {"stays", "comes"}
    assert [output.image_png for output in said if output.finished] == [b"stays 7", b"comes 7"]


def test_a_batch_that_nobody_wants_ends_at_its_next_step(engine: DiffusersEngine, pipeline: Pipeline) -> None:
    """1. it stands in its first step and all of it is aborted; 2. the same key comes again and is drawn anew"""
    pipeline.go.clear()
    engine.add(ask("a"))
    engine.step()
    engine.abort("a")
    engine.add(ask("a", seed=9))
    pipeline.go.set()
    said = finish(engine)
    assert [(output.finish_reason, output.image_png) for output in said if output.finished] == [
        ("abort", None),
        ("stop", b"a 9"),
    ]
    assert [output.usage for output in said if not output.finished] == [{"steps": 1}, {"steps": 2}]
    assert len(pipeline.batches) == 2


def test_who_waits_can_be_aborted_and_is_never_drawn(engine: DiffusersEngine, pipeline: Pipeline) -> None:
    pipeline.go.clear()
    engine.add(ask("a"))
    engine.step()
    engine.add(ask("b"))
    engine.abort("b")
    engine.abort("unknown")
    pipeline.go.set()
    assert [output.key for output in finish(engine) if output.finished] == ["b", "a"]
    assert pipeline.batches == [["a"]]


def test_only_the_culprit_fails_and_before_a_step_it_is_called_the_requests_mistake(
    engine: DiffusersEngine, pipeline: Pipeline
) -> None:
    said = run(engine, ask("a"), ask("poison"), ask("b"), ask("refused", height=8), ask("c", height=8))
    batches = [["a", "poison", "b"], ["a"], ["poison"], ["b"], ["refused", "c"], ["refused"], ["c"]]
    assert pipeline.batches == batches
    assert [said[key][-1].image_png for key in "abc"] == [b"a 7", b"b 7", b"c 7"]
    assert said["poison"][-1].error == (FailureKind.ENGINE, "the pipeline raised MemoryError: too much")
    assert said["refused"][-1].error == (
        FailureKind.INVALID,
        "the pipeline refuses this: ValueError: that is no prompt",
    )


def test_a_device_that_is_lost_is_the_end_of_the_engine(engine: DiffusersEngine, pipeline: Pipeline) -> None:
    pipeline.is_broken = True
    with pytest.raises(RuntimeError, match=r"MemoryError: too much; the device does not work"):
        run(engine, ask("poison"), ask("a"))


def test_a_stuck_step_is_told_from_one_that_moves(engine: DiffusersEngine, pipeline: Pipeline) -> None:
    """1. idle, the loop has nothing to be late with; 2. a step stands: turns go on and the last move gets older
    3. it moves: the last move is new again
    """
    outcomes: list[Outcome] = []
    loop = EngineLoop(engine, Payloads(1, {}, lambda: 0.0), {}, outcomes.extend)
    pipeline.go.clear()
    loop.jobs.put(work("k"))
    loop.turn()
    begun_s = loop.progress.at_s
    for _ in range(5):
        loop.turn()
    assert loop.progress.busy
    assert loop.progress.at_s == begun_s
    assert stalled(loop.progress.busy, begun_s + 61.0, loop.progress.at_s, 60.0)
    pipeline.go.set()
    wait_for("the end", lambda: loop.turn() is None and len(loop) == 0)
    assert loop.progress.at_s > begun_s
    assert not loop.progress.busy


def work(key: str) -> Work:
    return Work(key, "o", key, 0, {"prompt": key}, {}, (), (), 0.0, float("inf"))


def finish(engine: DiffusersEngine) -> list[EngineOutput]:
    said: list[EngineOutput] = []
    while engine.has_unfinished():
        said += engine.step()
    return said


def test_a_class_is_asked_for_by_number_or_name() -> None:
    traits = replace(TRAITS, reads_text=False, labels={"goldfish": 1}, num_labels=2)
    asked = {"goldfish": 1, " 0 ": 0, "1": 1}
    assert {text: read_picture(ask(text), traits).prompt for text in asked} == asked
    for wrong in ("2", "-1", "unicorn", "9" * 20):
        with pytest.raises(InvalidRequestError, match="a number from 0 to 1 or its name"):
            read_picture(ask(wrong), traits)


def test_a_name_on_a_model_hub_is_fetched_only_where_the_operator_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"'someone/model' is not a folder.*allow_download: true"):
        create_engine(stage_of("someone/model"))
    assert isinstance(create_engine(stage_of("someone/model", allow_download=True)), DiffusersEngine)


@pytest.mark.attack("P34")
def test_a_revision_that_is_a_path_is_never_looked_up() -> None:
    source = PipelineSource(where="stage 0", model="org/painter", revision="../../../../dev/zero")
    with pytest.raises(ConfigError, match=r"stage 0: revision .* is no branch, tag or commit"):
        fetch(source)


def test_a_machine_without_diffusers_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "diffusers" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'omni-discovery\[diffusers\]'"):
        create_engine(stage_of(str(tmp_path)))


def test_arguments_of_the_engine_are_checked_by_name(folder: Path) -> None:
    for wrong in ({"capacity": 0}, {"dtype": "int8"}, {"no_such": 1}, {"height_px": 128}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            create_engine(stage_of(str(folder), **wrong))


@pytest.mark.attack("Z36")
@pytest.mark.parametrize(
    "handed",
    [
        {"prompt_embeds": torch.ones(1, 8).expand(1 << 34, 8)},
        {"prompt_embeds": torch.ones(1, 1).expand(4096, 1 << 30)},
        {"prompt_embeds": torch.ones(4, 8), "prompt_embeds_mask": torch.ones(1).expand(1 << 34)},
        {"prompt_embeds": torch.ones(4, 8), "pooled_prompt_embeds": torch.ones(1).expand(1 << 34)},
    ],
    ids=["rows", "width", "mask", "pooled"],
)
def test_embeddings_without_end_are_refused_before_any_is_looked_at(handed: dict[str, Any]) -> None:
    request = msgspec.structs.replace(ask("r"), payloads={0: handed})
    with pytest.raises(InvalidRequestError, match="more than a prompt can be"):
        read_picture(request, replace(TRAITS, parameters=TRAITS.parameters | {"prompt_embeds"}))


@pytest.mark.attack("Z59")
@pytest.mark.parametrize(
    ("handed", "said"),
    [
        (
            {"prompt_embeds": [[0.5] * 1000] * 1050},
            "prompt_embeds in the hand-off is longer than 1048576 values: hand it over as a tensor",
        ),
        ({"prompt_embeds": [0.5] * 1_048_577}, "is longer than 1048576 values"),
        (
            {"prompt_embeds": [[0.5]], "pooled_prompt_embeds": [0.5] * 1_048_577},
            "pooled_prompt_embeds in the hand-off is longer",
        ),
        ({"prompt_embeds": torch.ones(4, 8).to(torch.float8_e4m3fn)}, "must hold a float"),
        ({"prompt_embeds": torch.ones(4, 8, dtype=torch.complex64)}, "must hold a float"),
        ({"prompt_embeds": torch.full((4, 8), float("nan"))}, "holds what is no number"),
        ({"prompt_embeds": torch.ones(4, 8), "pooled_prompt_embeds": torch.full((8,), float("inf"))}, "are numbers"),
    ],
)
def test_of_embeddings_in_lists_few_are_read(handed: dict[str, Any], said: str) -> None:
    """A list of millions takes seconds to become a tensor, in the engine's thread."""
    request = StageRequest("r1", "r1", payloads={0: handed})
    with pytest.raises(InvalidRequestError, match=said):
        read_picture(request, replace(TRAITS, parameters=TRAITS.parameters | {"prompt_embeds"}))


def test_embeddings_may_come_in_lists() -> None:
    request = StageRequest(
        "r1", "r1", payloads={0: {"prompt_embeds": [[[0.5, 1.0]] * 3], "prompt_embeds_mask": [1] * 3}}
    )
    picture = read_picture(request, replace(TRAITS, parameters=TRAITS.parameters | {"prompt_embeds"}))
    assert isinstance(picture.prompt, Embeds)
    assert picture.prompt.rows.tolist() == [[0.5, 1.0]] * 3


@pytest.mark.attack("Z67")
@pytest.mark.parametrize("where", ["payloads", "companions"])
def test_a_text_that_is_handed_over_is_no_longer_than_a_clients(where: str) -> None:
    """A tokenizer reads all of it, seconds for each megabyte, before it is cut to what the model reads."""
    long = {0: {"text": "a" * 65_537}}
    payloads = long if where == "payloads" else {0: {"text": "a"}}
    companions: Any = {} if where == "payloads" else {"negative": long}
    request = StageRequest("r1", "r1", payloads=payloads, companions=companions)
    traits = replace(TRAITS, parameters=TRAITS.parameters | {"negative_prompt"})
    with pytest.raises(InvalidRequestError, match="a text of 65537 characters; at most 65536 are drawn"):
        read_picture(request, traits)
