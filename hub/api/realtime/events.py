"""What happens in a session of /v1/realtime, besides events of the client, and what is to be done by that. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hub.api.realtime.schema import ClientEvent
from hub.api.realtime.settings import SessionSettings
from omni_discovery.errors import OmniError
from omni_discovery.wire import ToolCall

# ---- what happens, besides events of the client


@dataclass(frozen=True, slots=True)
class SoundCame:
    """Sound of the client; ``voiced`` is what the detector says of each further 20 ms, None where it is off."""

    samples: bytes
    voiced: Sequence[bool] | None
    #: The client's.
    event_id: str | None = None


@dataclass(frozen=True, slots=True)
class SoundsEncoded:
    """The sounds of an item are files now, each with its format."""

    item_id: str
    files: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class WordsMade:
    """The response has words."""

    response_id: str
    text: str


@dataclass(frozen=True, slots=True)
class SoundMade:
    """The response has sound."""

    response_id: str
    samples: bytes


@dataclass(frozen=True, slots=True)
class ResponseEnded:
    """The response has ended. ``error`` None: as it should, or at its ``max_output_tokens``.

    ``calls`` are the functions that it calls, behind its words.
    """

    response_id: str
    usage: Mapping[str, Any] | None = None
    is_cut: bool = False
    error: OmniError | None = None
    calls: Sequence[ToolCall] = ()


@dataclass(frozen=True, slots=True)
class EventFailed:
    """An event of the client can't be followed; ``event_id`` is the client's."""

    error: OmniError
    event_id: str | None = None


RealtimeEvent = ClientEvent | SoundCame | SoundsEncoded | WordsMade | SoundMade | ResponseEnded | EventFailed


# ---- what is to be done


@dataclass(frozen=True, slots=True)
class SendEvent:
    """Send an event to the client."""

    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EncodeSounds:
    """Have these samples made files; then SoundsEncoded."""

    item_id: str
    sounds: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class BeginResponse:
    """Ask the pipeline; then WordsMade and SoundMade, and at last ResponseEnded."""

    response_id: str
    messages: list[dict[str, Any]]
    settings: SessionSettings
    #: The memory of the items of the conversation and the functions that it may be given: what a short event can send.
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EndResponse:
    """Stop to make the response that runs."""

    response_id: str


RealtimeAction = SendEvent | EncodeSounds | BeginResponse | EndResponse
