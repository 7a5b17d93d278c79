"""What a chat completion request may hold, checked at the door. The names are OpenAI's, and vLLM-Omni's where it adds.

A field that this server would have to ignore silently is refused instead, by its name.

Fields of a chat completion request that this server does not serve, and what in them asks for nothing.

OpenAI's clients, and many programs around them, send such values always; a request that asks for something is refused.

What a message of a chat may hold: text, and pictures that come with it. Checked here, carried as it is. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from hub.api.errors import ModelNotFoundError
from omni_discovery.data_urls import picture_url
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import MAX_PRIORITY


class NeutralFields(msgspec.Struct, frozen=True, kw_only=True):
    """A base for a request. ``check_neutral`` sees to the values."""

    audio: Any = None
    best_of: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    ignore_eos: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    min_p: Any = None
    min_tokens: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    service_tier: Any = None
    stop_token_ids: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    verbosity: Any = None
    web_search_options: Any = None


#: By field, what may stand in it beside null.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "parallel_tool_calls": (False, True),
    "prediction": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop_token_ids": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def refuse_logprobs(stages: Sequence[StageConfig], explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError if what is asked of a vLLM stage has no place in this API's answers."""
    for stage, params in zip(stages, explicit or (), strict=False):
        for name in ("logprobs", "prompt_logprobs"):
            if stage.engine == "vllm" and params and params.get(name) is not None:
                raise InvalidRequestError(
                    f"'sampling_params_list': '{name}' are shown by a hub with --api vllm only; leave them out"
                )


def refuse_adapter_paths(explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError if a client says where an adapter is: that is the operator's to say."""
    for params in explicit or ():
        if params and not isinstance(params.get("lora"), str | None):
            raise InvalidRequestError("'sampling_params_list': 'lora' is the name of an adapter")


def refuse_embeddings(stages: Sequence[StageConfig], modalities: Sequence[str] | None) -> None:
    """Raise InvalidRequestError if a chat would be answered with what a stage pools: a message has no place for it."""
    stage = next((stage for stage in stages if stage.final_output == "embedding"), None)
    if stage is not None and (modalities is None or "embedding" in modalities):
        others = sorted({each.final_output for each in stages} - {"embedding", "none"})
        hint = f", or ask for 'modalities' {others} only" if others else ""
        raise InvalidRequestError(
            f"stage {stage.stage_id} makes embeddings, which are no part of a chat: ask POST /v1/embeddings of a hub "
            f"with --api vllm{hint}"
        )


def check_model(asked: str, served: str) -> None:
    """Raise ModelNotFoundError if a request names another model than the one that is served; it may name none."""
    if asked and asked != served:
        raise ModelNotFoundError(asked, served)


def check_neutral(request: NeutralFields) -> None:
    """Raise InvalidRequestError if one of the fields asks for something."""
    for name, values in _NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and not any(_is_same(value, each) for each in values):
            raise InvalidRequestError(f"'{name}' is not served here: leave it out")


def _is_same(value: Any, other: Any) -> bool:
    # To Python True is 1.
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


#: How many pictures one request may show; how large they may be together, the longest body says.
MAX_PICTURES: Final = 16

#: What an image_url may say.
_KNOWN: Final = frozenset({"url", "detail"})


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError, with its place, for what no stage would read. Pictures are not decoded here."""
    pictures = 0
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if message.get("role") not in {"system", "developer", "user", "assistant"}:
            raise InvalidRequestError(f"{where}.role must be system, developer, user or assistant")
        pictures += _check_content(f"{where}.content", message.get("content"))
    if pictures > MAX_PICTURES:
        raise InvalidRequestError(f"{pictures} pictures are in 'messages'; one request may show {MAX_PICTURES}")
    if not _says_something(messages[-1]["content"]):
        raise InvalidRequestError("the last message is empty; write a question into its 'content'")


def _check_content(where: str, content: Any) -> int:
    """How many pictures are in the content of a message. Raise InvalidRequestError if it is not text and pictures."""
    if isinstance(content, str):
        return 0
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of text and image_url parts")
    return sum(_check_part(f"{where}[{position}]", part) for position, part in enumerate(content))


def _check_part(where: str, part: Any) -> bool:
    """Whether it is a picture; if not, it is text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return False
    if kind != "image_url":
        raise InvalidRequestError(f"{where}: this pipeline reads text and image_url parts only")
    shown = part.get("image_url")
    unknown = sorted({*part} - {"type", "image_url"}) or (sorted({*shown} - _KNOWN) if isinstance(shown, dict) else [])
    if unknown:
        raise InvalidRequestError(f"{where}: {unknown[0]!r} is not known here; leave it out")
    if isinstance(shown, dict) and shown.get("detail") not in (None, "auto"):
        raise InvalidRequestError(f"{where}: 'detail' can't be chosen, the model decides; leave it out")
    try:
        picture_url(shown)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    return True


def _says_something(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] == "image_url" or part["text"].strip() for part in content)


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
