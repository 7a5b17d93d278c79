"""vLLM between stages: hand-offs and prompts in pieces, prompts of embeds, hidden states, answers held back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open

from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import Resume
from stage_runtime.config import NotResumableError
from stage_runtime.connectors.shm.connector import SharedMemoryConnector
from stage_runtime.engine_loop.jobs import (
    Finished,
    HandedPiece,
    Outcome,
    OutputChunk,
    PieceArrived,
    TookPiece,
    WindowUpdate,
    Work,
)
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.engines.base import EngineOutput, StageRequest, create_engine
from stage_runtime.engines.vllm.engine import VllmEngine
from stage_runtime.engines.vllm.handoff import LONGEST_PIECE, HiddenStates, Rows
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.prompt import read_handed
from stage_runtime.lifecycle import stalled
from stage_runtime.testing import drain, resume_of, run
from tests.support.engines import DEMO, PAINTER, THINKER, as_the_supervisor_has_it
from tests.support.replica_engine import at_once

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

torch.set_num_threads(1)

BLOCK = 32
PROMPT = "show me the answer to 47 + 18<|answer|>"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}

Handed = Mapping[str, Any]


def load(**engine_args: Any) -> VllmEngine:
    engine = create_engine(
        msgspec.structs.replace(THINKER, engine_args={**THINKER.engine_args, "block_size": BLOCK, **engine_args})
    )
    assert isinstance(engine, VllmEngine)
    engine.load(lambda _phase, _progress: None)
    return engine


@pytest.fixture(scope="module")
def first() -> Iterator[VllmEngine]:
    """A stage that hands over all its answers, with hidden states."""
    with as_the_supervisor_has_it():
        engine = load(handoff={"hidden_states": True}, enable_prompt_embeds=True)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def second(first: VllmEngine) -> Iterator[VllmEngine]:
    """The stage after it, in the same process. It takes tokens."""
    del first
    engine = load(handoff={})
    yield engine
    engine.close()


def ask(key: str = "a", prompt: str = PROMPT, **params: Any) -> StageRequest:
    return StageRequest(key, key, inputs={"prompt": prompt}, params={**GREEDY, **params})


def handing(key: str = "a", **params: Any) -> StageRequest:
    """One whose next stage 1 takes pieces, and whose next stage 2 takes the whole."""
    return replace(ask(key, **params), next_stages=(1, 2), stream_to=(1,))


def tokens(outputs: Sequence[EngineOutput]) -> list[int]:
    return list(resume_of(outputs).token_ids)


def joined(pieces: Sequence[Handed]) -> dict[str, Any]:
    return {
        name: "".join(piece[name] for piece in pieces)
        if name == "text"
        else torch.cat([piece[name] for piece in pieces])
        for name in pieces[0]
    }


def check_same(one: Handed, other: Handed) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        if name == "hidden_states":
            torch.testing.assert_close(value, other[name], atol=1e-4, rtol=1e-4)
        else:
            assert value == other[name] if name == "text" else value.tolist() == other[name].tolist()


def weight(name: str) -> torch.Tensor:
    with safe_open(DEMO / "thinker" / "model.safetensors", "pt") as file:
        found: torch.Tensor = file.get_tensor(name)
    return found.float()


# ---- out


def test_pieces_grow_come_in_order_and_make_up_the_whole(first: VllmEngine) -> None:
    """1. two requests hand over piece by piece: the first token at once, then as much as came before, at most 16
    2. joined, the pieces are what the stage hands over as a whole; the last one comes with the end
    """
    said = run(first, handing(), handing("b", max_tokens=1))
    pieces = [output.handoff_piece for output in said["a"] if output.handoff_piece is not None]
    assert [len(piece["token_ids"]) for piece in pieces] == [1, 1, 2, 4, 8, LONGEST_PIECE, 8]
    assert said["a"][-1].handoff_piece is pieces[-1]
    assert said["a"][-1].handoff is not None
    check_same(joined(pieces), said["a"][-1].handoff)
    assert joined(pieces)["text"] == "".join(output.text for output in said["a"])
    (only,) = said["b"]
    assert only.handoff_piece is not None
    assert only.handoff is not None
    check_same(only.handoff_piece, only.handoff)


def test_a_continued_answer_is_handed_over_from_its_first_token(first: VllmEngine) -> None:
    """Unless nothing is left to say of one whose hidden states are needed: they are gone with who made them."""
    whole = run(first, handing())["a"]
    again = replace(handing("again"), attempt=1)
    for cut in (1, 20):
        rest = run(first, replace(again, resume=resume_of(whole[:cut])))["again"]
        pieces = [output.handoff_piece for output in rest if output.handoff_piece is not None]
        assert whole[-1].handoff is not None
        check_same(joined(pieces), whole[-1].handoff)
    with pytest.raises(NotResumableError, match="hidden_states"):
        first.add(replace(again, resume=resume_of(whole)))
    assert run(first, replace(again, next_stages=(), stream_to=(), resume=resume_of(whole)))["again"][-1].finished


def test_pieces_begin_with_the_token_that_an_answer_must_hold(second: VllmEngine, monkeypatch: Any) -> None:
    """1. made to say it at last: everything before it is in the first piece; 2. who never says it hands over nothing"""
    answer = tokens(run(second, ask())["a"])
    token = next(each for place, each in enumerate(answer) if place > 3 and each not in answer[:place])
    place = answer.index(token)
    monkeypatch.setattr(second._handoffs, "_required_id", token)
    streaming = replace(ask(), next_stages=(1,), stream_to=(1,))
    pieces = [each.handoff_piece for each in run(second, streaming)["a"] if each.handoff_piece is not None]
    assert len(pieces[0]["token_ids"]) == place + 1
    assert joined(pieces)["token_ids"].tolist() == answer
    short = run(second, replace(streaming, params={**GREEDY, "max_tokens": place}))["a"]
    assert [(each.handoff_piece, each.handoff) for each in short] == [(None, None)] * place


# ---- both ends


class Line:
    """Two stages in one process, each with its loop, and what the hub does between them. One piece at most is open."""

    def __init__(self, first: VllmEngine, second: VllmEngine, folder: Path) -> None:
        self.engines = (first, second)
        self.said: tuple[list[Outcome], list[Outcome]] = ([], [])
        config = {"directory": str(folder), "shm_threshold_bytes": 0}
        self.loops = [
            EngineLoop(
                engine,
                Payloads(stage, {(0, 1): Edge("shm", SharedMemoryConnector(config), window=1)}, lambda: 0.0),
                {},
                self.said[stage].extend,
                run_aside=at_once,
            )
            for stage, engine in enumerate(self.engines)
        ]

    def serve(self, request: StageRequest, after: Mapping[str, Any]) -> None:
        """One request, to its end in both stages; ``after`` are the second's parameters."""
        now_s = self.loops[0]._clock()
        work = Work("k", "hub/k", "k", 0, request.inputs, request.params, (), (1,), now_s, now_s + 600, stream_to=(1,))
        self.loops[0].jobs.put(work)
        self.loops[1].jobs.put(
            msgspec.structs.replace(work, params=after, next_stages=(), stream_to=(), stream_from=(0,))
        )
        relayed = [0, 0]
        while not any(isinstance(each, Finished) for each in self.said[1]):
            for loop, engine in zip(self.loops, self.engines, strict=True):
                # A turn without anything to do would wait a moment for it.
                if engine.has_unfinished() or not loop.jobs.empty():
                    loop.turn()
            for stage in (0, 1):
                for outcome in self.said[stage][relayed[stage] :]:
                    self._relay(outcome)
                relayed[stage] = len(self.said[stage])

    def _relay(self, outcome: Outcome) -> None:
        match outcome:
            case HandedPiece(key, number, (ref,)):
                self.loops[1].jobs.put(PieceArrived(key, 0, number, ref, False))
            case TookPiece(key, _, number):
                self.loops[0].jobs.put(WindowUpdate(key, 1, number + 1))
            case Finished(key) if outcome in self.said[0]:
                self.loops[1].jobs.put(PieceArrived(key, 0, len(self.numbers()), None, True))

    def numbers(self) -> list[int]:
        return [each.number for each in self.said[0] if isinstance(each, HandedPiece)]


def spoken(outcomes: Sequence[Outcome]) -> list[int]:
    return [token_id for each in outcomes if isinstance(each, OutputChunk) for token_id in each.token_ids]


def test_two_stages_in_one_process_work_on_each_others_pieces(
    first: VllmEngine, second: VllmEngine, tmp_path: Path
) -> None:
    """1. one piece at most is on its way, so the first stage is paused again and again
    2. its answer is as ever; the pieces come in order; the second stage answers as to the whole hand-off
    """
    whole = run(first, replace(ask(), next_stages=(1,)))["a"]
    expected = run(second, replace(ask(), inputs={}, payloads={0: {"token_ids": torch.tensor(tokens(whole))}}))["a"]
    line = Line(first, second, tmp_path)
    line.serve(ask(), GREEDY)
    assert line.numbers() == list(range(7))
    assert spoken(line.said[0]) == tokens(whole)
    assert spoken(line.said[1]) == tokens(expected)
    (end,) = (each for each in line.said[0] if isinstance(each, Finished))
    assert (end.finish_reason, dict(end.usage), end.payloads) == ("length", dict(whole[-1].usage), ())


# ---- in


def feeding(key: str = "fed", **params: Any) -> StageRequest:
    return StageRequest(key, key, params={**GREEDY, "max_tokens": 8, **params}, stream_from=(0,))


def cached_in(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many tokens of each request's prompt were remembered, told from now on."""
    cached: dict[str, int] = {}
    read = engine._output_of

    def note(made: Any) -> EngineOutput | None:
        cached.setdefault(made.request_id, int(made.num_cached_tokens))
        return read(made)

    monkeypatch.setattr(engine, "_output_of", note)
    return cached


def piece_of(*token_ids: int) -> dict[str, Any]:
    return {"token_ids": torch.tensor(token_ids), "text": "what is read is the tokens"}


def test_a_prompt_that_comes_in_pieces_is_read_ahead_and_answered_as_one_that_came_whole(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. between two pieces there is nothing to do but to read ahead, and nothing is said
    2. with the last piece the answer comes, as if all had been there; what was read ahead is not read again
    """
    prompt = [30 + 7 * number % 101 for number in range(3 * BLOCK - 6)]
    whole = run(second, replace(feeding("w"), stream_from=(), payloads={0: {"token_ids": prompt}}))["w"]
    assert second.controls["reset_prefix_cache"]()
    cached = cached_in(second, monkeypatch)
    second.add(feeding())
    assert not second.has_unfinished()
    for start in range(0, len(prompt), 15):
        second.feed("fed", 0, piece_of(*prompt[start : start + 15]), False)
        assert drain(second) == []
    second.feed("fed", 0, None, True)
    said = drain(second)
    assert tokens(said) == tokens(whole)
    assert said[-1].usage == {"prompt_tokens": len(prompt), "completion_tokens": 8}
    assert next(iter(cached.values())) == 2 * BLOCK
    second.feed("fed", 0, piece_of(5), False)
    assert not second.has_unfinished()


def test_a_prompt_is_rated_whole_though_it_is_remembered(second: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the same prompt is rated twice, the second time from scratch, too: what is remembered has no odds
    2. behind the answer's beginning it is read from memory again
    """
    prompt = [30 + 7 * number % 101 for number in range(2 * BLOCK + 9)]
    params = {**GREEDY, "max_tokens": 4, "prompt_logprobs": 1}
    assert second.controls["reset_prefix_cache"]()
    cached = cached_in(second, monkeypatch)
    said = {}
    for key in ("first", "again"):
        said[key] = run(second, StageRequest(key, key, inputs={"prompt_token_ids": prompt}, params=params))[key]
    resume = resume_of(said["again"][:2])
    run(second, StageRequest("rest", "r", inputs={"prompt_token_ids": prompt}, params=params, resume=resume))
    assert cached == {"first": 0, "again": 0, "rest": 2 * BLOCK}
    rated = [[place[0] for outputs in said[key] for place in outputs.prompt_logprobs] for key in said]
    assert [each.token_id for each in rated[0]] == prompt[1:]
    assert [each.logprob for each in rated[0]] == pytest.approx([each.logprob for each in rated[1]], abs=1e-3)


def test_only_prompts_with_the_same_salt_are_remembered_together(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the prompt comes in pieces and is read ahead."""
    prompt = [31 + 7 * number % 101 for number in range(2 * BLOCK + 9)]
    assert second.controls["reset_prefix_cache"]()
    cached = cached_in(second, monkeypatch)
    for key, salt in {"plain": {}, "mine": {"cache_salt": "a"}, "yours": {"cache_salt": "b"}}.items():
        asked = StageRequest(key, key, inputs={"prompt_token_ids": prompt}, params={**GREEDY, "max_tokens": 2, **salt})
        run(second, asked)
        run(second, replace(asked, key=f"{key} again"))
    whole = 2 * BLOCK
    for key in ("plain", "mine", "yours"):
        assert (cached[key], cached[f"{key} again"]) == (0, whole)
    for key, other in {"ahead": "c", "alone": "d"}.items():
        second.add(feeding(key, cache_salt=other))
        second.feed(key, 0, piece_of(*prompt), False)
        drain(second)
        if key == "alone":
            assert second.controls["reset_prefix_cache"]()
        second.feed(key, 0, None, True)
        drain(second)
    assert (cached["ahead"], cached["alone"]) == (whole, 0)


@pytest.mark.attack("Z89")
def test_prompts_of_one_api_key_are_remembered_together_and_apart_from_others(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How soon an answer begins told whether somebody else had sent the prompt. A stage may share all the same."""
    prompt = [37 + 5 * number % 103 for number in range(2 * BLOCK + 9)]
    assert second.controls["reset_prefix_cache"]()
    cached = cached_in(second, monkeypatch)

    def ask(key: str, client: str, **params: Any) -> None:
        whole = {**GREEDY, "max_tokens": 2, **params}
        run(second, StageRequest(key, key, inputs={"prompt_token_ids": prompt}, params=whole, client=client))

    ask("alice", "key-1")
    ask("alice again", "key-1")
    ask("bob", "key-2")
    ask("salted", "key-1", cache_salt="s")
    ask("somebody", "0123")
    ask("somebody else", "4567")
    shared = dataclasses.replace(second._model, shares_cache=True)
    monkeypatch.setattr(second, "_model", shared)
    ask("shared", "key-3")
    whole = 2 * BLOCK
    assert cached == {
        "alice": 0,
        "alice again": whole,
        "bob": 0,
        "salted": 0,
        "somebody": 0,
        "somebody else": whole,
        "shared": whole,
    }


def test_two_stages_before_are_read_in_their_order_whoever_speaks_first(second: VllmEngine) -> None:
    request = replace(feeding(), stream_from=(1,), payloads={0: {"token_ids": [40, 41, 42]}, 2: {"token_ids": [50]}})
    second.add(request)
    second.feed("fed", 1, piece_of(60), False)
    second.feed("fed", 1, piece_of(61, 62), False)
    second.feed("fed", 1, None, True)
    whole = replace(feeding(), stream_from=(), inputs={"prompt_token_ids": [40, 41, 42, 60, 61, 62, 50]})
    assert tokens(drain(second)) == tokens(run(second, whole)["fed"])


def test_a_growing_request_is_aborted_paused_and_continued_like_any_other(second: VllmEngine) -> None:
    second.add(feeding())
    with pytest.raises(InvalidRequestError, match="running already"):
        second.add(feeding())
    second.feed("fed", 0, piece_of(*range(30, 30 + BLOCK + 1)), False)
    second.abort("fed")
    (end,) = drain(second)
    assert (end.finish_reason, end.usage) == ("abort", {"prompt_tokens": 0, "completion_tokens": 0})
    second.add(feeding())
    second.pause("fed", True)
    for piece in (piece_of(40, 41), None):
        second.feed("fed", 0, piece, piece is None)
    assert not second.has_unfinished()
    second.pause("fed", False)
    whole = drain(second)
    second.add(replace(feeding(), attempt=1, resume=resume_of(whole[:3])))
    for piece in (piece_of(40, 41), None):
        second.feed("fed", 0, piece, piece is None)
    assert tokens(whole) == [*tokens(whole[:3]), *tokens(drain(second))]


@pytest.mark.parametrize(
    ("piece", "named"),
    [
        (piece_of(10**6), "vocabulary"),
        (piece_of(*[30] * 128), "context length"),
        ({"token_ids": torch.tensor([[1, 2]])}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"waveform": 1}, "waveform"),
        ({"multi_modal_data": {"image": b""}, "token_ids": [30]}, "multi_modal_data"),
    ],
    ids=str,
)
def test_a_piece_that_is_no_prompt_is_refused_and_the_engine_lives(
    second: VllmEngine, piece: Handed, named: str
) -> None:
    second.add(feeding())
    with pytest.raises(InvalidRequestError, match=named):
        second.feed("fed", 0, piece, False)
    second.abort("fed")
    assert drain(second)[-1].finish_reason == "abort"
    with pytest.raises(InvalidRequestError, match=named):
        second.add(replace(feeding(), stream_from=(), payloads={0: piece}))
    assert len(tokens(run(second, ask())["a"])) == 40


def test_a_prompt_of_no_pieces_is_empty(second: VllmEngine) -> None:
    second.add(feeding())
    with pytest.raises(InvalidRequestError, match="empty"):
        second.feed("fed", 0, None, True)
    second.abort("fed")
    drain(second)


def test_items_that_are_no_text_are_refused_by_a_stage_of_text(second: VllmEngine) -> None:
    with pytest.raises(InvalidRequestError, match="multi_modal_data"):
        second.add(replace(ask(), inputs={"prompt": "x", "multi_modal_data": {"image": "x"}}))


def test_a_hand_off_of_text_is_read_with_the_stages_own_tokenizer(second: VllmEngine) -> None:
    asked = replace(ask("t"), inputs={}, payloads={0: {"pieces": [{"text": PROMPT[:9]}, {"text": PROMPT[9:]}]}})
    assert tokens(run(second, asked)["t"]) == tokens(run(second, ask())["a"])


# ---- embeds and hidden states


def test_embeds_of_a_prompt_are_answered_as_its_tokens(first: VllmEngine) -> None:
    """Also piece by piece, among others, and next to a request of tokens."""
    prompt = first._model.tokenizer.encode(PROMPT)
    rows = weight("model.embed_tokens.weight")[prompt]
    expected = run(first, ask())["a"]
    whole = replace(ask("whole"), inputs={}, payloads={0: {"prompt_embeds": rows}})
    pieces = replace(whole, key="pieces", payloads={}, stream_from=(0,))
    first.add(pieces)
    for part in (*rows.split(5), None):
        first.feed("pieces", 0, None if part is None else {"prompt_embeds": part}, part is None)
    first.add(whole)
    first.add(ask())
    outputs = drain(first)
    for key in ("pieces", "whole", "a"):
        said = [output for output in outputs if output.key == key]
        assert tokens(said) == tokens(expected)
        assert said[-1].usage == expected[-1].usage
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: the prompt is no tokens"):
        first.add(replace(whole, params={**whole.params, "prompt_logprobs": 0}))


def test_the_hidden_states_are_those_that_the_tokens_were_chosen_from(first: VllmEngine) -> None:
    """1. the prompt is in the prefix cache, and another request runs beside
    2. a row for each token but the last; through the model's head each says the token that followed
    """
    prompt = first._model.tokenizer.encode(PROMPT)
    run(first, ask(max_tokens=1))
    said = run(first, replace(ask(), next_stages=(1,)), ask("beside", "7 + 5"))["a"]
    handed = said[-1].handoff
    assert handed is not None
    states = handed["hidden_states"]
    assert states.shape == (len(prompt) + 40 - 1, 128)
    says = (states @ weight("model.embed_tokens.weight").T).argmax(dim=1).tolist()
    assert says[len(prompt) - 1 :] == tokens(said)


def test_a_next_stage_takes_hidden_states_as_its_prompt(first: VllmEngine) -> None:
    handed = run(first, replace(ask(max_tokens=3), next_stages=(1,)))["a"][-1].handoff
    assert handed is not None
    after = replace(ask("after", max_tokens=5), inputs={}, payloads={0: handed})
    by_hand = replace(after, key="by hand", payloads={0: {"prompt_embeds": handed["hidden_states"]}})
    said = run(first, after, by_hand)
    assert tokens(said["after"]) == tokens(said["by hand"])
    assert said["after"][-1].usage["prompt_tokens"] == len(handed["hidden_states"])


def test_an_answer_to_embeds_is_not_continued_elsewhere_but_asked_anew(first: VllmEngine) -> None:
    payloads = {0: {"prompt_embeds": torch.zeros(3, 128)}}
    with pytest.raises(NotResumableError, match="prompt_embeds"):
        first.add(replace(ask(), inputs={}, payloads=payloads, resume=Resume(token_ids=(30,), text="0")))
    with pytest.raises(InvalidRequestError, match="segments"):
        first.add(replace(ask(), inputs={}, payloads=payloads, segment=0))


@pytest.mark.parametrize(
    ("handed", "size", "named"),
    [
        ({"prompt_embeds": torch.zeros(2, 7)}, 8, "7 numbers a token"),
        ({"prompt_embeds": torch.zeros(8)}, 8, "shape"),
        ({"prompt_embeds": torch.zeros(2, 8, dtype=torch.int64)}, 8, "floats"),
        ({"hidden_states": [1.0]}, 8, "hidden_states"),
        ({"prompt_embeds": torch.zeros(2, 8)}, 0, "enable_prompt_embeds"),
        ({}, 0, "nothing"),
    ],
    ids=str,
)
def test_embeds_that_do_not_fit_are_refused_with_what_would(handed: Handed, size: int, named: str) -> None:
    model = Model(None, 128, 640, frozenset(), embeds_size=size, dtype=torch.float32)
    with pytest.raises(InvalidRequestError, match=named):
        read_handed([handed], model)


def test_hidden_states_of_a_model_that_runs_as_a_graph_are_refused(second: VllmEngine) -> None:
    with pytest.raises(ConfigError, match="prefill and decode"):
        create_engine(
            msgspec.structs.replace(
                THINKER,
                engine_args={
                    "handoff": {"hidden_states": True},
                    "pd": "decode",
                    "kv_transfer_config": {"kv_connector": "NixlConnector"},
                },
            )
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second._llm.vllm_config.model_config, "enforce_eager", False)
        with pytest.raises(ConfigError, match="enforce_eager"):
            HiddenStates(second._llm, "stage 0")


def test_rows_that_come_again_replace_those_that_were_there_and_missing_ones_are_told() -> None:
    """1. three chunks; 2. after a preemption the second comes again, longer; 3. nothing is taken behind a gap"""
    rows = Rows()
    for start, end in ((0, 4), (4, 5), (5, 6), (2, 7), (9, 11)):
        rows.put(start, torch.arange(start, end).float()[:, None] + 100 * (start == 2))
    assert rows.between(0, 7)[:, 0].tolist() == [0, 1, 102, 103, 104, 105, 106]
    assert rows.between(5, 6)[:, 0].tolist() == [105]
    with pytest.raises(LookupError, match="of 7 tokens came, of 8"):
        rows.between(0, 8)


# ---- held back


def paused_at(engine: VllmEngine, request: StageRequest, cuts: Sequence[int], others: Callable[[], None]) -> list[Any]:
    """All that is said of a request that is paused behind each of these tokens, and let go on."""
    said: list[EngineOutput] = []
    engine.add(request)
    for cut in (*cuts, None):
        while engine.has_unfinished() and (cut is None or len(tokens(said)) < cut):
            said += [output for output in engine.step() if output.key == request.key]
        if cut is not None:
            engine.pause(request.key, True)
            others()
            engine.pause(request.key, False)
    return said


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0, "repetition_penalty": 1.3}, {"min_tokens": 30}, {"prompt_logprobs": 2}],
    ids=str,
)
def test_an_answer_that_is_paused_again_and_again_is_the_same_without_gap_or_repetition(
    first: VllmEngine, params: dict[str, Any]
) -> None:
    """1. paused before its first token, behind the first, in the middle, twice at the same place and before the last
    2. while it is paused it says nothing, is no work, and others run; hand-off and usage are the whole's
    """
    whole = run(first, handing(**params))["a"]

    def others() -> None:
        assert not first.has_unfinished()
        assert tokens(run(first, ask("other", "7 + 5", max_tokens=3))["other"])

    said = paused_at(first, handing(**params), (0, 1, 17, 17, 39), others)
    assert resume_of(said) == resume_of(whole)
    assert [len(output.prompt_logprobs) for output in said] == [len(output.prompt_logprobs) for output in whole]
    assert bool(said[0].prompt_logprobs) is ("prompt_logprobs" in params)
    assert len(said) == 40
    assert said[-1].usage == whole[-1].usage
    assert said[-1].finish_reason == whole[-1].finish_reason == "length"
    pieces = [output.handoff_piece for output in said if output.handoff_piece is not None]
    assert whole[-1].handoff is not None
    check_same(joined(pieces), whole[-1].handoff)


@pytest.mark.parametrize(
    "params", [{"seed": 5, "temperature": 0.8}, {"stop": ["zz"]}, {"frequency_penalty": 0.5}], ids=str
)
def test_what_can_not_go_on_exactly_is_not_paused_once_it_has_begun(first: VllmEngine, params: dict[str, Any]) -> None:
    whole = run(first, ask(**params))["a"]
    still_running: list[bool] = []
    said = paused_at(first, ask(**params), (0, 5), lambda: still_running.append(first.has_unfinished()))
    assert still_running == [False, True]
    assert resume_of(said) == resume_of(whole)


def test_a_paused_answer_can_be_aborted_and_unknown_ones_are_fine(first: VllmEngine) -> None:
    first.add(ask())
    first.step()
    first.pause("a", True)
    first.pause("a", True)
    first.pause("never heard of", True)
    first.abort("a")
    (end,) = drain(first)
    assert (end.finish_reason, end.usage["completion_tokens"]) == ("abort", 1)
    first.pause("a", False)
    assert not first.has_unfinished()


def test_a_character_of_several_tokens_is_whole_wherever_it_is_paused(first: VllmEngine) -> None:
    """The model is made to speak in bytes of two-byte characters."""
    params: dict[str, Any] = {"logit_bias": {"141": 100.0, "116": 99.0}, "repetition_penalty": 3.0, "max_tokens": 8}
    whole = run(first, ask(**params))["a"]
    said = paused_at(first, ask(**params), tuple(range(8)), lambda: None)
    assert resume_of(said) == resume_of(whole)


@pytest.mark.attack("E6")
def test_a_stage_that_takes_embeddings_makes_no_forms(first: VllmEngine) -> None:
    """It can't have llguidance, and one step of xgrammar may take minutes."""
    with pytest.raises(InvalidRequestError, match="the operator gives it engine_args"):
        first.add(ask(structured_outputs={"regex": ".?" * 64}))
    assert not first.has_unfinished()


def test_an_adapter_where_none_are_taken_is_refused(first: VllmEngine) -> None:
    with pytest.raises(InvalidRequestError, match="lora: this stage takes no adapters"):
        first.add(ask(lora="mine"))


def test_a_painter_draws_from_pieces_what_it_draws_from_the_whole() -> None:
    engine = create_engine(PAINTER)
    engine.load(lambda _phase, _progress: None)
    token_ids = torch.tensor([30, 3, 5, 6, 1])
    request = StageRequest("p", "p", params={"steps": 2}, payloads={0: {"token_ids": token_ids}})
    pieces = {0: {"pieces": [{"token_ids": token_ids[:3], "text": "x"}, {"token_ids": token_ids[3:], "text": ""}]}}
    pictures = [run(engine, each)["p"][-1].image_png for each in (request, replace(request, payloads=pieces))]
    assert pictures[0] == pictures[1] is not None
    engine.close()


# ---- standing still


def test_a_step_that_stands_still_is_seen_from_outside(
    second: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. inside a step of vLLM's the clock goes on, and nothing else does
    2. whoever looks at the loop's progress meanwhile finds work that has not moved for too long
    """
    now_s = [0.0]
    loop = EngineLoop(second, Payloads(1, {}, lambda: now_s[0]), {}, lambda _: None, lambda: now_s[0])
    seen: list[bool] = []
    step = second._llm.step

    def stand_still() -> Any:
        for _ in range(2):
            seen.append(stalled(loop.progress.busy, now_s[0], loop.progress.at_s, 60.0))
            now_s[0] += 61.0
        return step()

    monkeypatch.setattr(second._llm, "step", stand_still)
    loop.jobs.put(Work("k", "hub/k", "k", 0, {"prompt": PROMPT}, {"max_tokens": 1}, (), (), 0.0, 1e9))
    loop.turn()
    assert seen == [False, True]
    if len(loop):
        loop.turn()
    assert not stalled(loop.progress.busy, now_s[0], loop.progress.at_s, 60.0)
