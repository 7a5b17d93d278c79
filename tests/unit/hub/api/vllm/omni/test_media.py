"""Files in the messages of a chat, told from its text."""

from __future__ import annotations

from typing import Any

import pytest

from hub.api.errors import NotServedError
from hub.api.vllm.omni.media import split_files
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.media_links import MediaLinks

TEXT = {"type": "text", "text": "what is this?"}
HOSTS = ("media.example.org", "other.example.org")
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": list(parts)}], **more}


def test_the_server_gets_the_text_and_the_stage_all_messages() -> None:
    """With how the files are processed, which the server would apply to its own prompt."""
    processing: dict[str, Any] = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    for more in ({}, processing):
        asked, inputs = split_files(chat(SOUND, TEXT, seed=3, **more))
        assert asked == chat(TEXT, seed=3)
        assert inputs == chat(SOUND, TEXT, **more)


def test_a_chat_without_files_is_the_servers_alone() -> None:
    for asked in (chat(TEXT, tools=[{}]), {"messages": "hi"}, {"messages": [{"content": "hi"}, 3]}, {}):
        assert split_files(asked) == (asked, {})


def test_a_link_on_the_operators_list_goes_to_the_stage_as_it_came_and_no_other_does() -> None:
    links = MediaLinks(("media.example.org",))
    there, elsewhere = ({"type": "image_url", "image_url": {"url": f"https://{host}/a.png"}} for host in HOSTS)
    assert split_files(chat(there, TEXT), links) == (chat(TEXT), chat(there, TEXT))
    with pytest.raises(InvalidRequestError, match="image_url: only files of media"):
        split_files(chat(elsewhere, TEXT), links)


@pytest.mark.attack("C13")
@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        (chat(SOUND, tools=[{"type": "function"}]), NotServedError, "tools can't be asked together"),
        (chat(SOUND, chat_template="{{ 1 }}"), NotServedError, "chat_template can't"),
        (chat({"type": "audio_url", "audio_url": {"url": "http://10.0.0.1/"}}), InvalidRequestError, "audio_url"),
        (chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), InvalidRequestError, "image_url"),
        (chat({"type": "file", "file": {"file_id": "a"}}), InvalidRequestError, "a part is one of text"),
    ],
)
def test_what_can_not_be_told_to_a_stage_is_refused(asked: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        split_files(asked)
