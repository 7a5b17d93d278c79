"""What every engine promises, run over all of ours; then what is each one's own."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine, modules_to_preload
from stage_runtime.engines.echo.engine import EchoEngine
from stage_runtime.engines.vllm.forms import checking
from stage_runtime.testing import OPTIONAL, EngineContract, drain
from tests.support.engines import ECHO, PAINTER, THINKER, as_the_supervisor_has_it, run

# As the supervisor has it; threads that spin for each other make tiny models slow.
torch.set_num_threads(1)

PAINT, DIGIT_0, END = 3, 4, 1
#: A structural tag that llguidance refuses by an assertion.
NO_TRIGGER = json.dumps({"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]})


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded engine, and a request that takes it many steps."""

    engine: Engine
    reports: list[tuple[str, float]]
    request: Callable[[str], StageRequest]


def load(stage: StageConfig, request: Callable[[str], StageRequest]) -> Subject:
    engine = create_engine(stage)
    reports: list[tuple[str, float]] = []
    engine.load(lambda phase, progress: reports.append((phase, progress)))
    return Subject(engine, reports, request)


def ask_echo(key: str) -> StageRequest:
    return StageRequest(key, key, inputs={"prompt": "word " * 20})


def ask_thinker(key: str) -> StageRequest:
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    return StageRequest(key, key, inputs={"prompt": "What is 1 + 2?"}, params=params)


def ask_painter(key: str) -> StageRequest:
    token_ids = torch.tensor([30, PAINT, DIGIT_0 + 1, DIGIT_0 + 2, END])
    return StageRequest(key, key, params={"steps": 6}, payloads={0: {"token_ids": token_ids}})


@pytest.fixture(scope="module")
def thinker() -> Iterator[Subject]:
    with as_the_supervisor_has_it():
        subject = load(THINKER, ask_thinker)
        yield subject
        subject.engine.close()


@pytest.fixture(scope="module")
def painter() -> Subject:
    return load(PAINTER, ask_painter)


class TestEchoKeepsTheContract(EngineContract):
    """The echo engine, which offers nearly everything that there is: it leaves it to the document to call it so."""

    offers = frozenset(OPTIONAL) - {"deterministic", "gives_partial_images"}

    def make_engine(self) -> Engine:
        return create_engine(ECHO)

    def good_request(self, key: str) -> StageRequest:
        return ask_echo(key)

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": " "})

    def pieces(self) -> Sequence[Mapping[str, Any]]:
        return [{"token_ids": np.frombuffer(word.encode(), np.uint8)} for word in ("to ", "be ", "or not")]


class _Certain(EchoEngine):
    """It declares what is so."""

    deterministic = True


class TestACertainEngineKeepsTheContract(TestEchoKeepsTheContract):
    """The echo engine, and it says that it is deterministic."""

    offers = frozenset(OPTIONAL) - {"gives_partial_images"}

    def make_engine(self) -> Engine:
        return _Certain(ECHO)


class TestTorchKeepsTheContract(EngineContract):
    """A generator."""

    offers = frozenset({"feed", "pause", "update"})
    name = "speak"
    more: Mapping[str, Any] = {}

    def make_engine(self) -> Engine:
        engine_args = {"target": f"tests.support.callables:{self.name}", "capacity": 4, **self.more}
        return create_engine(StageConfig(stage_id=0, engine="torch", final_output="text", engine_args=engine_args))

    def good_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": "one two three"}, next_stages=(1,))

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": 5})

    def pieces(self) -> Sequence[Mapping[str, Any]]:
        # Several are only for inputs with a field for them.
        return [{"text": "one two"}]


class TestTorchKeepsTheContractWithLivePieces(TestTorchKeepsTheContract):
    """An asynchronous generator."""

    name = "recite"

    def pieces(self) -> Sequence[Mapping[str, Any]]:
        return [{"text": "one two"}, {"text": "three"}]


class TestTorchKeepsTheContractWithAFunction(TestTorchKeepsTheContract):
    """Done in one call each."""

    name = "echo"


class TestTorchKeepsTheContractInBatches(TestTorchKeepsTheContract):
    """Done in one call for four."""

    name, more = "shout", {"batch": True}


class TestPainterKeepsTheContract(EngineContract):
    """Our diffusion transformer."""

    offers = frozenset({"gives_partial_images", "update"})

    def make_engine(self) -> Engine:
        return create_engine(PAINTER)

    def good_request(self, key: str) -> StageRequest:
        return ask_painter(key)

    def bad_request(self, key: str) -> StageRequest:
        return replace(ask_painter(key), params={"steps": 0})


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
class TestThinkerKeepsTheContract(EngineContract):
    """vLLM, the same engine as below: it takes its time to load."""

    offers = frozenset(OPTIONAL) - {"deterministic", "gives_partial_images"}

    @pytest.fixture
    def engine(self, thinker: Subject) -> Engine:
        type(self).reports = thinker.reports
        return thinker.engine

    def good_request(self, key: str) -> StageRequest:
        return ask_thinker(key)

    def bad_request(self, key: str) -> StageRequest:
        return replace(ask_thinker(key), inputs={})

    def pieces(self) -> Sequence[Mapping[str, Any]]:
        return [{"token_ids": torch.tensor([DIGIT_0 + 30, DIGIT_0 + 31])}, {"token_ids": torch.tensor([DIGIT_0 + 32])}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["diffusion", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_each_module_that_is_imported_before_a_fork_is_there(engine: str) -> None:
    """A wrong name would only make every start of a replica slow, with a line in the log."""
    modules = modules_to_preload(engine)
    assert modules
    for name in modules:
        assert importlib.import_module(name).__name__ == name


@pytest.mark.parametrize("engine_args", [{"no_such_argument": 1}])
@pytest.mark.parametrize("stage", [ECHO, PAINTER], ids=["echo", "diffusion"])
def test_an_argument_that_it_does_not_know_is_refused_by_name(stage: StageConfig, engine_args: dict[str, Any]) -> None:
    import msgspec

    with pytest.raises(ConfigError, match="no_such_argument"):
        create_engine(msgspec.structs.replace(stage, engine_args=engine_args))


def test_a_picture_depends_on_its_seed_and_digits_and_not_on_its_company(painter: Subject) -> None:
    """1. drawn alone; 2. among others; 3. as a second attempt: the same bytes. Another id or seed: another picture."""
    alone = run(painter.engine, ask_painter("r"))["r"][-1].image_png
    among = run(painter.engine, *(ask_painter(name) for name in ("x", "r", "y")))
    assert among["r"][-1].image_png == alone != among["x"][-1].image_png
    again = replace(ask_painter("r"), key="other", attempt=1)
    assert run(painter.engine, again)["other"][-1].image_png == alone
    seeded = [replace(ask_painter(name), params={"steps": 6, "seed": 5}) for name in ("a", "b")]
    pictures = [said[-1].image_png for said in run(painter.engine, *seeded).values()]
    assert pictures[0] == pictures[1] != alone


def avoiding(key: str, *digits: int, guidance: float = 4.0) -> StageRequest:
    """``ask_painter`` with a companion whose answer is these digits."""
    token_ids = torch.tensor([30, PAINT, *(DIGIT_0 + digit for digit in digits), END])
    params = {"steps": 6, "seed": 5, "guidance_scale": guidance}
    return replace(ask_painter(key), params=params, companions={"negative": {0: {"token_ids": token_ids}}})


def test_guidance_leads_away_from_the_digits_of_a_negative_companion(painter: Subject) -> None:
    """1. another picture, in company too; 2. without guidance the same one; 3. none named, or the same: as without."""
    plain = replace(avoiding("plain", 7), companions={})
    said = run(painter.engine, plain, avoiding("7", 7), avoiding("77", 7, 7), avoiding("same", 1, 2))
    picture = {key: outputs[-1].image_png for key, outputs in said.items()}
    assert len({picture["plain"], picture["7"], picture["77"]}) == 3
    assert picture["same"] == picture["plain"]
    assert run(painter.engine, avoiding("alone", 7))["alone"][-1].image_png == picture["7"]
    without = [avoiding("off", 7, guidance=1.0), replace(avoiding("never", guidance=1.0), companions={})]
    off, never = (run(painter.engine, request)[request.key][-1].image_png for request in without)
    assert off == never


def test_a_companion_that_draws_nothing_leads_away_from_nothing(painter: Subject) -> None:
    wordy = {"negative": {0: {"token_ids": torch.tensor([30, 31, END])}}}
    plain = replace(avoiding("plain", 7), companions={})
    said = run(painter.engine, plain, replace(plain, key="w", companions=wordy))
    assert said["w"][-1].image_png == said["plain"][-1].image_png is not None


@pytest.mark.parametrize("companions", [{"style": {0: {"token_ids": [1]}}}, {"negative": {0: {"text": "no ids"}}}])
def test_a_companion_that_the_painter_can_not_use_is_named(painter: Subject, companions: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(companions))):
        painter.engine.add(replace(ask_painter("r"), companions=companions))


def test_a_picture_is_a_picture(painter: Subject) -> None:
    (output,) = run(painter.engine, ask_painter("r"))["r"]
    assert output.image_png is not None
    picture = Image.open(io.BytesIO(output.image_png))
    picture.load()
    assert (picture.format, picture.height) == ("PNG", 128)


def test_nothing_to_draw_ends_without_a_picture(painter: Subject) -> None:
    request = replace(ask_painter("r"), payloads={0: {"token_ids": torch.tensor([30, 31, END])}})
    (output,) = run(painter.engine, request)["r"]
    assert (output.image_png, output.finish_reason) == (None, "stop")


def test_what_can_not_be_drawn_fails_alone_and_is_not_called_the_clients_mistake(painter: Subject) -> None:
    bad = replace(ask_painter("bad"), payloads={0: {"token_ids": torch.tensor([PAINT, END])}})
    said = run(painter.engine, bad, ask_painter("good"))
    assert said["bad"][-1].error is not None
    assert said["bad"][-1].error[0] is FailureKind.ENGINE
    assert said["good"][-1].image_png is not None


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"seed": -1}, "seed"),
        ({"guidance_scale": "x"}, "guidance_scale"),
        ({"sepia": 1}, "sepia"),
    ],
)
def test_a_parameter_of_a_picture_that_is_wrong_is_named(painter: Subject, params: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        painter.engine.add(replace(ask_painter("r"), params=params))


def test_a_painter_with_nothing_handed_over_refuses(painter: Subject) -> None:
    for payloads in ({}, {0: {"other": 1}}, {0: {"token_ids": "text"}}):
        with pytest.raises(InvalidRequestError):
            painter.engine.add(replace(ask_painter("r"), payloads=payloads))


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
class TestThinker:
    """vLLM, with the demo's thinker."""

    def test_the_scheduler_tells_its_requests_and_its_cache(self, thinker: Subject) -> None:
        """Before, between two steps, and when all is done. No cache of prefixes is counted as in use."""
        engine: Any = thinker.engine
        idle = {"requests_running": 0, "requests_waiting": 0, "kv_cache_usage": 0}
        assert engine.metrics() == idle
        engine.add(thinker.request("a"))
        engine.step()
        busy = engine.metrics()
        assert (busy["requests_running"], busy["requests_waiting"]) == (1, 0)
        assert 0 < busy["kv_cache_usage"] <= 1
        drain(engine)
        assert engine.metrics() == idle

    def test_an_answer_streams_token_by_token(self, thinker: Subject) -> None:
        said = run(thinker.engine, ask_thinker("k"))["k"]
        assert sum(len(output.token_ids) for output in said) == 20
        assert len(said) == 20
        assert said[-1].finish_reason == "length"
        assert said[-1].usage["completion_tokens"] == 20
        assert said[-1].usage["prompt_tokens"] > 0

    def test_messages_prompt_and_token_ids_say_the_same(self, thinker: Subject) -> None:
        """The demo's template puts the last user message before <|answer|>."""
        text = "2 + 2"
        asked = [
            {"messages": [{"role": "user", "content": text}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
            {"prompt": f"{text}<|answer|>"},
        ]
        requests = [replace(ask_thinker(f"k{number}"), inputs=inputs) for number, inputs in enumerate(asked)]
        said = run(thinker.engine, *requests)
        texts = ["".join(output.text for output in outputs) for outputs in said.values()]
        assert len(set(texts)) == 1

    @pytest.mark.parametrize(
        "inputs",
        [
            {},
            {"prompt": ""},
            {"prompt": 5},
            {"prompt_token_ids": []},
            {"prompt_token_ids": [1, "2"]},
            {"prompt_token_ids": [10**6]},
            {"prompt_token_ids": [640]},
            {"prompt_token_ids": [-1]},
            {"prompt_token_ids": [True]},
            {"messages": []},
            {"messages": [{"content": "x"}]},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            {"messages": [{"role": "user", "content": "x"}], "prompt": "x"},
        ],
        ids=str,
    )
    def test_a_prompt_that_is_none_is_refused_and_the_engine_lives(self, thinker: Subject, inputs: Any) -> None:
        with pytest.raises(InvalidRequestError):
            thinker.engine.add(replace(ask_thinker("bad"), inputs=inputs))
        assert run(thinker.engine, ask_thinker("k"))["k"][-1].finished

    def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(self, thinker: Subject) -> None:
        with pytest.raises(InvalidRequestError, match=r"128 tokens.*128 tokens"):
            thinker.engine.add(replace(ask_thinker("k"), inputs={"prompt_token_ids": [30] * 128}))
        (output,) = run(thinker.engine, replace(ask_thinker("k"), inputs={"prompt_token_ids": [30] * 127}))["k"]
        assert output.finish_reason == "length"

    @pytest.mark.attack("U3")
    def test_nothing_is_compiled_for_the_first_log_probabilities(self, thinker: Subject) -> None:
        """Compiling takes a step of all requests, for seconds to a minute; a chosen token is the likeliest here."""
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        asked = ask_thinker("k")
        said = run(thinker.engine, replace(asked, params={**asked.params, "logprobs": 2}))["k"]
        places = [place for output in said for place in output.logprobs]
        assert [place[0].rank for place in places] == [1] * 20
        assert not torch._dynamo.utils.counters["stats"]

    @pytest.mark.attack("G1")
    @pytest.mark.parametrize("many", ["1 plus 2 ", "a", "1", " "])
    def test_of_a_prompt_of_megabytes_no_more_is_encoded_than_a_context_holds(
        self, thinker: Subject, many: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = thinker.engine._model  # type: ignore[attr-defined]
        encode, sizes = model.tokenizer.encode, []

        def noted(text: str, **options: Any) -> Any:
            sizes.append(len(text))
            return encode(text, **options)

        monkeypatch.setattr(model.tokenizer, "encode", noted)
        text = many * (2_900_000 // len(many))
        for inputs in ({"prompt": text}, {"messages": [{"role": "user", "content": text}]}):
            (output,) = run(thinker.engine, replace(ask_thinker("long"), inputs=inputs))["long"]
            assert output.error is not None
            kind, reason, *status = output.error
            assert (kind, status) == (FailureKind.INVALID, [400])
            assert reason.startswith("this model's maximum context length is 128 tokens")
            assert reason.endswith("Make it shorter")
        assert sum(sizes) < 32_000
        assert run(thinker.engine, ask_thinker("k"))["k"][-1].finished

    @pytest.mark.attack("G1")
    def test_others_are_answered_while_a_long_prompt_is_read(
        self, thinker: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1. two long prompts; the tokenizer does not come to an end with the first
        2. another request is answered; the second one is aborted; 3. the first is read, and answered
        """
        engine, go_on = thinker.engine, threading.Event()

        class Slow:
            def encode(self, text: str, **options: Any) -> list[int]:
                if len(text) > 1000:
                    assert go_on.wait(60)
                return [30, 31] if options["add_special_tokens"] else []

        bounded = engine._model.bounded  # type: ignore[attr-defined]
        monkeypatch.setattr(bounded, "_tokenizer", Slow())
        # As if so long a text could fit.
        monkeypatch.setattr(bounded, "_token_characters", 10_000)
        engine.add(replace(ask_thinker("long"), inputs={"prompt": "a" * 70_000}))
        engine.add(replace(ask_thinker("second"), inputs={"prompt": "b" * 70_000}))
        with pytest.raises(InvalidRequestError, match="running already"):
            engine.add(ask_thinker("long"))
        engine.add(replace(ask_thinker("k"), inputs={"prompt_token_ids": [30, 31]}))
        said: list[EngineOutput] = []
        while not said or not said[-1].finished:
            said += engine.step()
        assert {output.key for output in said} == {"k"}
        engine.abort("second")
        assert [(output.key, output.finish_reason) for output in engine.step()] == [("second", "abort")]
        assert engine.has_unfinished()
        go_on.set()
        outputs = [output for output in drain(engine) if output.key == "long"]
        assert outputs[-1].finish_reason == "length"
        assert [output.token_ids for output in outputs] == [output.token_ids for output in said]

    @pytest.mark.parametrize(
        ("params", "named"),
        [
            ({"temprature": 1}, "temprature"),
            ({"temperature": "hot"}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"top_k": 1.5}, "top_k"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"seed": 1 << 70}, "seed"),
            ({"stop": [""]}, "stop"),
            ({"stop": ["x"] * 99}, "stop"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"999999": 1}}, "999999"),
            ({"stop_token_ids": [999999]}, "999999"),
            ({"allowed_token_ids": [1, 640]}, "640"),
            ({"n": 2}, "n:"),
            ({"presence_penalty": 3}, "presence_penalty"),
            ({"min_tokens": 20, "max_tokens": 3}, "min_tokens"),
        ],
        ids=str,
    )
    def test_a_parameter_that_is_wrong_is_named_and_the_engine_lives(
        self, thinker: Subject, params: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match=named):
            thinker.engine.add(replace(ask_thinker("bad"), params=params))
        assert run(thinker.engine, ask_thinker("k"))["k"][-1].finished

    def test_all_parameters_at_once_are_taken(self, thinker: Subject) -> None:
        params = {
            "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 1, "stop": ["zz"], "bad_words": ["no"],
            "stop_token_ids": [5], "max_completion_tokens": 4, "min_tokens": 1, "presence_penalty": 0.1, "n": 1,
            "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"30": -1}, "ignore_eos": False,
            "user": None,
        }  # fmt: skip
        outputs = [run(thinker.engine, replace(ask_thinker("k"), params=params))["k"] for _ in range(2)]
        ids = [[token_id for output in said for token_id in output.token_ids] for said in outputs]
        assert 1 <= len(ids[0]) <= 4
        assert ids[0] == ids[1]

    def test_a_stop_text_ends_the_answer_before_it(self, thinker: Subject) -> None:
        whole = "".join(output.text for output in run(thinker.engine, ask_thinker("k"))["k"])
        stop = whole[2:4]
        said = run(thinker.engine, replace(ask_thinker("k"), params={**ask_thinker("k").params, "stop": stop}))["k"]
        assert "".join(output.text for output in said) == whole[: whole.index(stop)]
        assert said[-1].finish_reason == "stop"

    def test_an_output_that_can_t_be_read_ends_its_own_request_only(
        self, thinker: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1. two requests run; what comes out for one of them can't be read
        2. that one is failed with the reason, once, and its work is stopped; the other ends as ever
        3. the engine takes the next request, under the same key too
        """
        engine: Any = thinker.engine
        whole = [output.text for output in run(engine, ask_thinker("well"))["well"]]
        read = engine._output_of

        def read_or_break(made: Any) -> Any:
            if made.request_id == "ill":
                raise KeyError("remote_request_id")
            return read(made)

        monkeypatch.setattr(engine, "_output_of", read_or_break)
        said = run(engine, ask_thinker("ill"), ask_thinker("well"))
        assert [output.error for output in said["ill"]] == [(FailureKind.ENGINE, "KeyError: 'remote_request_id'")]
        assert [output.text for output in said["well"]] == whole
        monkeypatch.undo()
        assert run(engine, ask_thinker("ill"))["ill"][-1].finish_reason == "length"

    @pytest.mark.attack("D5")
    @pytest.mark.parametrize("schema", [{"$ref": "#"}, {"type": "object", "minProperties": 10**4}])
    def test_a_form_that_no_answer_can_have_is_its_clients_mistake(self, thinker: Subject, schema: Any) -> None:
        """It is refused as it is added, or the answer runs to its length: no failure that counts for the replica."""
        asked = replace(ask_thinker("k"), params={**ask_thinker("k").params, "structured_outputs": {"json": schema}})
        try:
            end = run(thinker.engine, asked)["k"][-1]
        except InvalidRequestError:
            return
        refused = end.error is not None and (end.error[0], end.error[2:]) == (FailureKind.INVALID, (422,))
        assert refused or end.finish_reason == "length"

    @pytest.mark.attack("Z87")
    def test_a_grammar_is_refused_unless_the_stage_allows_any(
        self, thinker: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine: Any = thinker.engine
        form = {"grammar": 'start: "yes" | "no"'}
        asked = replace(ask_thinker("k"), params={"max_tokens": 4, "structured_outputs": form})
        with pytest.raises(InvalidRequestError, match=r"structured_outputs.grammar: .*allow_grammars: true"):
            engine.add(asked)
        monkeypatch.setattr(engine, "_allows_grammars", True)
        assert "".join(output.text for output in run(engine, asked)["k"]) in {"yes", "no"}

    @pytest.mark.parametrize(
        "form",
        [
            pytest.param({"json": {"type": "object", "x-guidance": {"item_separator": "("}}}, id="panic",
                         marks=pytest.mark.attack("L1")),
            pytest.param({"structural_tag": NO_TRIGGER}, id="assertion", marks=pytest.mark.attack("L6")),
        ],
    )  # fmt: skip
    def test_a_form_on_which_the_compiler_fails_is_its_clients_mistake(
        self, thinker: Subject, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
    ) -> None:
        """1. our own check refuses it; 2. without that vLLM's raises what is no error of its own: a 400, too
        3. the engine goes on
        """
        asked = replace(ask_thinker("k"), params={"structured_outputs": form})
        for said in ("x-guidance: not served|triggers: one is empty", "the engine can't read this form"):
            (end,) = run(thinker.engine, asked)["k"]
            assert end.error is not None
            assert end.error[0] == FailureKind.INVALID
            assert re.search(said, end.error[1])
            monkeypatch.setattr(checking, "check_answer_form", lambda *_: None)
        monkeypatch.undo()
        params = {"structured_outputs": {"choice": ["yes", "no"]}}
        said_then = run(thinker.engine, replace(asked, params=params))["k"]
        assert "".join(output.text for output in said_then) in {"yes", "no"}

    @pytest.mark.attack("W1")
    def test_one_clients_dear_forms_hold_up_neither_the_engine_nor_the_forms_of_others(
        self, thinker: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """1. one client asks for several forms, and the check of each takes very long
        2. others are answered meanwhile, with a small form and without any
        3. the engine's own thread has checked none, and the first client is answered in the end
        """
        from vllm.v1.structured_output import backend_guidance

        engine, check = thinker.engine, backend_guidance.validate_guidance_grammar
        may_end, checked_in, said = threading.Event(), set[int](), dict[str, list[EngineOutput]]()

        def check_slowly(params: Any, *given: Any, **more: Any) -> None:
            checked_in.add(threading.get_ident())
            if params.structured_outputs.choice == ["dear"]:
                may_end.wait(20)
            check(params, *given, **more)

        monkeypatch.setattr(backend_guidance, "validate_guidance_grammar", check_slowly)
        dear = {"max_tokens": 4, "structured_outputs": {"choice": ["dear"]}}
        for number in range(8):
            engine.add(replace(ask_thinker(f"dear {number}"), params=dear, client="many"))
        small = {"max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}
        engine.add(replace(ask_thinker("small"), params=small, client="few"))
        engine.add(ask_thinker("none"))
        began_s = time.monotonic()
        while not all(each in said and said[each][-1].finished for each in ("small", "none")):
            for output in engine.step():
                said.setdefault(output.key, []).append(output)
        assert time.monotonic() - began_s < 20
        assert set(said) == {"small", "none"}
        may_end.set()
        assert "".join(output.text for output in said["small"]) in {"yes", "no"}
        assert said["none"][-1].finish_reason == "length"
        ended = {output.key: output for output in drain(engine) if output.finished}
        assert {key for key in ended if key.startswith("dear")} == {f"dear {number}" for number in range(8)}
        assert all(output.error is None for output in ended.values())
        assert checked_in
        assert threading.get_ident() not in checked_in

    @pytest.mark.attack("E6")
    def test_forms_are_compiled_with_the_cpu_that_the_engine_leaves(self, thinker: Subject) -> None:
        """The thread that vLLM compiles them in has a lower priority than the engine's own, and compiles them."""
        engine: Any = thinker.engine
        manager = engine._llm.engine_core.engine_core.structured_output_manager
        compiled_at: list[int] = []

        def compile_noted(request: Any, create: Any = manager._create_grammar) -> Any:
            compiled_at.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return create(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager, "_create_grammar", compile_noted)
            params = {"max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
            said = run(engine, replace(ask_thinker("k"), params=params))["k"]
        assert "".join(output.text for output in said) in {"yes", "no"}
        assert compiled_at == [min(19, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + 10)]

    @pytest.mark.attack("E6")
    @pytest.mark.parametrize("regex", [".?" * 64, "(|.)" * 30, "(.|..)" * 30, "([^a]{0,8}[^b])" * 64], ids=range(4))
    def test_a_small_form_with_very_many_ways_holds_nobody_up(self, thinker: Subject, regex: str) -> None:
        """It is answered, or given up; another request goes on beside it. One step of xgrammar's took minutes."""
        hostile = {"max_tokens": 32, "ignore_eos": True, "structured_outputs": {"regex": regex}}
        asked = [
            replace(ask_thinker("hostile"), params=hostile),
            replace(ask_thinker("other"), params={"max_tokens": 16}),
        ]
        began_s = time.monotonic()
        said = run(thinker.engine, *asked)
        assert time.monotonic() - began_s < 60
        assert said["other"][-1].finish_reason in {"stop", "length"}
        end = said["hostile"][-1]
        assert end.finish_reason is not None or (end.error is not None and end.error[0] == FailureKind.INVALID)

    def test_a_request_without_any_sampling_parameters_is_answered(self, thinker: Subject) -> None:
        said = run(thinker.engine, replace(ask_thinker("bare"), params={}))["bare"]
        assert said[-1].finish_reason in {"stop", "length"}

    def test_the_same_key_twice_is_refused(self, thinker: Subject) -> None:
        thinker.engine.add(ask_thinker("k"))
        with pytest.raises(InvalidRequestError, match="running already"):
            thinker.engine.add(ask_thinker("k"))
        thinker.engine.abort("k")
        assert [output.finish_reason for output in thinker.engine.step()] == ["abort"]

    def test_only_an_answer_that_holds_the_token_is_handed_over_and_then_whole(self, thinker: Subject) -> None:
        """1. made to say <|paint|>: all ids are handed over, the special ones too
        2. kept from saying it: nothing; 3. with nobody next: nothing
        """
        forced = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.0, "logit_bias": {str(PAINT): 100}}
        kept = {**forced, "logit_bias": {str(PAINT): -100}}
        paints = replace(ask_thinker("paints"), params=forced, next_stages=(1,))
        speaks = replace(ask_thinker("speaks"), params=kept, next_stages=(1,))
        alone = replace(ask_thinker("alone"), params=forced)
        said = run(thinker.engine, paints, speaks, alone)
        handoff = said["paints"][-1].handoff
        assert handoff is not None
        assert handoff["token_ids"].tolist() == [PAINT] * 3
        assert handoff["token_ids"].dtype == torch.int64
        assert "".join(output.text for output in said["paints"]) == ""
        assert said["speaks"][-1].handoff is None
        assert said["alone"][-1].handoff is None

    def test_arguments_that_vllm_does_not_know_are_refused_with_the_nearest(self) -> None:
        import msgspec

        engine = create_engine(msgspec.structs.replace(THINKER, engine_args={"max_model_length": 5}))
        with pytest.raises(ConfigError, match=r"engine_args\.max_model_length \(did you mean 'max_model_len'\?\)"):
            engine.load(lambda phase, progress: None)

    def test_values_that_vllm_refuses_are_the_operators(self) -> None:
        import msgspec

        engine = create_engine(msgspec.structs.replace(THINKER, engine_args={"max_model_len": 10**6}))
        with pytest.raises(ConfigError, match="stage 0"):
            engine.load(lambda phase, progress: None)

    def test_a_failing_step_is_not_hidden(self, thinker: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
        """The engine's thread must see it: it fails everybody and ends the process."""

        def fail() -> None:
            raise RuntimeError("device lost")

        thinker.engine.add(ask_thinker("k"))
        with monkeypatch.context() as patch:
            patch.setattr(thinker.engine._llm, "step", fail)  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="device lost"):
                thinker.engine.step()
        thinker.engine.abort("k")
        thinker.engine.step()
