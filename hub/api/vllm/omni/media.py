"""Pictures, sound and videos in chats: the first stage's replica gets the messages as they came, and decodes the files.

vLLM-Omni's server would decode them itself, in the hub. It gets the same chat without its files, for all else that it
checks and counts. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hub.api.chat.messages import NO_LINKS, check_messages
from hub.api.errors import NotServedError
from hub.api.vllm.omni.unserved import files_in, mappings
from omni_discovery.inputs.media_links import MediaLinks

#: The one route whose messages may bring files.
CHATS: Final = "/v1/chat/completions"
#: How the files are processed, which the stage checks.
_PROCESSING: Final = "mm_processor_kwargs"
#: Fields of a chat by which the server writes the prompt; the replica writes it here, and does not have them.
_OF_THE_PROMPT: Final = (
    *(
        "tools",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "truncate_prompt_tokens",
    ),
    *("media_io_kwargs", "reasoning_effort"),
)


def split_files(asked: Mapping[str, Any], links: MediaLinks = NO_LINKS) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A chat without its files, and what the first stage gets of it: its messages as they came; nothing if it has none.

    ``links``: what may be named by a link, for the first stage's replica to fetch. Raise InvalidRequestError for
    messages that no stage reads, NotServedError for fields that can't go with files.
    """
    messages = mappings(asked.get("messages"))
    if not any(files_in(part) for message in messages for part in mappings(message.get("content"))):
        return asked, {}
    check_messages(messages, links)
    for name in _OF_THE_PROMPT:
        if asked.get(name):
            raise NotServedError(f"{name} can't be asked together with pictures, sound or videos; leave it out")
    inputs = {"messages": messages, **({_PROCESSING: asked[_PROCESSING]} if asked.get(_PROCESSING) else {})}
    left = {name: value for name, value in asked.items() if name != _PROCESSING}
    return {**left, "messages": [_without_files(message) for message in messages]}, inputs


def _without_files(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in mappings(content) if not files_in(part)]}
