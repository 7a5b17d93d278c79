"""The body of a chat completion request, its messages and its fields, and their checks. Pure.

The names are OpenAI's, and vLLM-Omni's where it adds some. A field that is not served here is refused by its name
unless it has a neutral value: OpenAI's clients, and many programs around them, always send such values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from hub.api.errors import ModelNotFoundError
from omni_discovery.data_urls import picture_url
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import check_containers
from omni_discovery.wire import MAX_PRIORITY


class NeutralFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are not served here; ``check_neutral`` checks that their values are neutral."""

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


#: The neutral values of each field, in addition to null.
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
    """Raise InvalidRequestError for logprobs of a vLLM stage, which this API's answers can't show."""
    for stage, params in zip(stages, explicit or (), strict=False):
        for name in ("logprobs", "prompt_logprobs"):
            if stage.engine == "vllm" and params and params.get(name) is not None:
                raise InvalidRequestError(
                    f"'sampling_params_list': '{name}' are shown by a hub with --api vllm only; leave them out"
                )


def refuse_adapter_paths(explicit: Sequence[Mapping[str, Any] | None] | None) -> None:
    """Raise InvalidRequestError if a client gives the path of an adapter: only the operator may."""
    for params in explicit or ():
        if params and not isinstance(params.get("lora"), str | None):
            raise InvalidRequestError("'sampling_params_list': 'lora' is the name of an adapter")


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


def check_model(asked: str, served: str) -> None:
    """Raise ModelNotFoundError if a request names another model than the one that is served; it may name none."""
    if asked and asked != served:
        raise ModelNotFoundError(asked, served)


def check_neutral(request: NeutralFields) -> None:
    """Raise InvalidRequestError for a field with a value that is not neutral."""
    for name, values in _NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and not any(_is_same(value, each) for each in values):
            raise InvalidRequestError(f"'{name}' is not served here: leave it out")


def _is_same(value: Any, other: Any) -> bool:
    # In Python True == 1.
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


#: Pictures of one request; their size together is bounded by MAX_BODY_BYTES.
MAX_PICTURES: Final = 16

#: The fields of an image_url.
_KNOWN: Final = frozenset({"url", "detail"})


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError, with the place, for content that no stage reads. Pictures are not decoded here."""
    pictures = 0
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in {"system", "developer", "user", "assistant"}:
            raise InvalidRequestError(f"{where}.role must be system, developer, user or assistant")
        pictures += _check_content(f"{where}.content", message.get("content"))
    if pictures > MAX_PICTURES:
        raise InvalidRequestError(f"{pictures} pictures are in 'messages'; one request may show {MAX_PICTURES}")
    if not _has_content(messages[-1]["content"]):
        raise InvalidRequestError("the last message is empty; write a question into its 'content'")


def _check_content(where: str, content: Any) -> int:
    """The number of pictures in the content of a message. Raise InvalidRequestError for parts of another kind."""
    if isinstance(content, str):
        return 0
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of text and image_url parts")
    return sum(_check_part(f"{where}[{position}]", part) for position, part in enumerate(content))


def _check_part(where: str, part: Any) -> bool:
    """Whether the part is a picture; otherwise it is text. Raise InvalidRequestError for any other part."""
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


def _has_content(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] == "image_url" or part["text"].strip() for part in content)


#: Longest request body that is accepted, and longest that is read to its end so that its sender gets an error. A
#: message to a replica has to hold the body (MAX_HEAD_BYTES), and with a resume the answer so far.
MAX_BODY_BYTES: Final = 3 << 20
MAX_DROPPED_BYTES: Final = 64 << 20

_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``include_usage`` asks for one last chunk with the token counts."""

    include_usage: bool = False


class ChatRequest(NeutralFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions.

    ``sampling_params_list`` holds a mapping for each stage, None for the defaults; it may end early, and wins over all.
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
    sampling_params_list: list[dict[str, Any] | None] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: As in vLLM: of queued requests, a lower priority goes first.
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    #: Further prompts for the first stage, by role, such as a negative prompt.
    companions: dict[str, str] = msgspec.field(default_factory=dict)
    #: Whether the answer has ``timings_s``; a stream has them in its last chunk.
    include_timings: bool = False
    #: Whether stages start on pieces of each other's output; None: as the pipeline says.
    async_chunk: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    def text_params(self) -> dict[str, Any]:
        """The sampling parameters of the body, by the names that a text stage takes."""
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
    check_containers(body)
    try:
        request = _decoder.decode(body)
    except msgspec.ValidationError as error:
        # The decoder names the place already, in backquotes.
        raise InvalidRequestError(f"the body can't be used: {error}".replace("`", "'")) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    check_neutral(request)
    if not request.messages:
        raise InvalidRequestError("'messages' is empty; send at least one user message")
    check_messages(request.messages)
    return request
