"""Log probabilities on their way to the client: joined where text is joined, counted where memory is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from hub.request.outputs import OmniOutput, chunk_outputs, end_output
from hub.results import ResultBuilder
from omni_discovery import wire


def shown(token_id: int) -> OmniOutput:
    """What the client gets of a chunk with one token."""
    chunk = wire.Chunk(
        epoch=1,
        request_id="r",
        seq=0,
        modality="text",
        queue_length=0,
        text="x",
        token_ids=(token_id,),
        logprobs=((wire.TokenLogprob(token_id, -0.5, 2, "x"), wire.TokenLogprob(9, -0.25, 1, "y")),),
    )
    (message,), attachments = wire.decode_from_replica([wire.encode(chunk)])
    assert isinstance(message, wire.Chunk)
    (output,) = chunk_outputs("r", 0, "0/1", message, [bytes(each) for each in attachments], 0.0)
    return output


def test_joined_text_keeps_one_entry_for_each_token() -> None:
    joined = shown(1).joined(shown(2))
    assert joined is not None
    assert [place[0].token_id for place in joined.logprobs] == list(joined.token_ids) == [1, 2]
    assert joined.size_bytes == shown(1).size_bytes + shown(2).size_bytes
    assert joined.size_bytes > 4 * 100


@pytest.mark.parametrize("change", [{"data": b"x"}, {"finish_reason": "stop"}, {"segment_end": True}])
def test_what_holds_more_than_text_is_not_joined(change: dict[str, Any]) -> None:
    assert shown(1).joined(replace(shown(2), **change)) is None
    assert replace(shown(1), **change).joined(shown(2)) is None


def of_prompt(number: int) -> OmniOutput:
    """What the client gets of a chunk that tells of one token of the prompt."""
    told = (wire.TokenLogprob(number, -0.5, 2, "x"), wire.TokenLogprob(9, -0.25, 1, "y"))
    about = {"epoch": 1, "request_id": "r", "seq": 0, "modality": "text", "queue_length": 0}
    chunk = wire.Chunk(**about, prompt_logprobs=(told,))  # type: ignore[arg-type]
    (output,) = chunk_outputs("r", 0, "0/1", chunk, [], 0.0)
    return output


def test_those_of_the_prompt_are_counted_and_joined_likewise() -> None:
    joined = of_prompt(1).joined(of_prompt(2))
    assert joined is not None
    assert [place[0].token_id for place in joined.prompt_logprobs] == [1, 2]
    assert joined.size_bytes == of_prompt(1).size_bytes + of_prompt(2).size_bytes > 4 * 100
    builder = ResultBuilder(0, "r", "hi")
    for output in (of_prompt(1), of_prompt(2), shown(3)):
        builder.add(output)
    (stage,) = builder.result().stages
    assert (len(stage.prompt_logprobs), len(stage.logprobs)) == (2, 1)


@pytest.mark.parametrize("stop_reason", [None, 0, 7, "."])
def test_what_stopped_an_answer_is_told_with_its_end(stop_reason: int | str | None) -> None:
    done = wire.StageDone(
        epoch=1,
        request_id="r",
        seq=0,
        finish_reason="stop",
        queue_length=0,
        stop_reason=UNSET if stop_reason is None else stop_reason,
    )
    (message,), _ = wire.decode_from_replica([wire.encode(done)])
    assert isinstance(message, wire.StageDone)
    builder = ResultBuilder(0, "r", "hi")
    builder.add(end_output("r", 0, "0/1", "text", message, 0.0))
    (stage,) = builder.result().stages
    assert stage.stop_reason == stop_reason


def test_the_calls_of_an_answer_are_told_with_its_end() -> None:
    """A hub of a release without the field reads the rest."""
    called = wire.ToolAnswer(calls=(wire.ToolCall(name="add", arguments='{"a": 1}'),), content="I add.")
    done = wire.StageDone(epoch=1, request_id="r", seq=0, finish_reason="stop", queue_length=0, called=called)
    (message,), _ = wire.decode_from_replica([wire.encode(done)])
    assert isinstance(message, wire.StageDone)
    output = end_output("r", 0, "0/1", "text", message, 0.0)
    assert output.size_bytes == len('{"a": 1}') + len("I add.")
    builder = ResultBuilder(0, "r", "hi")
    builder.add(output)
    (stage,) = builder.result().stages
    assert stage.called == called
    without = wire.StageDone(epoch=1, request_id="r", seq=0, finish_reason="stop", queue_length=0)
    assert end_output("r", 0, "0/1", "text", without, 0.0).called is None


def test_a_result_has_those_of_all_pieces() -> None:
    builder = ResultBuilder(0, "r", "hi")
    builder.add(shown(1))
    builder.add(shown(2))
    (stage,) = builder.result().stages
    assert stage.logprobs == (*shown(1).logprobs, *shown(2).logprobs)


def test_an_image_of_a_chunk_has_none() -> None:
    chunk = wire.Chunk(epoch=1, request_id="r", seq=0, modality="image", queue_length=0, mime="image/png")
    assert [output.logprobs for output in chunk_outputs("r", 0, "0/1", chunk, [b"1", b"2"], 0.0)] == [(), ()]


def test_what_a_prompt_came_to_is_told_once_and_counted() -> None:
    """Joined with what comes behind it, as well."""
    about = {"epoch": 1, "request_id": "r", "seq": 0, "modality": "text", "queue_length": 0, "token_ids": (1,)}
    chunk = wire.Chunk(**about, prompt_token_ids=(7, 7, 8))  # type: ignore[arg-type]
    (output,) = chunk_outputs("r", 0, "0/1", chunk, [], 0.0)
    assert output.prompt_token_ids == (7, 7, 8)
    assert output.size_bytes == 8 * 4
    joined = output.joined(shown(2))
    assert joined is not None
    assert joined.prompt_token_ids == (7, 7, 8)


@pytest.mark.attack("M5")
def test_log_probabilities_count_with_their_texts() -> None:
    """A token's text is as long as its replica makes it."""
    place = (wire.TokenLogprob(1, -0.5, 1, "x" * 5000),)
    assert OmniOutput("r", 0, "text", token_ids=(1,), logprobs=(place,)).size_bytes > 5000
    assert OmniOutput("r", 0, "text", prompt_logprobs=(place, place)).size_bytes > 10_000
