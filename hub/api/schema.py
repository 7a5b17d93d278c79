"""What a chat completion request may hold, checked at the door. The names are OpenAI's, and vLLM-Omni's where it adds.

A field that this server would have to ignore silently is refused instead, by its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from hub.api.neutral import NeutralFields, check_neutral
from hub.api.parts import check_messages
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import MAX_PRIORITY

#: Longest request body that is taken, and up to which length one is read so that its sender hears why it was not. A
#: message to a replica has to hold it (MAX_HEAD_BYTES), with what was answered already where another one goes on.
MAX_BODY_BYTES: Final = 3 << 20
MAX_DROPPED_BYTES: Final = 64 << 20

_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``include_usage`` asks for one last chunk with the token counts."""

    include_usage: bool = False


class ChatRequest(NeutralFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions.

    ``sampling_params_list`` holds one mapping for each stage of the pipeline and wins over all else.
    """

    messages: list[dict[str, Any]]
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    modalities: Annotated[list[str], msgspec.Meta(min_length=1, max_length=8)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    sampling_params_list: list[dict[str, Any]] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    #: As vLLM has it: lower goes first where requests wait.
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    #: What runs through the first stage beside the messages, by role: a negative prompt for one.
    companions: dict[str, str] = msgspec.field(default_factory=dict)
    #: Whether the answer is to say where its time went; a stream says it at its end.
    include_timings: bool = False
    #: Whether stages are to work on each other's pieces; None: as the pipeline has it.
    async_chunk: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def text_params(self) -> dict[str, Any]:
        """What the body says about sampling text, under the names that a text stage takes."""
        named = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_completion_tokens or self.max_tokens,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop": self.stop,
        }
        return {name: value for name, value in named.items() if value is not None}


_decoder = msgspec.json.Decoder(ChatRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Read and check a request body. Raise InvalidRequestError that names the field."""
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        # The decoder names the place already; its quotes are for code.
        raise InvalidRequestError(f"the body can't be used: {error}".replace("`", "'")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    check_neutral(request)
    if not request.messages:
        raise InvalidRequestError("'messages' is empty; send at least one user message")
    check_messages(request.messages)
    return request
