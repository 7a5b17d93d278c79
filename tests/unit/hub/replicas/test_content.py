"""Modality and type of a replica's output reach clients as they are: only known ones pass."""

from __future__ import annotations

from typing import Any

import pytest

from hub.replicas.content import flaw_of_content
from omni_discovery import wire


def flaw(modality: str, mime: str, attachments: int) -> str:
    chunk = wire.Chunk(epoch=1, request_id="r", seq=0, modality=modality, queue_length=0, mime=mime)
    return flaw_of_content(chunk, attachments)


@pytest.mark.parametrize(
    ("modality", "mime", "attachments"),
    [
        ("text", "", 0),
        ("image", "image/png", 2),
        ("audio", "audio/wav", 1),
        ("audio", "", 0),
        ("video", "video/mp4", 1),
        ("embedding", "application/x-npy", 1),
    ],
)
def test_what_engines_put_out_passes(modality: str, mime: str, attachments: int) -> None:
    assert flaw(modality, mime, attachments) == ""


@pytest.mark.attack("H10")
@pytest.mark.parametrize(
    ("modality", "mime", "attachments", "said"),
    [
        ("video", "video/webm", 1, "its video is of type 'video/webm', where 'video/mp4' is due"),
        ("summary", "", 0, "it put out 'summary', which is none of text, image, audio, video, embedding"),
        ("IMAGE", "image/png", 1, "it put out 'IMAGE'"),
        ("image", "text/html\r\nX-Evil: 1", 1, r"its image is of type 'text/html\r\nX-Evil: 1', where 'image/png' is"),
        ("image", "image/svg+xml", 0, "its image is of type 'image/svg+xml'"),
        ("image", "", 1, "its image is of type ''"),
        ("audio", "image/png", 1, "where 'audio/wav' is due"),
        ("text", "text/html", 0, "where 'none' is due"),
        ("text", "", 1, "its text came with a file"),
    ],
)
def test_other_kinds_and_types_are_named(modality: str, mime: str, attachments: int, said: str) -> None:
    assert said in flaw(modality, mime, attachments)
    assert len(flaw("m" * 256, "", 0)) < 200
    for told in (flaw("m" * 256, "", 0), flaw("image", "m" * 256, 1)):
        assert repr(wire.shortened("m" * 256, 40)) in told


@pytest.mark.attack("M5")
def test_log_probabilities_are_of_the_tokens_that_are_there() -> None:
    place = (wire.TokenLogprob(1, -0.5, 1, "a"),)

    def of(places: int, tokens: int) -> str:
        about: Any = {"epoch": 1, "request_id": "r", "seq": 0, "modality": "text", "queue_length": 0}
        return flaw_of_content(wire.Chunk(**about, logprobs=(place,) * places, token_ids=(1,) * tokens), 0)

    assert [of(2, 2), of(0, 2), of(0, 0)] == [""] * 3
    assert of(15_000, 1) == "it gave logprobs of 15000 tokens where there are 1"
    assert of(1, 0) != ""


def test_other_messages_have_no_content() -> None:
    assert flaw_of_content(wire.Accepted(epoch=1, request_id="r", attempt=0, queue_length=0), 0) == ""
