"""The settings of a session: both shapes that clients send, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.realtime.schema import ResponseCreate, SessionUpdate, parse_event
from hub.api.realtime.settings import Abilities, SessionSettings, first_settings, for_response, updated
from omni_discovery.errors import InvalidRequestError

BOTH = Abilities("omni", speaks=True, writes=True)
FIRST = first_settings(BOTH)


def update(settings: SessionSettings = FIRST, abilities: Abilities = BOTH, **session: Any) -> SessionSettings:
    event = parse_event(json.dumps({"type": "session.update", "session": session}))
    assert isinstance(event, SessionUpdate)
    return updated(settings, event.session, abilities)


def respond(**response: Any) -> SessionSettings:
    event = parse_event(json.dumps({"type": "response.create", "response": response}))
    assert isinstance(event, ResponseCreate)
    assert event.response is not None
    return for_response(FIRST, event.response, BOTH)


def test_the_shape_of_today_and_that_of_the_beta_come_to_the_same() -> None:
    detection = {"type": "server_vad", "threshold": 0.7, "silence_duration_ms": 200}
    today = update(
        type="realtime",
        instructions="be brief",
        output_modalities=["audio"],
        max_output_tokens=50,
        audio={
            "input": {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": detection},
            "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ann", "speed": 1.25},
        },
    )
    beta = update(
        instructions="be brief",
        modalities=["text", "audio"],
        max_response_output_tokens=50,
        input_audio_format="pcm16",
        output_audio_format="pcm16",
        turn_detection=detection,
        voice="ann",
        speed=1.25,
    )
    assert today == beta
    assert (today.voice, today.max_tokens, today.speed, today.modality) == ("ann", 50, 1.25, "audio")
    assert today.turn_detection is not None
    assert (today.turn_detection.threshold, today.turn_detection.prefix_padding_ms) == (0.7, 300)


def test_what_is_left_out_stays_and_null_is_not_the_same() -> None:
    changed = update(voice="ann", instructions="be brief", max_output_tokens=5)
    assert update(changed) == changed
    assert update(changed, turn_detection=None).turn_detection is None
    assert update(changed, max_output_tokens=None).max_tokens is None
    assert update(changed, max_output_tokens="inf", voice={"id": "bob"}).voice == "bob"
    assert update(changed, voice="default").voice is None
    assert update(update(changed, temperature=0.7)).temperature == 0.7
    assert update(update(changed, temperature=0.7), temperature=None).temperature is None


def test_what_is_shown_can_be_sent_back() -> None:
    changed = update(voice="ann", instructions="be brief", turn_detection=None, max_output_tokens=5)
    assert update(FIRST, BOTH, **changed.shown("sess_1", "omni", 99)) == changed
    assert update(FIRST, BOTH, **FIRST.shown("sess_1", "omni", 99)) == FIRST


@pytest.mark.parametrize(
    ("session", "said"),
    [
        ({"prompt": {"id": "pmpt_1"}}, "'session.prompt' is not served here"),
        ({"audio": {"input": {"transcription": {"model": "w"}}}}, "'session.audio.input.transcription' is not served"),
        ({"input_audio_transcription": {"model": "w"}}, "no stage writes down what it hears"),
        ({"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}, "noise_reduction' is not served"),
        ({"turn_detection": {"type": "server_vad", "idle_timeout_ms": 6000}}, "idle_timeout_ms' is not served"),
        ({"model": "other"}, "this session is with 'omni'"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(session: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        update(**session)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "session",
    [
        {"turn_detection": {"type": "semantic_vad"}},
        {"audio": {"input": {"format": {"type": "audio/pcmu"}}}},
        {"input_audio_format": "g711_ulaw"},
        {"audio": {"output": {"speed": 9}}},
        {"type": "transcription"},
        {"colour": 1},
    ],
)
def test_what_is_unknown_is_refused_by_the_decoder(session: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="can't be used"):
        update(**session)


def test_a_response_differs_from_its_session_only_in_what_it_names() -> None:
    asked = respond(instructions="shout", audio={"output": {"voice": "bob"}}, output_modalities=["text"])
    assert (asked.instructions, asked.voice, asked.modality) == ("shout", "bob", "text")
    assert respond() == FIRST
    with pytest.raises(InvalidRequestError, match=r"'response\.prompt' is not served"):
        respond(prompt={"id": "pmpt_1"})


def test_a_pipeline_can_only_be_asked_for_what_it_makes() -> None:
    sound = Abilities("voice", speaks=True, writes=False)
    with pytest.raises(InvalidRequestError, match="puts out no text; ask for"):
        update(first_settings(sound), sound, output_modalities=["text"])
