"""The events that a client of /v1/realtime sends: their fields and their checks. Pure.

The names are OpenAI's. What is not served here is refused by its name, unless it has a value that asks for nothing. A
session and a response may also have the flat fields of OpenAI's beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from hub.api.generation.fields import Voice, is_same
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import check_text

_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | Literal["inf"]
_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Modalities = Annotated[list[Literal["text", "audio"]], msgspec.Meta(min_length=1, max_length=2)]
#: Milliseconds that a client may name.
_Ms = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of which each may be left out: it is UNSET then, which is not the same as null."""


class TurnDetection(_Fields, frozen=True):
    """``server_vad``: the hub finds where speech begins and ends."""

    type: Literal["server_vad"]
    #: The higher, the surer: of the last 160 ms, the part that must be voice.
    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    #: How much is kept of what came before the first voice.
    prefix_padding_ms: Annotated[int, msgspec.Meta(ge=0, le=5000)] = 300
    #: The silence that ends a turn.
    silence_duration_ms: Annotated[int, msgspec.Meta(ge=20, le=30_000)] = 500
    #: Whether the end of a turn begins a response.
    create_response: bool = True
    #: Whether speech ends the response that is being made.
    interrupt_response: bool = True
    idle_timeout_ms: Any = None


class SoundType(_Fields, frozen=True):
    """What the samples are; the one that is served."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24000] = 24000


class SessionInput(_Fields, frozen=True):
    """``session.audio.input``."""

    format: SoundType | UnsetType = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET
    noise_reduction: Any = None
    transcription: Any = None


class SessionOutput(_Fields, frozen=True):
    """``session.audio.output``, and that of a response."""

    format: SoundType | UnsetType = UNSET
    voice: _Name | Voice | UnsetType | None = UNSET
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=1.5)] | UnsetType = UNSET


class SessionAudio(_Fields, frozen=True):
    """``session.audio``."""

    input: SessionInput | UnsetType = UNSET
    output: SessionOutput | UnsetType = UNSET


class SessionTool(_Fields, frozen=True):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class SessionToolChoice(_Fields, frozen=True):
    """The one function that must be called."""

    type: Literal["function"]
    name: _Word


class _Asked(_Fields, frozen=True):
    """What a session and a response may both set."""

    instructions: Annotated[str, msgspec.Meta(max_length=1 << 20)] | UnsetType = UNSET
    output_modalities: _Modalities | UnsetType = UNSET
    max_output_tokens: _Tokens | UnsetType | None = UNSET
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | UnsetType | None = UNSET
    tools: list[SessionTool] | UnsetType | None = UNSET
    tool_choice: Literal["auto", "none", "required"] | SessionToolChoice | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    prompt: Any = None
    reasoning: Any = None
    # OpenAI's beta.
    modalities: _Modalities | UnsetType = UNSET
    voice: _Name | Voice | UnsetType | None = UNSET
    output_audio_format: Literal["pcm16"] | UnsetType = UNSET


class SessionFields(_Asked, frozen=True):
    """``session`` of ``session.update``."""

    #: A transcription session has another type.
    type: Literal["realtime"] = "realtime"
    audio: SessionAudio | UnsetType = UNSET
    truncation: Literal["auto", "disabled"] | UnsetType | None = UNSET
    include: Any = None
    tracing: Any = None
    # What a client sends back of the session that it was shown.
    model: _Name | None = None
    object: Any = None
    id: Any = None
    expires_at: Any = None
    # OpenAI's beta.
    turn_detection: TurnDetection | UnsetType | None = UNSET
    max_response_output_tokens: _Tokens | UnsetType | None = UNSET
    input_audio_format: Literal["pcm16"] | UnsetType = UNSET
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=1.5)] | UnsetType = UNSET
    input_audio_noise_reduction: Any = None
    input_audio_transcription: Any = None


#: The neutral values of each field that is not served, in addition to null.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "prompt": (),
    "reasoning": (),
    "include": ([],),
    "tracing": (),
    "noise_reduction": (),
    "transcription": (),
    "input_audio_noise_reduction": (),
    "input_audio_transcription": (),
    "idle_timeout_ms": (),
}
#: Why, where one may expect it.
_WHY: Final[Mapping[str, str]] = {
    "transcription": "no stage writes down what it hears. Leave it out, or send null",
    "input_audio_transcription": "no stage writes down what it hears. Leave it out, or send null",
}


def check_served(fields: msgspec.Struct, where: str) -> None:
    """Raise InvalidRequestError for a field, also of a struct inside, with a value that is not served here."""
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        if isinstance(value, msgspec.Struct):
            check_served(value, f"{where}.{name}")
        neutral = NEUTRAL.get(name)
        if neutral is not None and value is not None and not any(is_same(value, each) for each in neutral):
            raise InvalidRequestError(f"'{where}.{name}' is not served here: {_WHY.get(name, 'leave it out')}")


class MessagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a message. ``text``, ``audio`` are what OpenAI's beta calls ``output_text`` and ``output_audio``."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio", "text", "audio"]
    text: str | None = None
    #: Samples in base64.
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: str | None = None


class _NewItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    id: _Word | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class NewMessage(_NewItem, frozen=True, tag="message"):
    """A message."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[MessagePart], msgspec.Meta(min_length=1, max_length=256)]


class NewCall(_NewItem, frozen=True, tag="function_call"):
    """What an earlier answer has called."""

    name: _Word
    arguments: str
    call_id: _Word | None = None


class NewCallOutput(_NewItem, frozen=True, tag="function_call_output"):
    """What a tool has said."""

    call_id: _Word
    output: str


class ItemReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="item_reference"):
    """An item of the conversation, by its id."""

    id: _Word


NewItem = NewMessage | NewCall | NewCallOutput


class ResponseOutput(_Fields, frozen=True):
    """``response.audio``."""

    output: SessionOutput | UnsetType = UNSET


class ResponseFields(_Asked, frozen=True):
    """``response`` of ``response.create``: what is not set is as in the session."""

    audio: ResponseOutput | UnsetType = UNSET
    #: ``none``: neither the conversation nor its items have to do with it, unless ``input`` names some.
    conversation: Literal["auto", "none"] | None = None
    input: Annotated[list[NewItem | ItemReference], msgspec.Meta(max_length=1000)] | None = None
    metadata: (
        Annotated[dict[_Word, Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)] | None
    ) = None
    max_response_output_tokens: _Tokens | UnsetType | None = UNSET


#: Characters of an event's id.
_MOST_ID: Final = 512


class _ClientEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    event_id: Annotated[str, msgspec.Meta(max_length=_MOST_ID)] | None = None


class SessionUpdate(_ClientEvent, frozen=True, tag="session.update"):
    """Change the session."""

    session: SessionFields


class BufferAppend(_ClientEvent, frozen=True, tag="input_audio_buffer.append"):
    """More sound: 16-bit samples in base64."""

    audio: str


class BufferCommit(_ClientEvent, frozen=True, tag="input_audio_buffer.commit"):
    """Make the buffer an item."""


class BufferClear(_ClientEvent, frozen=True, tag="input_audio_buffer.clear"):
    """Forget the buffer."""


class ItemCreate(_ClientEvent, frozen=True, tag="conversation.item.create"):
    """Add an item; ``previous_item_id`` None: at the end, ``root``: at the beginning."""

    item: NewItem
    previous_item_id: _Word | None = None


class ItemRetrieve(_ClientEvent, frozen=True, tag="conversation.item.retrieve"):
    """Show an item."""

    item_id: _Word


class ItemDelete(_ClientEvent, frozen=True, tag="conversation.item.delete"):
    """Forget an item."""

    item_id: _Word


class ItemTruncate(_ClientEvent, frozen=True, tag="conversation.item.truncate"):
    """Forget what was not heard of a spoken answer."""

    item_id: _Word
    content_index: Annotated[int, msgspec.Meta(ge=0)]
    audio_end_ms: _Ms


class ResponseCreate(_ClientEvent, frozen=True, tag="response.create"):
    """Begin a response."""

    response: ResponseFields | None = None


class ResponseCancel(_ClientEvent, frozen=True, tag="response.cancel"):
    """End the response that is being made."""

    response_id: str | None = None


ClientEvent = (
    SessionUpdate
    | BufferAppend
    | BufferCommit
    | BufferClear
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)
_decoder: msgspec.json.Decoder[ClientEvent] = msgspec.json.Decoder(ClientEvent)


class _Head(msgspec.Struct, frozen=True):
    """What a wrong event may still tell: not decoded, for it may be anything, and cost as much as the whole."""

    type: msgspec.Raw = msgspec.Raw()
    event_id: msgspec.Raw = msgspec.Raw()


_head_decoder = msgspec.json.Decoder(_Head)
_TYPES: Final = frozenset(str(each.__struct_config__.tag) for each in ClientEvent.__args__)


def parse_event(text: str | None) -> ClientEvent:
    """Read and check an event; ``text`` None: its frame was binary. Raise InvalidRequestError that names the field."""
    if text is None:
        raise InvalidRequestError("an event is JSON text, not binary; sound is sent in base64")
    body = text.encode("utf-8", "surrogatepass")
    check_text(body)
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        kind = _text_in(_head_of(text).type)
        if kind is not None and kind not in _TYPES:
            known = ", ".join(sorted(_TYPES))
            raise InvalidRequestError(f"the event {kind[:100]!r} is not known here; there are {known}") from error
        raise InvalidRequestError(f"the event can't be used: {error}".replace("`", "'")) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"the event is not JSON: {error}") from error


def _head_of(text: str | None) -> _Head:
    try:
        return _head_decoder.decode((text or "").encode("utf-8", "surrogatepass"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _Head()


def _text_in(raw: msgspec.Raw) -> str | None:
    """The text that this is, if it is a short one."""
    written = bytes(raw)
    # Its characters may all be escaped: six bytes each, and twelve beyond the first 65 536.
    if not written.startswith(b'"') or len(written) > _MOST_ID * 12 + 2:
        return None
    try:
        return msgspec.json.decode(written, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def id_of(text: str | None) -> str | None:
    """The id that a client has given to a wrong event, for the error; None without a usable one."""
    found = _text_in(_head_of(text).event_id)
    return found if found is not None and len(found) <= _MOST_ID else None
