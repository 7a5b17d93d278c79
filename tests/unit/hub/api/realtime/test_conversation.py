"""Items: how they are read, cut and shown, and what a stage gets of them."""

from __future__ import annotations

import base64
import json
import sys
import time
from typing import Any

import pytest

from hub.api.realtime.conversation import Content, Conversation, ConversationItem, messages_of, read_item
from hub.api.realtime.schema import ItemCreate, parse_event
from hub.config import RealtimeBounds
from omni_discovery.errors import InvalidRequestError, OverloadedError

SOUND = base64.b64encode(bytes(4800)).decode()
PIXEL = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()


def read(**item: Any) -> tuple[ConversationItem, list[tuple[Content, bytes]]]:
    event = parse_event(json.dumps({"type": "conversation.item.create", "item": {"type": "message", **item}}))
    assert isinstance(event, ItemCreate)
    return read_item(event.item, "item_1")


def user(text: str, item_id: str = "u") -> ConversationItem:
    return ConversationItem(item_id, "message", "user", [Content("input_text", text)])


def test_a_message_of_all_kinds_of_parts_becomes_one_of_a_chat() -> None:
    """Sound is a file of its own when it has been encoded."""
    parts = [
        {"type": "input_text", "text": "what is this?"},
        {"type": "input_image", "image_url": PIXEL},
        {"type": "input_audio", "audio": SOUND},
    ]
    item, sounds = read(role="user", content=parts)
    ((part, samples),) = sounds
    assert (samples, part.sound_ms) == (bytes(4800), 100)
    part.sound, part.sound_format = "QUJD", "opus"
    (message,) = messages_of([item], "", truncates=True)
    assert message["content"] == [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "opus"}},
    ]
    assert item.shown()["content"][2] == {"type": "input_audio", "transcript": None}


def test_openais_beta_calls_parts_of_answers_otherwise() -> None:
    for kind, field in (("text", "text"), ("output_text", "text"), ("audio", "transcript")):
        item, _ = read(role="assistant", content=[{"type": kind, field: "Good day"}])
        assert messages_of([user("hi"), item], "", truncates=True)[1] == {"role": "assistant", "content": "Good day"}


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"role": "system", "content": [{"type": "input_audio", "audio": SOUND}]}, "of role 'system' has input_text"),
        ({"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}, "output_audio, output_text"),
        ({"role": "assistant", "content": [{"type": "output_audio", "audio": SOUND}]}, "send its 'transcript' alone"),
        ({"role": "user", "content": [{"type": "input_audio", "audio": "?"}]}, "is no base64"),
        ({"role": "user", "content": [{"type": "input_audio", "audio": "AAAA"}]}, "samples of 16 bits"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "0 bytes"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "has no 'text'"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b.png"}]}, "image_url"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}, "image_url"),
    ],
)
def test_a_wrong_part_is_refused_with_its_place(item: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"item\.content\[0\]") as error:
        read(**item)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "end_ms", "is_whole", "kept"),
    [
        ("one two three four", 2000, True, "one two three four"),
        ("one two three four", 1000, True, "one two"),
        (" one", 1000, True, ""),
        ("one  two three four", 1200, True, "one  two"),
        ("one two  three four", 900, True, "one two"),
        # Within "three".
        ("one two three four", 1200, True, "one two"),
        ("one two three four", 0, True, ""),
        # No spaces to cut at, as in Chinese.
        ("一二三四五六七八", 1000, True, "一二三四"),
        # Sixty characters are about 4 s; of which 2 s have been made, and 1 s was heard.
        ("a" * 9 + " " + "b" * 50, 1000, False, "a" * 9),
    ],
)
def test_words_are_cut_where_the_sound_was(text: str, end_ms: int, is_whole: bool, kept: str) -> None:
    content = Content("output_audio", text, sound_ms=2000)
    content.cut(end_ms, is_whole=is_whole)
    assert (content.text, content.sound_ms) == (kept, end_ms)


@pytest.mark.attack("Q2")
@pytest.mark.parametrize("text", ["x" * 900_000, "a " * 450_000, " " * 900_000, "a " + "x" * 900_000])
def test_a_cut_of_a_long_answer_looks_at_its_last_word_only(text: str) -> None:
    """Each event of 150 bytes had all characters of the answer looked at: 17 ms of the hub's loop, or more."""
    content = Content("output_audio", text, sound_ms=100_000)
    begin_s = time.process_time()
    for number in range(1, 201):
        content.cut(100_000 - number, is_whole=True)
    assert time.process_time() - begin_s < 1.0
    assert content.sound_ms == 99_800


def test_what_is_left_out_are_the_oldest_items() -> None:
    """Of bytes, of sound, of sounds and of pictures; and what a tool has said goes with its call."""
    long = [user("x" * 1_000_000, str(number)) for number in range(4)]
    assert len(messages_of(long, "", truncates=True)) == 2
    with pytest.raises(InvalidRequestError, match="too long for one request"):
        messages_of(long, "", truncates=False)
    hours = [
        ConversationItem(str(number), "message", "user", [Content("input_audio", sound="AAAA", sound_format="opus")])
        for number in range(4)
    ]
    for item in hours:
        item.content[0].sound_ms = 250_000
    assert len(messages_of(hours, "", truncates=True)) == 2
    call = ConversationItem("c", "function_call", call_id="1", name="f", value="x" * 2_900_000)
    output = ConversationItem("o", "function_call_output", call_id="1", value="y")
    assert messages_of([call, output, user("hi")], "be brief", truncates=True) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_one_item_that_no_request_could_hold_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="too long for one request"):
        messages_of([user("x" * 3_000_000)], "", truncates=True)


def test_nothing_but_empty_words_is_nothing_to_answer() -> None:
    for items in ([], [user("  ")]):
        with pytest.raises(InvalidRequestError, match="nothing to answer"):
            messages_of(items, " ", truncates=True)


def test_room_is_made_by_the_oldest_items_only_where_that_is_wanted() -> None:
    conversation = Conversation(RealtimeBounds(max_item_bytes=3000))
    for number in range(3):
        conversation.add(user("x" * 400, str(number)), number)
    with pytest.raises(OverloadedError, match="is full"):
        conversation.make_room(400, truncates=False)
    assert conversation.make_room(400, truncates=True) == ["0"]
    with pytest.raises(InvalidRequestError, match="too large") as error:
        conversation.make_room(3000, truncates=True)
    assert (error.value.status, len(conversation)) == (413, 2)


def of_parts(count: int, item_id: str = "u") -> ConversationItem:
    return ConversationItem(item_id, "message", "user", [Content("input_text") for _ in range(count)])


@pytest.mark.attack("M1")
def test_parts_without_content_are_counted_and_bounded() -> None:
    """1. 256 empty parts take memory; 2. the oldest items give way to further parts; 3. too many at once never fit"""
    assert of_parts(256).size_bytes > 256 * 100
    conversation = Conversation(RealtimeBounds(max_parts=10))
    for number in range(3):
        conversation.add(of_parts(3, str(number)), number)
    with pytest.raises(OverloadedError, match="is full"):
        conversation.make_room(0, truncates=False, parts=5)
    assert conversation.make_room(0, truncates=True, parts=5) == ["0", "1"]
    assert conversation.parts == 3
    with pytest.raises(InvalidRequestError, match="10 parts") as error:
        conversation.make_room(0, truncates=True, parts=11)
    assert (error.value.status, conversation.last_id) == (413, "2")


@pytest.mark.attack("M1")
def test_what_comes_and_goes_is_counted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that is added, cut or removed has its own parts counted, not those of all others."""
    conversation = Conversation(RealtimeBounds())
    for number in range(10):
        conversation.add(of_parts(100, str(number)), number)
    counted = 0

    def count(part: Content) -> int:
        nonlocal counted
        counted += 1
        return 7

    monkeypatch.setattr(Content, "size_bytes", property(count))
    before = conversation.size_bytes
    late = user("late", "late")
    conversation.add(late, 10)
    late.content[0].text = ""
    conversation.recount(late)
    conversation.remove("late")
    conversation.recount(late)
    assert conversation.make_room(0, truncates=True) == []
    assert (counted, conversation.size_bytes, conversation.parts) == (2, before, 1000)


def test_a_text_is_counted_by_the_memory_that_it_takes() -> None:
    """Beyond ASCII up to four bytes for a character, and those of its UTF-8 once it has been sent."""
    assert user("x" * 1000).size_bytes - user("").size_bytes == 1000
    for text in ("\N{CJK UNIFIED IDEOGRAPH-4E00}" * 1000, "x" * 999 + "\N{GRINNING FACE}"):
        whole = sys.getsizeof(text) + len(text.encode())
        assert user(text).size_bytes - user("").size_bytes >= whole - 200


@pytest.mark.attack("M10")
def test_an_item_has_no_more_sounds_than_a_request_and_each_is_worth_an_encoder() -> None:
    """Hundreds of sounds of one sample in one event kept all encoders busy for minutes."""
    sound = {"type": "input_audio", "audio": SOUND}
    assert len(read(role="user", content=[sound] * 16)[1]) == 16
    with pytest.raises(InvalidRequestError, match="17 sounds; one request has at most 16"):
        read(role="user", content=[sound] * 17)
    with pytest.raises(InvalidRequestError, match=r"content\[0\].audio: a sound has at least 100 ms"):
        read(role="user", content=[{"type": "input_audio", "audio": "AAA="}])
