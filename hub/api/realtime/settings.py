"""The settings of a session: what they are at first, how a client changes them, and how they are shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from hub.api.generation.fields import Voice, name_of_voice
from hub.api.realtime.schema import ResponseFields, SessionFields, SessionOutput, TurnDetection, check_served
from hub.api.realtime.tools import NO_SESSION_TOOLS, SessionTools
from omni_discovery.errors import InvalidRequestError

_Value = TypeVar("_Value")

_FORMAT: Final = {"type": "audio/pcm", "rate": 24000}
#: How a voice is shown that nobody has chosen: the model's own.
_OWN_VOICE: Final = "default"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the hub and its pipeline can do. ``speaks``, ``writes``: whether sound and text come out."""

    model: str
    speaks: bool
    writes: bool
    #: Why there is no voice detection; empty: there is.
    no_detection: str = ""
    #: Why no functions can be called; empty: they can.
    no_tools: str = ""

    def modality(self, asked: Sequence[str], where: str) -> str:
        """What a response is made of: ``audio``, which has its words as a transcript, or ``text``.

        Raise InvalidRequestError for what does not come out of this pipeline.
        """
        wanted = "audio" if "audio" in asked else "text"
        if not (self.speaks if wanted == "audio" else self.writes):
            other = "text" if wanted == "audio" else "audio"
            raise InvalidRequestError(f"'{where}': this pipeline puts out no {wanted}; ask for ['{other}']")
        return wanted


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings in force; those of a response are a copy."""

    instructions: str = ""
    modality: str = "audio"
    #: None: the model's own.
    voice: str | None = None
    speed: float = 1.0
    #: None: as many as the model makes.
    max_tokens: int | None = None
    temperature: float | None = None
    #: None: the client says where its turns end.
    turn_detection: TurnDetection | None = None
    #: Whether the oldest items give way where a request, or the conversation, would be too long.
    truncates: bool = True
    #: What the model may call.
    tools: SessionTools = NO_SESSION_TOOLS

    @property
    def shown_tokens(self) -> int | str:
        """``max_tokens``, as clients see it."""
        return "inf" if self.max_tokens is None else self.max_tokens

    @property
    def shown_output(self) -> dict[str, Any]:
        """The output's format and voice, as clients see them."""
        return {"format": dict(_FORMAT), "voice": self.voice or _OWN_VOICE}

    def shown(self, session_id: str, model: str, expires_at: int) -> dict[str, Any]:
        """The session as clients see it; ``expires_at`` is wall-clock seconds."""
        detection = None if self.turn_detection is None else msgspec.to_builtins(self.turn_detection)
        heard = {"format": dict(_FORMAT), "noise_reduction": None, "transcription": None, "turn_detection": detection}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "model": model,
            "output_modalities": [self.modality],
            "instructions": self.instructions,
            **self.tools.shown(),
            "max_output_tokens": self.shown_tokens,
            "truncation": "auto" if self.truncates else "disabled",
            "expires_at": expires_at,
            "audio": {"input": heard, "output": {**self.shown_output, "speed": self.speed}},
        }


def first_settings(abilities: Abilities) -> SessionSettings:
    """What a session begins with."""
    detection = None if abilities.no_detection else TurnDetection(type="server_vad")
    return SessionSettings(modality="audio" if abilities.speaks else "text", turn_detection=detection)


def updated(settings: SessionSettings, asked: SessionFields, abilities: Abilities) -> SessionSettings:
    """The settings after ``session.update``. Raise InvalidRequestError; then nothing of it holds."""
    check_served(asked, "session")
    if asked.model not in (None, "", abilities.model):
        raise InvalidRequestError(f"'session.model' can't change: this session is with {abilities.model!r}")
    audio = None if asked.audio is UNSET else asked.audio
    given = None if audio is None or audio.input is UNSET else audio.input
    detection = _first(UNSET if given is None else given.turn_detection, asked.turn_detection)
    if detection is not UNSET:
        if detection is not None and abilities.no_detection:
            raise InvalidRequestError(f"'session.audio.input.turn_detection': {abilities.no_detection}")
        settings = replace(settings, turn_detection=detection)
    if asked.truncation is not UNSET:
        settings = replace(settings, truncates=asked.truncation != "disabled")
    if asked.speed is not UNSET:
        settings = replace(settings, speed=asked.speed)
    output = None if audio is None or audio.output is UNSET else audio.output
    return _with_asked(settings, asked, output, abilities, "session")


def for_response(settings: SessionSettings, asked: ResponseFields, abilities: Abilities) -> SessionSettings:
    """The settings of one response. Raise InvalidRequestError."""
    check_served(asked, "response")
    output = None if asked.audio is UNSET or asked.audio.output is UNSET else asked.audio.output
    return _with_asked(settings, asked, output, abilities, "response")


def _with_asked(
    settings: SessionSettings,
    asked: SessionFields | ResponseFields,
    output: SessionOutput | None,
    abilities: Abilities,
    where: str,
) -> SessionSettings:
    modalities = _first(asked.output_modalities, asked.modalities)
    if modalities is not UNSET:
        settings = replace(settings, modality=abilities.modality(modalities, f"{where}.output_modalities"))
    voice = _first(UNSET if output is None else output.voice, asked.voice)
    if voice is not UNSET:
        settings = replace(settings, voice=_voice_of(voice))
    tokens = _first(asked.max_output_tokens, asked.max_response_output_tokens)
    if tokens is not UNSET:
        settings = replace(settings, max_tokens=None if tokens in {None, "inf"} else int(tokens))
    if output is not None and output.speed is not UNSET:
        settings = replace(settings, speed=output.speed)
    if asked.instructions is not UNSET:
        settings = replace(settings, instructions=asked.instructions)
    if asked.temperature is not UNSET:
        settings = replace(settings, temperature=asked.temperature)
    return replace(settings, tools=settings.tools.updated(asked, where, abilities.no_tools))


def _voice_of(voice: str | Voice | None) -> str | None:
    return name_of_voice(voice)


def _first(value: _Value | UnsetType, other: _Value | UnsetType) -> _Value | UnsetType:
    """The first of two that is set."""
    return other if value is UNSET else value
