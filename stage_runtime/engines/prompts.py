"""A client's prompt or messages, as token ids or as text for a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import check_arguments, decode_any

#: Inputs of vLLM's front end that an engine may not read: what it has made of pictures and sounds, and how.
_UNREAD: Final = ("mm_features", "mm_processor_kwargs", "multi_modal_uuids", "mm_hashes")

#: Characters from which on a text is long: to encode them takes some tens of milliseconds.
LONG: Final = 1 << 16
#: Characters of a text that is drawn: its model reads a few hundred, and its tokenizer all of them.
LONGEST_DRAWN: Final = 1 << 16
#: A chat template takes some 30 us for each message, in which as many characters are encoded.
_EACH: Final = 256
_COUNTED: Final = frozenset({"role", "content"})


def check_unread(inputs: Mapping[str, Any], *, reads_tools: bool = False) -> None:
    """Raise InvalidRequestError for an input that would be dropped: the model would answer to something else."""
    if inputs.get("tools") and not reads_tools:
        raise InvalidRequestError("tools: this stage calls none; leave them out")
    for name in _UNREAD:
        if inputs.get(name) is not None:
            raise InvalidRequestError(f"{name}: this stage does not read it; give the pictures or sounds themselves")


def read_prompt(
    tokenizer: Any,
    inputs: Mapping[str, Any],
    *,
    begins: bool = True,
    items: Collection[str] = (),
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The token ids of exactly one of ``messages``, ``prompt`` and ``prompt_token_ids``. Raise InvalidRequestError.

    ``begins`` False: the ``prompt`` continues a request, so it gets no special tokens at its front. Parts of
    messages may be ``{"type": "image"}``, or another kind of ``items``, for which the model's chat template writes a
    placeholder. ``template`` is in place of the tokenizer's own. ``tools`` are functions that the model may call, as a
    chat has them, for its template to show.
    """
    given = [name for name in ("messages", "prompt", "prompt_token_ids") if inputs.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequestError("give one of messages, prompt and prompt_token_ids")
    value = inputs[given[0]]
    match given[0]:
        case "messages":
            return _render(tokenizer, value, items, template, tools)
        case "prompt" if isinstance(value, str):
            return list(tokenizer.encode(value, add_special_tokens=begins)) if value else []
        case "prompt_token_ids" if isinstance(value, list | tuple) and set(map(type, value)) <= {int}:
            return list(value)
    raise InvalidRequestError(f"{given[0]} is of the wrong type")


def prompt_text(inputs: Mapping[str, Any]) -> str:
    """The text for a model that reads text: the ``prompt``, or the content of the last of the ``messages``.

    Raise InvalidRequestError if there is none.
    """
    check_unread(inputs)
    prompt = inputs.get("prompt")
    if prompt is None and inputs.get("messages") is not None:
        messages = inputs["messages"]
        _check_messages(messages)
        content = messages[-1].get("content")
        prompt = "".join(part["text"] for part in content) if isinstance(content, list) else content
    if not isinstance(prompt, str) or not prompt.strip():
        raise InvalidRequestError("give a prompt, or messages whose last one says what to draw")
    if len(prompt) > LONGEST_DRAWN:
        raise InvalidRequestError(f"the prompt has {len(prompt)} characters; at most {LONGEST_DRAWN} are drawn")
    return prompt


def is_long(inputs: Mapping[str, Any]) -> bool:
    """Whether a client's prompt or messages are to be read in a thread beside the engine's."""
    return reading_size(inputs) >= LONG


def reading_size(inputs: Mapping[str, Any]) -> int:
    """Characters of a prompt, or of messages and tools, and as many as take as long for each message and its parts.

    Files in messages have no size here.
    """
    prompt, messages = inputs.get("prompt"), inputs.get("messages")
    size = len(prompt) if isinstance(prompt, str) else 0
    size += len(str(inputs["tools"])) if inputs.get("tools") else 0
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        size += _EACH * max(1, len(parts))
        texts = (part.get("text") for part in parts if isinstance(part, Mapping))
        size += sum(len(each) for each in texts if isinstance(each, str))
        if beside := {name: value for name, value in message.items() if name not in _COUNTED}:
            size += len(str(beside))
    return size


def _render(
    tokenizer: Any,
    messages: Any,
    items: Collection[str],
    template: str | None,
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    _check_messages(messages, items)
    shown = {"tools": list(tools)} if tools else {}
    read = _with_arguments_read(messages)
    try:
        text = tokenizer.apply_chat_template(
            read,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **shown,
        )
    except Exception as error:
        # A template is a program that came with the model; it may raise anything.
        raise InvalidRequestError(f"the model's chat template refuses the messages: {error}") from error
    # The template has written the special tokens that it wants.
    return list(tokenizer.encode(text, add_special_tokens=False))


def _with_arguments_read(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of earlier calls as objects, which is how chat templates have them.

    Raise InvalidRequestError if they may cost too much to be decoded.
    """
    check_arguments(message["tool_calls"] for message in messages if message.get("tool_calls"))
    return [
        {**message, "tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_arguments(call: Any) -> Any:
    called = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(called, Mapping) or not isinstance(called.get("arguments"), str):
        return call
    try:
        arguments = decode_any(called["arguments"])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        # The template shows what is no JSON as it is.
        return call
    return {**call, "function": {**called, "arguments": arguments}}


def _check_messages(messages: Any, items: Collection[str] = ()) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{index}] needs a role")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if items and isinstance(part, Mapping) and part.keys() == {"type"} and part["type"] in items:
                    continue
                if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kinds = "text and image_url parts" if items else "text"
                    raise InvalidRequestError(f"messages[{index}]: this stage takes {kinds} only")
        elif not isinstance(content, str | None):
            raise InvalidRequestError(f"messages[{index}].content must be text")
