"""Engines of others say what they like: what can't be used fails the request that it is about, and no other."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.errors import REFUSALS
from omni_discovery.wire import (
    MAX_HEAD_BYTES,
    MAX_LOGPROBS,
    MAX_TOOL_CALLS,
    FailureKind,
    TokenLogprob,
    ToolAnswer,
    ToolCall,
)
from omni_discovery.wire.session import Peer
from stage_runtime.connectors.shm.connector import SharedMemoryConnector
from stage_runtime.engine_loop.check_output import MAX_CALLED, MAX_CALLED_NAME, PROMPT_PLACES, flaw_of
from stage_runtime.engine_loop.jobs import (
    Finished,
    NextSegment,
    Outcome,
    OutputChunk,
    RequestFailed,
    SegmentEnded,
    Wake,
    WindowUpdate,
    Work,
)
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.engines.base import EngineOutput, StageRequest
from stage_runtime.server.ledger import Ticket
from stage_runtime.server.sessions import head_of
from tests.support.replica_engine import ScriptedEngine

CALL = ToolCall(name="add", arguments="{}")
WRONG: dict[str, Any] = {
    "text": 7,
    "text of bytes": {"text": b"x"},
    "token_ids": "abc",
    "token_ids of strings": {"token_ids": ("1", "2")},
    "token_ids of floats": {"token_ids": (1.0,)},
    "logprobs": "abc",
    "logprobs of none": {"logprobs": None},
    "logprobs without tokens": {"logprobs": (((1, -0.5, 1, "a"),),)},
    "logprobs of one token in two": {"token_ids": (1, 2), "logprobs": (((1, -0.5, 1, "a"),),)},
    "logprobs with nothing": {"token_ids": (1,), "logprobs": ((),)},
    "logprobs with too many": {"token_ids": (1,), "logprobs": (((1, -0.5, 1, "a"),) * 22,)},
    "logprobs with less": {"token_ids": (1,), "logprobs": (((1, -0.5, 1),),)},
    "logprobs with whole numbers": {"token_ids": (1,), "logprobs": (((1, 1, 1, "a"),),)},
    "logprobs with no number": {"token_ids": (1,), "logprobs": (((1, float("nan"), 1, "a"),),)},
    "logprobs with a rank below": {"token_ids": (1,), "logprobs": (((1, -0.5, -1, "a"),),)},
    "prompt_logprobs": "abc",
    "prompt_logprobs of none": {"prompt_logprobs": None},
    "prompt_logprobs with nothing": {"prompt_logprobs": (None,)},
    "prompt_logprobs with no number": {"prompt_logprobs": (((1, float("nan"), 1, "a"),),)},
    "prompt_token_ids": "abc",
    "prompt_token_ids of none": {"prompt_token_ids": None},
    "prompt_token_ids of strings": {"prompt_token_ids": ("1",)},
    "error of a list": {"finish_reason": "error", "error": [FailureKind.ENGINE, "x"]},
    "error of four": {"finish_reason": "error", "error": (FailureKind.ENGINE, "x", 400, "y")},
    "stop_reason": {"finish_reason": "stop", "stop_reason": True},
    "stop_reason below": {"finish_reason": "stop", "stop_reason": -1},
    "stop_reason of bytes": {"finish_reason": "stop", "stop_reason": b"x"},
    "stop_reason of a book": {"finish_reason": "stop", "stop_reason": "x" * 257},
    "called": {"finish_reason": "stop", "called": "add"},
    "called of a list": {"finish_reason": "stop", "called": ToolAnswer(calls=["add"])},
    "called without a name": {"finish_reason": "stop", "called": ToolAnswer(calls=(ToolCall(name="", arguments=""),))},
    "called of a book": {"finish_reason": "stop", "called": ToolAnswer(content="x" * (1 << 20))},
    "called by a name of a book": {
        "finish_reason": "stop",
        "called": ToolAnswer(calls=(ToolCall(name="x" * (MAX_CALLED_NAME + 1), arguments=""),)),
    },
    "called of a word too much": {
        "finish_reason": "stop",
        "called": ToolAnswer(content="x" * (MAX_CALLED - 1), calls=(CALL,)),
    },
    "called without arguments": {
        "finish_reason": "stop",
        "called": ToolAnswer(calls=(ToolCall(name="add", arguments=None),)),  # type: ignore[arg-type]
    },
    "called without calls": {"finish_reason": "stop", "called": ToolAnswer(calls=("add",))},  # type: ignore[arg-type]
    "called once without a name": {
        "finish_reason": "stop",
        "called": ToolAnswer(calls=(CALL, ToolCall(name="", arguments=""))),
    },
    "called of bytes": {"finish_reason": "stop", "called": ToolAnswer(content=b"x")},  # type: ignore[arg-type]
    "error of another status": {"finish_reason": "error", "error": (FailureKind.INVALID, "x", 200)},
    "error with a status of text": {"finish_reason": "error", "error": (FailureKind.INVALID, "x", "400")},
    "error of one": {"finish_reason": "error", "error": (FailureKind.INVALID,)},
    "error of bytes": {"finish_reason": "error", "error": (FailureKind.INVALID, b"x")},
    "usage of truths": {"finish_reason": "stop", "usage": {"n": True}},
    "logprobs with a token below": {"token_ids": (1,), "logprobs": (((-1, -0.5, 1, "a"),),)},
    "logprobs with a token of text": {"token_ids": (1,), "logprobs": ((("1", -0.5, 1, "a"),),)},
    "logprobs with a rank of text": {"token_ids": (1,), "logprobs": (((1, -0.5, "1", "a"),),)},
    "logprobs with bytes": {"token_ids": (1,), "logprobs": (((1, -0.5, 1, b"a"),),)},
    "called too often": {
        "finish_reason": "stop",
        "called": ToolAnswer(calls=(ToolCall(name="add", arguments="{}"),) * 129),
    },
    "image_png": "png",
    "partial_image": {"image_png": b"", "partial_image": True},
    "partial_image below": {"image_png": b"", "partial_image": -1},
    "partial_image beyond": {"image_png": b"", "partial_image": 3},
    "partial_image of nothing": {"partial_image": 0},
    "partial_image of the end": {"image_png": b"", "partial_image": 0, "finish_reason": "stop"},
    "finish_reason": 0,
    "handoff": {"finish_reason": "stop", "handoff": [1]},
    "handoff_piece": b"x",
    "usage": {"finish_reason": "stop", "usage": {"prompt_tokens": "3"}},
    "usage of numbers": {"finish_reason": "stop", "usage": {1: 1}},
    "usage of nothing": {"finish_reason": "stop", "usage": None},
    "error": "it broke",
    "error of two texts": {"error": ("engine", "it broke")},
}


class TalkingEngine(ScriptedEngine):
    """Takes segments, too."""

    def update(self, request: StageRequest) -> None:
        self.add(request)


class Bench:
    """One loop with the requests a and b, before a stage that takes two pieces at most."""

    def __init__(self, folder: Path) -> None:
        self.engine, self.said = TalkingEngine(), list[Outcome]()
        outgoing = SharedMemoryConnector({"directory": str(folder), "shm_threshold_bytes": 0})
        payloads = Payloads(0, {(0, 1): Edge("shm", outgoing, window=2)}, lambda: 0.0)
        self.loop = EngineLoop(self.engine, payloads, {}, self.said.extend, lambda: 0.0)

    def submit(self, key: str, **fields: Any) -> None:
        self.loop.jobs.put(Work(key, f"hub/{key}", key, 0, {"prompt": "hi"}, {}, (), (1,), 0.0, 60.0, **fields))

    def put_out(self, *outputs: EngineOutput) -> list[Outcome]:
        """What one step with these outputs makes the replica say."""
        self.said.clear()
        self.loop.jobs.put(Wake())
        self.engine.steps.append(list(outputs))
        self.loop.turn()
        return list(self.said)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.submit("a")
    bench.submit("b")
    bench.loop.turn()
    return bench


@pytest.mark.parametrize("wrong", WRONG)
def test_an_output_of_wrong_types_fails_its_request_only(
    bench: Bench, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """1. one of two outputs of a step holds nonsense: its request fails with the reason, and is taken from the engine
    2. the other is passed on, and served to its end
    """
    given = WRONG[wrong]
    fields = given if isinstance(given, dict) else {wrong: given}
    with caplog.at_level(logging.ERROR):
        said = bench.put_out(EngineOutput("a", **fields), EngineOutput("b", text="fine "))
    assert said[1:] == [OutputChunk("b", "text", text="fine ")]
    assert isinstance(said[0], RequestFailed)
    assert (said[0].key, said[0].kind) == ("a", FailureKind.ENGINE)
    assert said[0].reason.startswith(f"the engine gave {wrong.split()[0]}")
    assert (bench.engine.aborted, bench.loop.counters["bad_outputs"]) == (["a"], 1)
    assert len(caplog.records) == 1
    # What was stopped says so first, and nobody wants to hear it.
    (end,) = bench.put_out(EngineOutput("b", finish_reason="stop")) + bench.put_out()
    assert isinstance(end, Finished)
    assert end.key == "b"


def test_what_an_engine_may_say_has_no_flaw() -> None:
    for fields in (
        {},
        {"text": "x", "token_ids": [1, 2]},
        {"image_png": b"", "finish_reason": "stop", "usage": {"n": 1}, "handoff": {}, "handoff_piece": {"a": 1}},
        {"image_png": b"", "partial_image": 2},
        {"image_png": b"", "partial_image": 0},
        {"error": (FailureKind.INVALID, "no", 400)},
        {"finish_reason": "stop", "called": ToolAnswer(content="x" * (MAX_CALLED - 2), calls=(CALL,))},
        {"finish_reason": "stop", "called": ToolAnswer(calls=(CALL,) * MAX_TOOL_CALLS)},
        {"finish_reason": "stop", "called": ToolAnswer(calls=(ToolCall(name="x" * MAX_CALLED_NAME, arguments=""),))},
        {"error": (FailureKind.INVALID, "no")},
        {"token_ids": [1], "logprobs": [[(1, float("-inf"), 0, ""), *[(2, -0.5, 1, "b")] * 20]]},
        {"token_ids": [1], "prompt_logprobs": [[(1, -0.5, 1, "a")]] * 3},
        {"token_ids": [1], "prompt_token_ids": [3, 3, 4]},
        {"finish_reason": "stop", "stop_reason": 0},
        {"finish_reason": "stop", "stop_reason": "x" * 256},
    ):
        given: dict[str, Any] = fields
        assert flaw_of(EngineOutput("a", **given)) == ""


def test_what_a_long_prompt_was_like_comes_before_the_answer_in_pieces_that_fit(bench: Bench) -> None:
    """Cut at the same places by every replica, however wide each is: what was shown can be told from what was not."""
    place = tuple(TokenLogprob(number, -0.5, number, "text") for number in range(MAX_LOGPROBS + 1))
    told = tuple((place[:1], place)[number % 2] for number in range(2 * PROMPT_PLACES + 1))
    said = bench.put_out(EngineOutput("a", text="x", token_ids=(1,), prompt_logprobs=told))
    pieces = [piece for piece in said if isinstance(piece, OutputChunk)]
    assert [len(piece.prompt_logprobs) for piece in pieces] == [PROMPT_PLACES, PROMPT_PLACES, 1, 0]
    assert tuple(place for piece in pieces for place in piece.prompt_logprobs) == told
    assert [piece.token_ids for piece in pieces] == [(), (), (), (1,)]
    widest = OutputChunk("a", "text", prompt_logprobs=(place,) * PROMPT_PLACES)
    assert len(head_of(Ticket("a", Peer("hub", "hub"), "a", 0, 1), widest, 0)) < MAX_HEAD_BYTES / 4
    (end,) = bench.put_out(EngineOutput("a", finish_reason="stop", stop_reason="x"))
    assert isinstance(end, Finished)
    assert end.stop_reason == "x"


def test_outputs_of_nobody_are_counted_and_dropped(bench: Bench) -> None:
    """Of a request that never was, of none at all, and of one behind its end; who was stopped may say so."""
    said = bench.put_out(
        EngineOutput("nobody", text="x"),
        EngineOutput(["a"], text="x"),  # type: ignore[arg-type]
        EngineOutput("a", finish_reason="stop"),
        EngineOutput("a", text="more"),
        EngineOutput("a", finish_reason="stop"),
        EngineOutput("gone", finish_reason="abort"),
        EngineOutput("b", text="fine "),
    )
    assert [type(each) for each in said] == [Finished, OutputChunk]
    assert bench.loop.counters == {"stray_outputs": 4}


def test_a_video_goes_to_the_client_as_an_mp4_file(bench: Bench) -> None:
    bench.submit("film")
    bench.loop.turn()
    chunk, _ = bench.put_out(EngineOutput("film", video_mp4=b"MP4", finish_reason="stop"))
    assert chunk == OutputChunk("film", "video", mime="video/mp4", attachment=b"MP4")
    bench.submit("other")
    bench.loop.turn()
    (end,) = bench.put_out(EngineOutput("other", video_mp4="MP4"))  # type: ignore[arg-type]
    assert isinstance(end, RequestFailed)
    assert "the engine gave video_mp4 str" in end.reason


def test_an_unfinished_picture_goes_to_the_client_with_its_number(bench: Bench) -> None:
    first, second = bench.put_out(
        EngineOutput("a", image_png=b"PNG", partial_image=1), EngineOutput("b", image_png=b"PNG")
    )
    assert first == OutputChunk("a", "image", mime="image/png", attachment=b"PNG", partial_image=1)
    assert second == OutputChunk("b", "image", mime="image/png", attachment=b"PNG")


def test_more_of_a_segment_behind_its_end_fails_the_request(bench: Bench) -> None:
    """It would count for the next one; the next segment's own output is fine."""
    bench.submit("talk", segment=0)
    bench.loop.turn()
    (end,) = bench.put_out(EngineOutput("talk", finish_reason="stop"))
    assert isinstance(end, SegmentEnded)
    bench.loop.jobs.put(NextSegment("talk", 1, {"prompt": "more"}, ()))
    assert bench.put_out(EngineOutput("talk", text="x")) == [OutputChunk("talk", "text", text="x")]
    bench.put_out(EngineOutput("talk", finish_reason="stop"))
    (end,) = bench.put_out(EngineOutput("talk", text="late"))
    assert isinstance(end, RequestFailed)
    assert "behind its end" in end.reason


def test_more_behind_an_end_that_waits_for_its_pieces_fails_the_request(bench: Bench) -> None:
    bench.submit("p", stream_to=(1,))
    bench.loop.turn()
    pieces = [EngineOutput("p", handoff_piece={"n": number}) for number in range(3)]
    assert len(bench.put_out(*pieces, EngineOutput("p", finish_reason="stop"))) == 2
    (end,) = bench.put_out(EngineOutput("p", text="late"))
    assert isinstance(end, RequestFailed)
    bench.loop.jobs.put(WindowUpdate("p", 1, 2))
    assert bench.put_out() == []


def test_files_come_before_words_and_each_says_what_it_is(bench: Bench) -> None:
    said = bench.put_out(EngineOutput("a", text="x", audio_wav=b"WAV", pooled_npy=b"NPY", image_png=b"PNG"))
    assert said == [
        OutputChunk("a", "image", mime="image/png", attachment=b"PNG"),
        OutputChunk("a", "audio", mime="audio/wav", attachment=b"WAV"),
        OutputChunk("a", "embedding", mime="application/x-npy", attachment=b"NPY"),
        OutputChunk("a", "text", text="x"),
    ]


def test_tokens_without_text_are_said_with_the_tokens_of_the_prompt(bench: Bench) -> None:
    (said,) = bench.put_out(EngineOutput("a", token_ids=[7], prompt_token_ids=[3, 4]))  # type: ignore[arg-type]
    assert said == OutputChunk("a", "text", token_ids=(7,), prompt_token_ids=(3, 4))


def test_a_wrong_status_is_answered_with_those_that_there_are() -> None:
    assert flaw_of(EngineOutput("a", error=(FailureKind.INVALID, "x", 200))).endswith(
        f"int 200: there are {', '.join(map(str, REFUSALS))}"
    )
