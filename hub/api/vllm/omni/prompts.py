"""Prompts of vLLM-Omni's server as inputs of our first stage. What no stage reads is refused by its name. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hub.api.errors import NotServedError

#: What the server's adapters add for its own accounting, or say a second time in the sampling parameters.
_OWN_NOTES: Final = frozenset({"voice_created_at", "max_new_tokens", "_qwen3_tts_effective_max_tokens"})
#: Fields of a prompt that say nothing to a stage: its kind, when it came, and which outputs are wanted.
_ABOUT: Final = frozenset({"type", "arrival_time", "modalities", "cache_salt"})
#: The size of a picture, which is in the stage's parameters, too.
_SIZES: Final = frozenset({"target_h", "target_w", "modalities"})
#: For how deep ``additional_information`` may be nested.
_DEEPEST: Final = 4


def inputs_of(
    prompt: Any, decode: Callable[[Sequence[int]], str] | None, chat: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of a request, and parameters for the stages that make pictures. Raise NotServedError.

    ``decode`` turns tokens into text, for a first stage that speaks and so wants text; None: it reads tokens.
    ``chat`` is what the stage gets of a chat with files, in place of the server's prompt.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}, {}
    if not isinstance(prompt, Mapping):
        raise NotServedError("several prompts, or one in segments, can't be asked at once: send a request for each")
    given = {name: value for name, value in prompt.items() if value is not None and name not in _ABOUT}
    of_pictures = _picture_params(given)
    told = given.pop("additional_information", None)
    # An adapter's text stands in it; the chat of a speaking model has only the voice there.
    has_text = isinstance(told, Mapping) and "text" in told
    inputs = _text_or_tokens(given, None if has_text else decode)
    if chat:
        inputs = dict(chat)
    if told:
        inputs["additional_information"] = information_of(told)
    if given:
        raise NotServedError(f"{sorted(given)[0]} can't be told to a stage; this pipeline reads text")
    return inputs, of_pictures


def _picture_params(given: dict[str, Any]) -> dict[str, Any]:
    """Take out of a prompt what it says of pictures."""
    params: dict[str, Any] = {name: given.pop(name) for name in ("negative_prompt", "height", "width") if name in given}
    sizes = given.pop("mm_processor_kwargs", None) or {}
    if strange := sorted(set(sizes) - _SIZES):
        raise NotServedError(f"mm_processor_kwargs: {strange[0]} can't be told to a stage; leave it out")
    return params


def _text_or_tokens(given: dict[str, Any], decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """Take the prompt itself out of it: its tokens, or its text where only that is there or wanted."""
    text, token_ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if decode is not None and token_ids:
        return {"prompt": text or decode(token_ids)}
    if token_ids:
        return {"prompt_token_ids": list(token_ids)}
    return {} if text is None else {"prompt": text}


def information_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """``additional_information`` as plain values. Raise NotServedError for a value that is none, such as samples."""
    if not isinstance(told, Mapping):
        raise NotServedError("additional_information is a mapping")
    return {
        str(name): _plain(str(name), value, _DEEPEST)
        for name, value in told.items()
        if name not in _OWN_NOTES and value is not None
    }


def _plain(name: str, value: Any, depth: int) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if depth and isinstance(value, list | tuple):
        return [_plain(name, each, depth - 1) for each in value]
    if depth and isinstance(value, Mapping):
        return {str(key): _plain(name, each, depth - 1) for key, each in value.items()}
    raise NotServedError(f"{name} can't be told to a stage: it is {type(value).__name__}, and text and numbers travel")
