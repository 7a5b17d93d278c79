"""An answer that one replica begins and another continues is the answer that one alone would have given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from hub.request.outputs import chunk_outputs
from omni_discovery import wire
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import Resume, TokenLogprobs
from omni_discovery.wire.session import Peer
from stage_runtime.config import NotResumableError
from stage_runtime.engine_loop.check_output import pieces_of
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from stage_runtime.engines.capabilities import capabilities_of
from stage_runtime.engines.echo import speech
from stage_runtime.engines.prompts import read_prompt
from stage_runtime.engines.sampling import token_sampling
from stage_runtime.engines.vllm import resume as vllm_resume
from stage_runtime.engines.vllm.engine import VllmEngine
from stage_runtime.engines.vllm.sampling_params import sampling_params
from stage_runtime.server.ledger import Ticket
from stage_runtime.server.sessions import head_of
from stage_runtime.testing import check_every_cut, drain, resume_of
from tests.support.engines import ECHO, PAINTER, THINKER, as_the_supervisor_has_it, run

torch.set_num_threads(1)

#: Bytes in the demo's vocabulary that make characters of two, three and four bytes, or none.
C3, A9, E2, F0 = 141, 116, 172, 186
DIGIT = 30
END = 1
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}


def load(name: str) -> Engine:
    stage = {"echo": ECHO, "vllm": THINKER, "diffusion": PAINTER}[name]
    engine = create_engine(stage)
    engine.load(lambda phase, progress: None)
    return engine


@pytest.fixture(scope="module")
def thinker() -> Iterator[Engine]:
    with as_the_supervisor_has_it():
        engine = load("vllm")
        yield engine
        engine.close()


THINKS = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(params=["echo", pytest.param("vllm", marks=THINKS)])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "echo":
        return load("echo")
    found: Engine = request.getfixturevalue("thinker")
    return found


def places_of(outputs: list[EngineOutput]) -> list[TokenLogprobs]:
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
    return [place for output in outputs for place in output.logprobs]


def check_same_places(found: list[TokenLogprobs], due: list[TokenLogprobs]) -> None:
    """But for how a sum is rounded: a token is read with others now, and was alone before."""
    assert len(found) == len(due)
    for one, other in zip(found, due, strict=True):
        assert [(each.token_id, each.rank, each.text) for each in one] == [
            (each.token_id, each.rank, each.text) for each in other
        ]
        assert [each.logprob for each in one] == pytest.approx([each.logprob for each in other], abs=1e-3)


def vllms_outputs(engine: Engine, request: StageRequest) -> list[Any]:
    """What vLLM's own front makes of the same request."""
    assert isinstance(engine, VllmEngine)
    llm, params = engine._llm, sampling_params(token_sampling(request.params))
    token_ids = read_prompt(llm.get_tokenizer(), request.inputs)
    llm.add_request("reference", {"prompt_token_ids": token_ids}, params)
    made: list[Any] = []
    while llm.has_unfinished_requests():
        made += llm.step()
    return made


def vllms_own(engine: Engine, request: StageRequest, width: int) -> list[Any]:
    """What vLLM's own front says of the prompt's tokens."""
    first, *later = vllms_outputs(engine, request)
    assert not any(made.prompt_logprobs for made in later)
    assert all(width <= len(place) <= width + 1 for place in first.prompt_logprobs[1:])
    return list(first.prompt_logprobs)


def as_the_client_gets_it(outputs: list[EngineOutput]) -> Any:
    """What vLLM's server is given of the prompt, by way of frames and hub."""
    from hub.api.vllm.params import PromptLogprobs

    pieces = [piece for output in outputs for piece in pieces_of(output, "text")]
    told, prompt_tokens = PromptLogprobs(), 1 + sum(len(piece.prompt_logprobs) for piece in pieces)
    for number, piece in enumerate(pieces):
        ticket = Ticket("k", Peer("hub", "hub"), "r", 0, 1, next_seq=number)
        (chunk,), _ = wire.decode_from_replica([head_of(ticket, piece, 0)])
        assert isinstance(chunk, wire.Chunk)
        assert chunk.prompt_logprobs is UNSET or len(chunk.prompt_logprobs) <= 5
        (shown,) = chunk_outputs("r", 0, "0/1", chunk, [], 0.0)
        assert told.add(shown, prompt_tokens) is bool(piece.token_ids)
    return told.shown(sampling_params({}).output_kind)


def ask(prompt: str, **params: Any) -> StageRequest:
    return StageRequest("whole", "r", inputs={"prompt": prompt}, params={**GREEDY, **params}, next_stages=(1,))


@pytest.mark.parametrize(
    "prompt",
    [
        "7 + 5",
        "What is 1 + 2?",
        "what is the result of 41 + 37",
        "please draw me a picture of 98 - 23",
        "show me the answer to 99999 + 1",
        "tell me a story about a horse and nine hundred and ninety-nine mice",
        "größe 12, ein Bär, 水 und 🐟",
    ],
)
def test_at_every_cut_the_continued_answer_is_the_whole_one(engine: Engine, prompt: str) -> None:
    assert check_every_cut(engine, ask(f"{prompt}<|answer|>")) >= 2


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_bound_of_the_answer_holds_for_both_parts_together(engine: Engine, max_tokens: int) -> None:
    """Also where it is reached with the last piece that was shown: then the end is all that is left to say."""
    assert check_every_cut(engine, ask("What is 12345 + 67?<|answer|>", max_tokens=max_tokens)) == max_tokens


def test_what_was_shown_counts_for_a_second_continuation_too(engine: Engine) -> None:
    """1. the answer begins here; 2. it goes on there, and that replica dies, too; 3. it goes on from both parts."""
    request = ask("show me the answer to 47 + 18<|answer|>")
    whole = run(engine, request)["whole"]
    second = run(engine, replace(request, key="2", resume=resume_of(whole[:1])))["2"]
    shown = [*whole[:1], *second[:1]]
    third = run(engine, replace(request, key="3", resume=resume_of(shown)))["3"]
    assert resume_of([*shown, *third]) == resume_of(whole)
    assert third[-1].usage == whole[-1].usage


def test_a_continuation_can_be_aborted_and_counts_what_was_shown(engine: Engine) -> None:
    request = ask("show me the answer to 47 + 18<|answer|>")
    shown = resume_of(run(engine, request)["whole"][:2])
    engine.add(replace(request, key="gone", resume=shown))
    engine.abort("gone")
    (output,) = [output for output in engine.step() if output.key == "gone"]
    assert output.finish_reason == "abort"
    assert output.usage["completion_tokens"] == len(shown.token_ids)


def test_what_another_model_said_is_not_continued(engine: Engine) -> None:
    request = ask("What is 1 + 2?<|answer|>")
    for resume in (Resume(token_ids=(30, 31), text="never said"), Resume(text="no tokens")):
        with pytest.raises(NotResumableError, match="other"):
            engine.add(replace(request, resume=resume))
    assert run(engine, request)["whole"][-1].finished


def test_a_picture_is_not_continued_and_says_so_by_declaring_nothing() -> None:
    """It is drawn again instead, and tests elsewhere show that it comes out the same."""
    assert not capabilities_of(load("diffusion")).can_resume()
    drawing = create_engine(msgspec.structs.replace(ECHO, engine_args={"modality": "image"}))
    with pytest.raises(NotResumableError, match="a picture"):
        drawing.add(replace(ask("draw"), resume=Resume(token_ids=(1,), text="draw")))


def test_a_picture_that_another_replica_draws_again_is_the_same() -> None:
    """The hub gives every attempt the same request id, which is the seed where none was given."""
    token_ids = torch.tensor([DIGIT, 3, 5, 6, 1])
    first = StageRequest("hub/r/0", "r", params={"steps": 4}, payloads={0: {"token_ids": token_ids}})
    pictures = [
        run(load("diffusion"), request)[request.key][-1].image_png
        for request in (first, replace(first, key="hub/r/1", attempt=1), replace(first, request_id="other"))
    ]
    assert pictures[0] == pictures[1] != pictures[2]


def test_each_obstacle_is_declared_with_its_reason() -> None:
    for table in (speech.NOT_RESUMABLE, vllm_resume.NOT_RESUMABLE):
        assert all(name and reason for name, reason in table.items())


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
class TestThinker:
    """vLLM's own cases, with the demo's thinker."""

    @pytest.mark.parametrize(
        "params",
        [
            {"ignore_eos": True, "max_tokens": 20},
            {"min_tokens": 12, "max_tokens": 20},
            {"repetition_penalty": 1.3, "ignore_eos": True, "max_tokens": 24},
            {"logit_bias": {"3": 100}, "max_tokens": 5, "ignore_eos": True},
            {"stop_token_ids": [32], "max_tokens": 20},
            {"skip_special_tokens": False},
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            {"bad_words": ["is", "answer"], "max_tokens": 12},
            {"seed": 5},
            {"stop": []},
        ],
        ids=str,
    )
    def test_parameters_that_look_at_single_tokens_are_continued_exactly(
        self, thinker: Engine, params: dict[str, Any]
    ) -> None:
        check_every_cut(thinker, ask("show me the answer to 25 + 50<|answer|>", **params))

    @pytest.mark.parametrize("penalty", [1.05, 3.0])
    @pytest.mark.parametrize("slope", [0.0, 2.0])
    @pytest.mark.parametrize("letters", [(C3, A9), (E2, A9), (F0, A9, C3), (C3, A9, DIGIT)], ids=str)
    def test_characters_that_take_several_tokens_are_cut_anywhere(
        self, thinker: Engine, letters: tuple[int, ...], slope: float, penalty: float
    ) -> None:
        """The model is made to speak in bytes: whole characters, halves of them, and what is none."""
        bias = {str(token_id): 100.0 - slope * place for place, token_id in enumerate(letters)}
        params = {"logit_bias": bias, "ignore_eos": True, "max_tokens": 16, "repetition_penalty": penalty}
        request = ask("What is 1 + 2?<|answer|>", **params)
        assert any(not output.text for output in run(thinker, request)["whole"])
        assert check_every_cut(thinker, request) == 16

    @pytest.mark.parametrize("letters", [(C3, A9), (F0, A9, C3)], ids=str)
    def test_what_was_likely_is_told_behind_a_cut_or_a_pause_as_without(
        self, thinker: Engine, letters: tuple[int, ...]
    ) -> None:
        """1. an answer in bytes is said whole; 2. it goes on elsewhere behind each token; 3. it is paused in between"""
        bias = {str(token_id): 100.0 - place for place, token_id in enumerate(letters)}
        params = {"logit_bias": bias, "ignore_eos": True, "max_tokens": 10, "repetition_penalty": 1.05, "logprobs": 3}
        request = ask("What is 1 + 2?<|answer|>", **params)
        whole = run(thinker, request)["whole"]
        due = places_of(whole)
        assert [place[0].token_id for place in due] == list(resume_of(whole).token_ids)
        assert {len(place) for place in due} <= {3, 4}
        for cut in range(1, 10):
            rest = run(thinker, replace(request, key="rest", resume=resume_of(whole[:cut])))["rest"]
            check_same_places(places_of(rest), due[cut:])
        assert isinstance(thinker, VllmEngine)
        thinker.add(request)
        said = [*thinker.step(), *thinker.step()]
        assert thinker.pause("whole", True)
        assert not thinker.has_unfinished()
        assert not thinker.pause("whole", False)
        check_same_places(places_of([*said, *drain(thinker)]), due)

    @pytest.mark.parametrize("width", [0, 3])
    def test_what_a_prompt_was_like_is_told_once_as_vllm_tells_it(
        self, thinker: Engine, monkeypatch: pytest.MonkeyPatch, width: int
    ) -> None:
        """1. the prompt is in the prefix cache, and yet vLLM's own front has something for each of its tokens
        2. a client behind a hub gets the same, in parts, before the answer; a pause before that loses nothing
        3. behind the first token, a pause or another replica brings none of it again, and reads the cache
        """
        monkeypatch.setattr("stage_runtime.engine_loop.check_output.PROMPT_PLACES", 5)
        params = {"ignore_eos": True, "max_tokens": 4}
        request = ask("größe 12, ein Bär, 水 und 🐟<|answer|>", **params, prompt_logprobs=width)
        run(thinker, ask("größe 12, ein Bär, 水 und 🐟<|answer|>", **params))
        due, whole = vllms_own(thinker, request, width), run(thinker, request)["whole"]
        assert [bool(output.prompt_logprobs) for output in whole] == [True, False, False, False]
        assert as_the_client_gets_it(whole) == due
        assert len(due) > 20
        for cut in range(1, 5):
            rest = run(thinker, replace(request, key="rest", resume=resume_of(whole[:cut])))["rest"]
            assert not any(output.prompt_logprobs for output in rest)
        assert isinstance(thinker, VllmEngine)
        thinker.add(request)
        thinker.pause("whole", True)
        thinker.pause("whole", False)
        said = thinker.step()
        thinker.pause("whole", True)
        thinker.pause("whole", False)
        said += drain(thinker)
        assert as_the_client_gets_it(said) == due
        assert resume_of(said) == resume_of(whole)

    @pytest.mark.parametrize(
        ("params", "reason"),
        [
            ({}, None),
            ({"stop_token_ids": [DIGIT + 2]}, DIGIT + 2),
            ({"stop": ["3"]}, "3"),
            ({"max_tokens": 2}, None),
            ({"stop_token_ids": [END]}, None),
            ({"stop_token_ids": [END], "ignore_eos": True}, END),
        ],
    )
    def test_what_stopped_an_answer_is_told_as_vllm_tells_it(
        self, thinker: Engine, params: dict[str, Any], reason: int | str | None
    ) -> None:
        """Also by a replica that has nothing left to say but that."""
        request = ask("What is 1 + 2?<|answer|>", **params)
        whole = run(thinker, request)["whole"]
        due = [made.outputs[0].stop_reason for made in vllms_outputs(thinker, request)]
        assert [output.stop_reason for output in whole] == due
        assert due[-1] == reason
        if "stop" not in params:
            rest = run(thinker, replace(request, key="rest", resume=resume_of(whole)))["rest"]
            assert [output.stop_reason for output in rest] == due[-1:]

    def test_an_answer_that_fills_the_context_ends_where_it_would_have(self, thinker: Engine) -> None:
        prompt = {"prompt_token_ids": [30 + number % 10 for number in range(118)]}
        request = replace(ask("", ignore_eos=True, max_tokens=None), inputs=prompt)
        assert check_every_cut(thinker, request) == 10

    @pytest.mark.parametrize(
        ("params", "named"),
        [
            ({"stop": ["zz"]}, "stop"),
            ({"presence_penalty": 0.5}, "presence_penalty"),
            ({"frequency_penalty": -0.5}, "frequency_penalty"),
            ({"bad_words": ["12"]}, "bad_words"),
            ({"temperature": 0.7, "seed": 0}, "seed"),
            ({"extra_args": {"planet": 1}}, "extra_args"),
        ],
        ids=str,
    )
    def test_what_depends_on_more_than_the_tokens_is_refused_with_the_reason(
        self, thinker: Engine, params: dict[str, Any], named: str
    ) -> None:
        request = ask("What is 1 + 2?<|answer|>", **params)
        shown = resume_of(run(thinker, request)["whole"][:1])
        with pytest.raises(NotResumableError, match=f"^{named}: {vllm_resume.NOT_RESUMABLE[named][:20]}"):
            thinker.add(replace(request, resume=shown))
        assert not thinker.has_unfinished()

    def test_an_answer_of_luck_is_continued_with_other_luck(self, thinker: Engine) -> None:
        request = ask("What is 1 + 2?<|answer|>", temperature=1.5, ignore_eos=True, max_tokens=12)
        shown = resume_of(run(thinker, request)["whole"][:5])
        rest = run(thinker, replace(request, resume=shown))["whole"]
        assert len(resume_of(rest).token_ids) == 7
        assert rest[-1].usage["completion_tokens"] == 12

    def test_a_prompt_that_is_wrong_is_the_clients_mistake_with_or_without_a_resumption(self, thinker: Engine) -> None:
        request = replace(ask(""), inputs={"prompt": ""}, resume=Resume(token_ids=(30,), text="0"))
        with pytest.raises(InvalidRequestError):
            thinker.add(request)

    def test_tokens_that_the_model_does_not_have_are_no_mistake_of_the_client(self, thinker: Engine) -> None:
        request = replace(ask("What is 1 + 2?<|answer|>"), resume=Resume(token_ids=(10**6,)))
        with pytest.raises(NotResumableError):
            thinker.add(request)
        assert not thinker.has_unfinished()
