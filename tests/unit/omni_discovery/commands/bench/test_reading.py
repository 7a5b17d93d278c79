"""Streamed answers, as they are read."""

from __future__ import annotations

import base64
import io
import json
import wave
from typing import Any

import pytest

from omni_discovery.commands.bench.reading import ChatReading, SpeechReading, error_of, wav_seconds


def event(*deltas: dict[str, Any], **more: Any) -> bytes:
    body = {"choices": [{"index": 0, "delta": delta} for delta in deltas], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def wav(seconds: float) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writing:
        writing.setnchannels(1)
        writing.setsampwidth(2)
        writing.setframerate(24_000)
        writing.writeframes(b"\0\0" * int(seconds * 24_000))
    return base64.b64encode(file.getvalue()).decode()


def test_words_sound_and_pictures_are_told_apart_by_when_they_came() -> None:
    reading = ChatReading()
    reading.take(event({"role": "assistant", "content": ""}), 1.0)
    reading.take(event({"content": "hel"}), 2.0)
    reading.take(event({"content": "lo"}), 2.5)
    reading.take(event({"audio": {"data": wav(0.25)}}), 3.0)
    reading.take(event({"content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}), 4.0)
    reading.take(event(usage={"completion_tokens": 7}) + b"data: [DONE]\n\n", 4.5)
    reading.end()
    assert reading.firsts_s == {"text": 2.0, "audio": 3.0, "image": 4.0}
    assert list(reading.gaps_s) == [0.5, 0.5, 1.0]
    assert (reading.characters, reading.tokens, reading.pictures, reading.failure) == (5, 7, 1, "")
    assert reading.sound_s == pytest.approx(0.25)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_are_the_same_however_the_network_cuts_them(size: int) -> None:
    stream = b": beat\r\n" + event({"content": "\u00e9\u00e8"}) + event({"content": "x"}) + b"data: [DONE]\n\n"
    reading = ChatReading()
    for begin in range(0, len(stream), size):
        reading.take(stream[begin : begin + size], float(begin))
    reading.end()
    assert (reading.characters, reading.outputs, reading.failure) == (3, 2, "")


def test_an_answer_that_ends_without_its_last_word_was_cut_off() -> None:
    reading = ChatReading()
    reading.take(event({"content": "x"}), 1.0)
    reading.end()
    assert reading.failure == "cut off"


def test_an_error_in_the_stream_is_a_failure_by_its_code_with_its_message() -> None:
    reading = ChatReading()
    reading.take(event({"content": "x"}), 1.0)
    reading.take(b'data: {"error": {"code": "replica_lost", "message": "gone"}}\n\ndata: [DONE]\n\n', 2.0)
    reading.end()
    assert (reading.failure, reading.message) == ("in the stream: replica_lost", "gone")


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'"x"', b'{"choices": [1]}', b'{"choices": 3}', b"\xff", b'{"usage": 1}']
)
def test_what_is_no_event_is_a_failure_and_no_crash(line: bytes) -> None:
    reading = ChatReading()
    reading.take(b"data: " + line + b"\n\n", 1.0)
    assert reading.failure == "unreadable answer"


def test_raw_samples_are_sound_of_their_length() -> None:
    reading = SpeechReading()
    reading.take(b"\0" * 24_000, 1.0)
    reading.take(b"", 1.5)
    reading.take(b"\0" * 24_000, 2.0)
    reading.end()
    assert (reading.firsts_s, list(reading.gaps_s), reading.sound_s) == ({"audio": 1.0}, [1.0], 1.0)


@pytest.mark.parametrize("data", ["", "%%%%", base64.b64encode(b"RIFF" + b"\0" * 60).decode(), "AAAA" * 30])
def test_what_is_no_wav_file_has_no_sound(data: str) -> None:
    assert wav_seconds(data) == 0.0


def test_an_error_body_is_named_by_its_code_else_by_its_type() -> None:
    assert error_of({"error": {"code": "overloaded", "type": "x", "message": "full"}}) == ("overloaded", "full")
    assert error_of({"error": {"type": "server_error"}}) == ("server_error", "")
    assert error_of({"error": "text"}) == ("", "")
