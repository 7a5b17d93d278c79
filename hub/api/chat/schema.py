"""The body of a chat completion request: its fields and their checks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from hub.api.audio.encoder import check_sound
from hub.api.chat.messages import NO_LINKS, check_messages
from hub.api.generation.body import decode_body
from hub.api.generation.fields import (
    TextFields,
    Voice,
    check_neutral,
    logprobs_asked,
    name_of_voice,
    stage_params,
    voice_params,
)
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.media_links import MediaLinks

_Word = Annotated[str, msgspec.Meta(max_length=64)]


class ChatSound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How sound is to be put out."""

    voice: _Word | Voice | None = None
    format: _Word = "wav"


class Processing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client may say of how its files are processed, as vLLM names it."""

    #: Whether the sound of its videos is heard too.
    use_audio_in_video: bool = False


class ChatRequest(TextFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    modalities: Annotated[list[str], msgspec.Meta(min_length=1, max_length=8)] | None = None
    audio: ChatSound | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    #: Further prompts for the first stage, by role, such as a negative prompt.
    companions: dict[str, str] = msgspec.field(default_factory=dict)
    #: As vLLM-Omni names them; ``audio.voice`` is the same as ``speaker``.
    speaker: _Word | None = None
    language: _Word | None = None
    mm_processor_kwargs: Processing | None = None

    # Not served here: `check_neutral` checks that they ask for nothing.
    best_of: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def text_params(self) -> dict[str, Any]:
        """See TextFields."""
        longest = self.max_completion_tokens or self.max_tokens
        return super().text_params() | ({} if longest is None else {"max_tokens": longest})

    def inputs(self) -> dict[str, Any]:
        """What the first stage gets."""
        told = self.mm_processor_kwargs
        if told is None or not told.use_audio_in_video:
            return {"messages": self.messages}
        return {"messages": self.messages, "mm_processor_kwargs": msgspec.structs.asdict(told)}

    @property
    def sound_format(self) -> str:
        """The format of sound; where nothing is said of it, WAV."""
        return "wav" if self.audio is None else self.audio.format


#: The neutral values of each field, in addition to null.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (False, True),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_decoder = msgspec.json.Decoder(ChatRequest)


def parse_chat(body: bytes, links: MediaLinks = NO_LINKS) -> ChatRequest:
    """Read and check a request body; ``links`` are allowed. Raise InvalidRequestError that names the field."""
    request = decode_body(_decoder, body)
    check_neutral(request, NEUTRAL)
    check_messages(request.messages, links)
    if request.audio is not None:
        check_sound(request.audio.format, "audio.format")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("'top_logprobs' needs 'logprobs': true")
    return request


def chat_params(deploy: DeployConfig, chat: ChatRequest) -> dict[int, dict[str, Any]]:
    """The parameters of each stage. Raise InvalidRequestError."""
    voice = chat.speaker or name_of_voice(chat.audio.voice if chat.audio is not None else None)
    more = voice_params(deploy, {"speaker": voice, "language": chat.language})
    if chat.logprobs:
        for stage_id, each in logprobs_asked(deploy, chat.modalities, chat.top_logprobs or 0).items():
            more.setdefault(stage_id, {}).update(each)
    return stage_params(deploy, chat, chat.text_params(), more, chat.n or 1)


def refuse_embeddings(stages: Sequence[StageConfig], modalities: Sequence[str] | None) -> None:
    """Raise InvalidRequestError if a chat would be answered with an embedding, which a message can't hold."""
    stage = next((stage for stage in stages if stage.final_output == "embedding"), None)
    if stage is not None and (modalities is None or "embedding" in modalities):
        others = sorted({each.final_output for each in stages} - {"embedding", "none"})
        hint = f", or ask for 'modalities' {others} only" if others else ""
        raise InvalidRequestError(
            f"stage {stage.stage_id} makes embeddings, which are no part of a chat: ask POST /v1/embeddings of a hub "
            f"with --api vllm{hint}"
        )
