"""What clients of vLLM-Omni's server may ask and a hub can't do: refused, with the reason, before that server sees it.

Some of it the server would do by itself, at a price: it fetches any address that a request names, and keeps uploads.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError

_ONE_HUB: Final = "it would be known to this hub alone, and every hub has to answer alike"
_OPERATORS: Final = "replicas are controlled by their operators (--admin-api), not by clients of the API"
_NO_SOUND: Final = "no stage of this pipeline reads sound or pictures piece by piece"
_NO_VIDEO: Final = "no stage here makes videos"
#: By the begin of the path; the longest that fits counts.
_PATHS: Final[Mapping[str, str]] = {
    "/v1/videos": _NO_VIDEO,
    "/v1/realtime": _NO_SOUND,
    "/v1/duplex": _NO_SOUND,
    "/v1/video/": _NO_SOUND,
    "/v1/images/edits": "vLLM-Omni's server reads, and fetches, what a form names; --api omni changes pictures here",
    "/v1/audio/generate": "no stage here makes sound by diffusion; /v1/audio/speech says a text",
    "/generative_scoring": "no stage of this pipeline scores texts; --api vllm serves one that does",
    "/v1/omni/": _OPERATORS,
    "/start_profile": _OPERATORS,
    "/stop_profile": _OPERATORS,
}
#: Routes that need a stage with this output.
_MAKERS: Final = (
    ("/v1/audio/speech", "audio", "no stage of this pipeline speaks"),
    ("/v1/images/generations", "image", "no stage of this pipeline draws"),
)
_NO_TOKENS: Final = "the first stage draws, and has no tokenizer; /v1/images/generations draws from text"
#: Routes that need the tokenizer of the first stage.
_OF_TOKENS: Final = (
    *("/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize", "/tokenizer_info"),
    *("/inference/", "/v1/chat/completions/render", "/invocations", "/abort_requests"),
)
#: Fields of a request, or of a part of one, that name a file or an address.
_FILES: Final = (
    *("ref_audio_2", "emo_audio"),
    *("ref_audio", "speaker_embedding", "image", "images", "input_image", "reference_image", "reference_images"),
    *("image_url", "input_audio", "audio_url", "video_url", "audio", "video", "file", "image_embeds", "audio_embeds"),
)
#: Of those, what is an option of the answer at the top of a request.
_OPTIONS: Final = frozenset({"audio"})
#: Types of the parts of a message that are text.
_TEXT: Final = (
    *("text", "input_text", "refusal", "output_text", "summary_text", "reasoning_text", "thinking"),
    *("redacted_thinking", "tool_use", "tool_result"),
)
_BY_VLLM: Final = "vLLM-Omni's server does not apply it to a chat; --api vllm serves it for a text stage"
_IN_THE_LIST: Final = "vLLM-Omni's server does not apply it to a chat; give it in sampling_params_list"
#: Fields of a chat that the server would leave out, with what to do.
_LEFT_OUT: Final[Mapping[str, str]] = {
    **dict.fromkeys(("structured_outputs", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias"), _BY_VLLM),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "use_beam_search"), _BY_VLLM),
    **dict.fromkeys(("min_p", "repetition_penalty"), _IN_THE_LIST),
    "max_completion_tokens": "vLLM-Omni's server does not apply it to a chat; give max_tokens",
}
#: Fields of a request that hold messages, in the server's several APIs.
_SAID: Final = ("messages", "input")


def refusal_of_path(method: str, path: str, outputs: Collection[str | None], *, reads_tokens: bool = True) -> str:
    """Why a pipeline with these outputs serves nothing at a path; empty if it may.

    ``reads_tokens``: whether the first stage has a tokenizer.
    """
    if path.startswith("/v1/audio/voices") and method != "GET":
        return f"a voice can't be kept here: {_ONE_HUB}"
    for begin, output, reason in _MAKERS:
        if path.startswith(begin) and output not in outputs:
            return reason
    if not reads_tokens and path.startswith(_OF_TOKENS):
        return _NO_TOKENS
    fitting = [begin for begin in _PATHS if path.startswith(begin)]
    return _PATHS[max(fitting, key=len)] if fitting else ""


def decoded(body: bytes) -> Mapping[str, Any]:
    """The fields of a request in JSON; none of a form, or of nothing at all.

    Raise InvalidRequestError for anything else that can't be read: the server may read it all the same.
    """
    begin = body.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not begin or begin.startswith(b"--"):
        return {}
    try:
        asked = msgspec.json.decode(begin)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the body has a number out of range: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    return asked if isinstance(asked, dict) else {}


def refusal_of_request(asked: Mapping[str, Any]) -> str:
    """Why a request can't be served, by what it brings along; empty if nothing of it is a file or a link."""
    for name in _brought(asked):
        return f"{name}: nothing here takes sound, pictures or other files at this place; send text"
    return ""


def refusal_of_chat(asked: Mapping[str, Any]) -> str:
    """Why a chat can't be served as it is asked; empty if it can.

    The server itself would leave out, without a word, all but a few sampling parameters of a chat.
    """
    answers, form = asked.get("n"), asked.get("response_format")
    if isinstance(answers, int) and answers > 1:
        return "n: one request makes one picture or answer here; send several requests"
    if isinstance(form, dict) and form.get("type", "text") != "text":
        return f"response_format: {_LEFT_OUT['structured_outputs']}"
    for name, advice in _LEFT_OUT.items():
        if asked.get(name) and not (name == "repetition_penalty" and asked[name] == 1):
            return f"{name}: {advice}"
    return ""


def _brought(asked: Mapping[str, Any]) -> Iterator[str]:
    yield from (name for name in _FILES if name not in _OPTIONS and asked.get(name) is not None)
    for item in mappings([asked.get("items"), asked.get("extra_params")]):
        yield from (name for name in _FILES if item.get(name) is not None)
    for field in _SAID:
        for message in mappings(asked.get(field)):
            for part in (*mappings(message.get("content")), *mappings(message.get("output"))):
                yield from files_in(part)


def files_in(part: Mapping[str, Any]) -> list[str]:
    """What of a part of a message is, or may be, a file or a link, by its names."""
    kind = part.get("type", "text")
    named = [name for name in _FILES if part.get(name) is not None]
    named += [name for each in mappings(part.get("content")) for name in files_in(each)]
    return named if kind in _TEXT else [*named, str(kind)]


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list, also in the lists in it; none in anything else."""
    found: list[Mapping[str, Any]] = []
    for each in value if isinstance(value, list) else ():
        found += [each] if isinstance(each, dict) else mappings(each)
    return found
