"""What is kept of an answer, and the shapes in which its words, pictures and sound are sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hub.api.audio.threads import EncoderThreads
from hub.api.chat.answer import StreamedAnswer, WholeAnswer
from hub.api.chat.choices import Choices
from hub.api.exchange import Exchange
from hub.api.generation.usage import Usage
from hub.media import SoundKind, wav_file
from hub.request.outputs import OmniOutput, summary_output
from omni_discovery.errors import EngineFailedError
from omni_discovery.wire import TokenLogprob

SPOKEN = ("text", "audio")
SAMPLES = bytes(range(250)) * 4
SUMMARY = summary_output("r", "done", {})


def drawn(size_bytes: int) -> OmniOutput:
    return OmniOutput("r", 1, "image", data=bytes(size_bytes), mime="image/png")


def said(text: str, **more: Any) -> OmniOutput:
    return OmniOutput("r", 0, "text", text=text, **more)


def heard(samples: bytes, rate_hz: int = 24_000) -> OmniOutput:
    return OmniOutput("r", 2, "audio", data=wav_file(SoundKind(1, 2, rate_hz), samples), mime="audio/wav")


def ended(stage_id: int, modality: str, reason: str = "stop") -> OmniOutput:
    return OmniOutput("r", stage_id, modality, finish_reason=reason)


def answer_of(kind: type[Any], modalities: Sequence[str] = ("text",), answers: int = 1, **more: Any) -> Any:
    usage = Usage([0, 1, 2], answers)
    return kind(Exchange(), "m", Choices(modalities, answers), usage, EncoderThreads(), **more)


async def whole(answer: Any, *outputs: OmniOutput) -> dict[str, Any]:
    for output in outputs:
        await answer.add(0, output)
    body: dict[str, Any] = json.loads(await answer.body())
    return body


async def streamed(answer: Any, *outputs: OmniOutput) -> list[dict[str, Any]]:
    """Each event's choice, with its ``modality``."""
    events = [event for output in outputs for event in [each async for each in answer.events(0, output)]]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert all(event.endswith(b"\n\n") for event in events)
    return [{**chunk["choices"][0], "modality": chunk["modality"]} for chunk in chunks]


@pytest.mark.attack("A22")
async def test_a_whole_answer_is_bounded_and_a_streamed_one_keeps_nothing() -> None:
    whole_answer, stream = answer_of(WholeAnswer), answer_of(StreamedAnswer)
    picture = drawn(30 << 20)
    for _ in range(3):
        await whole_answer.add(0, picture)
    with pytest.raises(EngineFailedError, match="longer than 128 MiB"):
        await whole_answer.add(0, picture)
    sizes = {len(event) for _ in range(3) async for event in stream.events(0, picture)}
    assert min(sizes) > 40 << 20
    assert "_parts" not in vars(stream)


@pytest.mark.attack("A22")
async def test_sound_without_end_is_bounded_in_a_whole_answer_too() -> None:
    answer = answer_of(WholeAnswer, SPOKEN)
    minutes = [heard(bytes(48_000 * 600))] * 4
    with pytest.raises(EngineFailedError, match="longer than 128 MiB"):
        await whole(answer, *minutes)


async def test_pieces_of_text_that_are_taken_at_once_read_as_those_that_are_added() -> None:
    """1. pieces of text are taken; what is more than that is not
    2. a piece that makes the answer too long is not taken, and raises where it is added
    """
    answer = answer_of(WholeAnswer)
    assert [answer.take(each) for each in (said("Fo"), said("ur"))] == [True, True]
    others = (
        drawn(5),
        heard(SAMPLES),
        ended(0, "text"),
        said(""),
        OmniOutput("r", 0, "text", text="a", segment_end="stop"),
    )
    assert not any(answer.take(each) for each in others)
    (choice,) = (await whole(answer, ended(0, "text")))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Four", "stop")
    full = answer_of(WholeAnswer)
    assert full.take(said("a" * (128 << 20)))
    assert not full.take(said("a"))
    with pytest.raises(EngineFailedError, match="longer than 128 MiB"):
        await full.add(0, said("a"))


async def test_long_answers_read_as_short_ones_do() -> None:
    """They are made in a thread."""
    for size_bytes in (10, 2 << 20):
        url = f"data:image/png;base64,{base64.b64encode(bytes(size_bytes)).decode()}"
        picture = [{"type": "image_url", "image_url": {"url": url}}]
        body = await whole(answer_of(WholeAnswer), drawn(size_bytes))
        assert body["choices"][0]["message"]["content"] == picture
        (event,) = await streamed(answer_of(StreamedAnswer), drawn(size_bytes))
        assert event["delta"] == {"role": "assistant", "content": picture}


async def test_words_and_their_sound_are_one_choice() -> None:
    outputs = (said("Four"), heard(SAMPLES), ended(0, "text"), heard(SAMPLES), ended(2, "audio", "length"))
    (choice,) = (await whole(answer_of(WholeAnswer, SPOKEN), *outputs))["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    message = choice["message"]
    assert (message["content"], message["audio"]["transcript"]) == ("Four", "Four")
    assert base64.b64decode(message["audio"]["data"]) == wav_file(SoundKind(1, 2, 24_000), SAMPLES * 2)


async def test_sound_alone_has_no_words_and_a_picture_is_a_choice_of_its_own() -> None:
    (choice,) = (await whole(answer_of(WholeAnswer, ("audio",)), heard(SAMPLES), ended(2, "audio")))["choices"]
    assert (choice["message"]["content"], choice["message"]["audio"]["transcript"]) == (None, "")
    body = await whole(answer_of(WholeAnswer, SPOKEN), said("a"), drawn(5), heard(SAMPLES), ended(2, "audio"))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"]["audio"]["data"]
    assert isinstance(body["choices"][1]["message"]["content"], list)


async def test_a_stream_of_raw_samples_has_the_order_that_openai_has() -> None:
    """The name of the sound; words and samples; when it expires, alone; why it ended. All of it in choice 0."""
    outputs = (said("Fo"), heard(SAMPLES[:4]), said("ur"), ended(0, "text"), heard(SAMPLES[4:]), ended(2, "audio"))
    events = await streamed(answer_of(StreamedAnswer, SPOKEN, sound_format="pcm16"), *outputs, SUMMARY)
    deltas = [event["delta"] for event in events]
    name = deltas[0]["audio"]["id"]
    assert deltas[0] == {"role": "assistant", "content": "Fo", "audio": {"id": name, "transcript": "Fo"}}
    assert deltas[1] == {"content": "ur", "audio": {"transcript": "ur"}}
    assert [set(delta.get("audio", {})) for delta in deltas[2:]] == [{"data"}, {"data"}, {"expires_at"}, set()]
    assert "finish_reason" not in events[-2]
    assert [event["finish_reason"] for event in events if "finish_reason" in event] == [None] * 4 + ["stop"]
    assert [event["modality"] for event in events] == ["text", "text", *["audio"] * 4]
    # Put together as text, as accumulating clients do, it is base64 all the same.
    data = "".join(delta.get("audio", {}).get("data", "") for delta in deltas)
    assert base64.b64decode(data, validate=True) == SAMPLES


async def test_a_stream_of_wav_has_a_file_in_each_piece() -> None:
    events = await streamed(answer_of(StreamedAnswer, SPOKEN), heard(SAMPLES), heard(SAMPLES), ended(2, "audio"))
    files = [event["delta"]["audio"]["data"] for event in events]
    assert [base64.b64decode(file) for file in files] == [wav_file(SoundKind(1, 2, 24_000), SAMPLES)] * 2


async def test_sound_that_never_came_ends_with_its_request() -> None:
    events = await streamed(answer_of(StreamedAnswer, SPOKEN), said("no"), ended(0, "text", "length"), SUMMARY)
    assert [event["finish_reason"] for event in events] == [None, "length"]
    assert not any("expires_at" in event["delta"].get("audio", {}) for event in events)


async def test_pieces_of_several_rates_fail_the_answer() -> None:
    with pytest.raises(EngineFailedError, match="several sample rates"):
        await whole(answer_of(WholeAnswer, SPOKEN), heard(SAMPLES), heard(SAMPLES, 8000))


async def test_several_answers_keep_their_numbers_however_they_come() -> None:
    answer = answer_of(WholeAnswer, answers=3)
    for number in (2, 0, 1):
        await answer.add(number, said(f"answer {number}"))
    choices = json.loads(await answer.body())["choices"]
    assert [(each["index"], each["message"]["content"]) for each in choices] == [(n, f"answer {n}") for n in range(3)]


async def test_log_probabilities_are_of_the_drawn_token_and_the_likeliest() -> None:
    place = (TokenLogprob(7, -2.0, 3, "é"), TokenLogprob(1, -0.1, 1, "a"), TokenLogprob(2, -0.2, 2, "b"))
    output = said("é", token_ids=(7,), logprobs=(place,))
    body = await whole(answer_of(WholeAnswer, top_logprobs=2), output)
    (event,) = await streamed(answer_of(StreamedAnswer, top_logprobs=2), output)
    shown = body["choices"][0]["logprobs"]
    assert shown == event["logprobs"]
    (token,) = shown["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("é", -2.0, [0xC3, 0xA9])
    assert [each["token"] for each in token["top_logprobs"]] == ["a", "b"]
    bare = await whole(answer_of(WholeAnswer, top_logprobs=0), output)
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_a_token_without_text_is_in_the_log_probabilities_of_a_stream() -> None:
    """Such as the special token that ends the words."""
    end = said("", token_ids=(9,), logprobs=((TokenLogprob(9, -0.5, 1, "<end>"),),))
    (event,) = await streamed(answer_of(StreamedAnswer, top_logprobs=0), end)
    assert [each["token"] for each in event["logprobs"]["content"]] == ["<end>"]


@pytest.mark.attack("M5")
async def test_log_probabilities_that_were_not_asked_for_are_neither_shown_nor_kept() -> None:
    output = said("é", token_ids=(7,), logprobs=((TokenLogprob(7, -2.0, 1, "é"),),))
    for answer in (answer_of(WholeAnswer), answer_of(WholeAnswer, top_logprobs=0)):
        body = await whole(answer, output)
        assert ("logprobs" in body["choices"][0]) == (answer.top_logprobs is not None)
    (event,) = await streamed(answer_of(StreamedAnswer), output)
    assert "logprobs" not in event


@pytest.mark.attack("M5")
async def test_log_probabilities_of_a_whole_answer_are_bounded_as_they_are_sent() -> None:
    """Each has its text a second time, as a list of bytes."""
    output = said("", token_ids=(7,), logprobs=((TokenLogprob(7, -2.0, 1, "t" * (4 << 20)),),))
    answer = answer_of(WholeAnswer, top_logprobs=0)
    for _ in range(6):
        await answer.add(0, output)
    with pytest.raises(EngineFailedError, match="longer than 128 MiB"):
        await answer.add(0, output)


async def test_log_probabilities_of_several_pieces_are_one_list() -> None:
    pieces = [said(text, token_ids=(1,), logprobs=((TokenLogprob(1, -1.0, 1, text),),)) for text in "abc"]
    (choice,) = (await whole(answer_of(WholeAnswer, top_logprobs=1), *pieces))["choices"]
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a", "b", "c"]
    assert choice["logprobs"]["refusal"] is None


async def test_token_counts_come_with_each_event_where_they_are_asked_for() -> None:
    answer = answer_of(StreamedAnswer, counts_each=True)
    events = [
        event
        for output in (said("a", token_ids=(1,)), said("b", token_ids=(2, 3)))
        for event in [each async for each in answer.events(0, output)]
    ]
    counts = [json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens"] for event in events]
    assert counts == [1, 3]


#: Outputs of a stream of one request, in any order.
_OUTPUTS = st.lists(
    st.one_of(
        st.builds(
            said,
            st.text(max_size=9) | st.just("x" * 5000),
            token_ids=st.sampled_from([(), (1,), (1, 2)]),
            replica=st.sampled_from(["0/0", "0/1"]),
            received_at_s=st.floats(0, 9),
            replicas=st.sampled_from([(), ("0/2",)]),
        ),
        st.builds(OmniOutput, st.just("r"), st.just(1), st.just("text"), text=st.text(max_size=3)),
        st.sampled_from([drawn(8), heard(SAMPLES), ended(0, "text"), ended(1, "text"), ended(2, "audio"), SUMMARY]),
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(_OUTPUTS, st.sampled_from([("text",), SPOKEN]), st.booleans(), st.sampled_from([None, 0]))
async def test_pieces_that_are_written_at_once_are_the_events_that_the_others_are(
    outputs: list[OmniOutput], modalities: Sequence[str], counts_each: bool, top_logprobs: int | None
) -> None:
    """Whatever comes between them: the same bytes, the same counts, the same replicas."""
    short, long = (
        answer_of(StreamedAnswer, modalities, counts_each=counts_each, top_logprobs=top_logprobs) for _ in range(2)
    )
    short.head, short.exchange.request_id = long.head, long.exchange.request_id
    sent: list[bytes] = []

    def write(event: bytes) -> bool:
        sent.append(event)
        return True

    for output in outputs:
        if not short.take(write, output):
            sent += [event async for event in short.events(0, output)]
    assert sent == [event for output in outputs for event in [each async for each in long.events(0, output)]]
    assert short.usage.shown() == long.usage.shown()
    assert (short.exchange.replicas, short.received_at_s) == (long.exchange.replicas, long.received_at_s)


async def test_all_pieces_of_text_but_the_first_may_be_written_at_once_unless_the_writer_refuses() -> None:
    answer = answer_of(StreamedAnswer)
    sent: list[bytes] = []
    assert not answer.take(lambda _event: True, said("one"))
    (first,) = [event async for event in answer.events(0, said("one"))]
    assert answer.take(lambda event: not sent.append(event), said("two"))  # type: ignore[func-returns-value]
    assert json.loads(sent[0].removeprefix(b"data: "))["choices"][0]["delta"] == {"content": "two"}
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == {"role": "assistant", "content": "one"}
    before = answer.usage.shown()
    assert not answer.take(lambda _event: False, said("three", token_ids=(1,)))
    assert answer.usage.shown() == before
