"""Pictures in messages: which the door lets in, what fits on the wire, and which engines say that they see none."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from hub.api.chat.messages import MAX_PICTURES
from hub.api.chat.schema import parse_chat
from hub.api.generation.body import MAX_BODY_BYTES
from hub.api.stream import parse_frame
from omni_discovery import wire
from omni_discovery.data_urls import picture_parts, read_picture
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.containers import MAX_OBJECTS
from omni_discovery.inputs.media_links import MediaLinks
from stage_runtime.engines.base import Engine, StageRequest, create_engine
from stage_runtime.engines.media.items import PICTURES, take_items
from stage_runtime.engines.pictures.request import Traits
from stage_runtime.engines.pictures.request import read_picture as read_drawing
from stage_runtime.testing import run

URL = "data:image/png;base64," + base64.b64encode(b"a file").decode()
TEXT = {"type": "text", "text": "what is this"}


def shown(url: Any = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def body(*parts: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


@pytest.mark.parametrize(
    "parts",
    [
        (TEXT, shown()),
        (shown(), TEXT, shown("data:image/jpeg;base64,/9j/")),
        (shown(),),
        (shown(detail="auto"), TEXT),
        (shown(detail=None), TEXT),
        ({"type": "image_url", "image_url": URL}, TEXT),
        (TEXT, *[shown()] * MAX_PICTURES),
    ],
    ids=range(7),
)
def test_pictures_are_let_in_as_they_are(parts: tuple[Any, ...]) -> None:
    assert parse_chat(body(*parts)).messages == [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (shown("https://example.org/x.png"), "nothing is fetched"),
        (shown("http://127.0.0.1:8000/x.png"), "nothing is fetched"),
        (shown("file:///etc/passwd"), "data:image/png;base64"),
        (shown("data:text/html;base64,AAAA"), "data:image/png;base64"),
        (shown("data:image/png,AAAA"), "data:image/png;base64"),
        (shown(5), "data:image/png;base64"),
        ({"type": "image_url"}, "data:image/png;base64"),
        ({"type": "image_url", "image_url": [URL]}, "data:image/png;base64"),
        (shown(detail="high"), "'detail' can't be chosen"),
        (shown(detail=["low"]), "'detail' can't be chosen"),
        (shown(size=5), "'size' is not known"),
        ({**shown(), "uuid": "x"}, "'uuid' is not known"),
        ({"type": "file", "file": {}}, "a part is one of text, image_url, input_audio, audio_url, video_url"),
        ({"type": ["text"]}, "a part is one of text"),
        ({"type": "text"}, "a part is one of text"),
        ("x", "a part is one of text"),
    ],
    ids=str,
)
def test_what_is_no_picture_is_refused_with_its_place(part: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_chat(body(TEXT, part))
    assert "messages[0].content[1]: " in str(error.value)
    assert said in str(error.value)


def test_too_many_pictures_are_refused_however_they_are_spread() -> None:
    """A question behind so many is not the point: all messages count."""
    user, more = {"role": "user", "content": [shown()] * MAX_PICTURES}, {"role": "user", "content": [TEXT, shown()]}
    with pytest.raises(InvalidRequestError, match=f"{MAX_PICTURES + 1} pictures .* may show {MAX_PICTURES}"):
        parse_chat(json.dumps({"messages": [user, more]}).encode())


def test_a_message_of_empty_parts_is_empty() -> None:
    for parts in ((), ({"type": "text", "text": " \n"},)):
        with pytest.raises(InvalidRequestError, match="the last message is empty"):
            parse_chat(body(*parts))


def test_the_longest_body_goes_into_one_message_with_a_long_answer_behind_it() -> None:
    """A hundred thousand tokens of an answer that another replica is to continue have room beside it."""
    bare = len(body(TEXT, shown("data:image/png;base64,")))
    raw = body(TEXT, shown("data:image/png;base64," + "A" * (MAX_BODY_BYTES - bare)))
    assert len(raw) == MAX_BODY_BYTES
    answered = wire.Resume(token_ids=(150_000,) * 100_000, text="five " * 100_000)
    submit = wire.Submit(epoch=1, request_id="r", inputs={"messages": parse_chat(raw).messages}, resume=answered)
    (read,) = wire.decode_to_replica([wire.encode(submit)])
    assert read == submit


def test_a_stream_takes_no_pictures_and_says_where_they_go() -> None:
    frame = {"type": "segment", "messages": [{"role": "user", "content": [TEXT, shown()]}]}
    with pytest.raises(InvalidRequestError, match="POST /v1/chat/completions"):
        parse_frame(json.dumps(frame))
    assert parse_frame(json.dumps({**frame, "messages": [{"role": "user", "content": [TEXT]}]}))


def test_the_file_of_a_picture_is_what_the_client_sent() -> None:
    assert read_picture({"url": URL}) == read_picture(URL) == ("image/png", b"a file")
    assert read_picture("data:image/svg+xml;charset=utf-8;base64,AAAA") == ("image/svg+xml", bytes(3))
    for broken in ("data:image/png;base64,@@@@", "data:image/png;base64,A", "data:image/png;base64,AAAAé"):
        with pytest.raises(InvalidRequestError, match="can't be read"):
            read_picture(broken)


@pytest.mark.parametrize("messages", [None, "x", ["x"], [{"content": "x"}], [{"content": ["x", TEXT]}], {}], ids=str)
def test_no_pictures_are_found_in_what_holds_none(messages: Any) -> None:
    assert picture_parts(messages) == []


# ---- engines


def ask(*parts: dict[str, Any], **more: Any) -> StageRequest:
    earlier = [{"role": "user", "content": [shown()]}, {"role": "assistant", "content": "a dot"}]
    return StageRequest("k", "k", inputs={"messages": [*earlier, {"role": "user", "content": list(parts)}]}, **more)


def engine(name: str, **engine_args: Any) -> Engine:
    made = create_engine(StageConfig(stage_id=0, engine=name, engine_args=engine_args, final_output="text"))
    made.load(lambda _phase, _progress: None)
    return made


def test_what_the_door_lets_in_is_what_a_model_that_looks_is_given() -> None:
    made, buffer = Image.new("RGB", (5, 3), "red"), io.BytesIO()
    made.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    inputs, items = take_items({"messages": parse_chat(body(TEXT, shown(url, detail="auto"))).messages}, PICTURES)
    assert inputs["messages"] == [{"role": "user", "content": [TEXT, {"type": "image"}]}]
    assert items is not None
    assert [each.tobytes() for each in items["image"]] == [made.tobytes()]


def test_the_echo_says_a_picture_as_one_word_that_tells_it_from_others() -> None:
    (word, *others) = run(engine("echo"), ask(shown(), TEXT))["k"]
    assert word.text == "<image/png;bytes=6;crc32=1e70bb54> "
    assert "".join(output.text for output in others) == "what is this"
    with pytest.raises(InvalidRequestError, match="can't be read"):
        engine("echo").add(ask(shown("data:image/png;base64,@")))


def test_a_callable_that_reads_the_prompt_refuses_pictures_unless_a_stage_before_saw_them() -> None:
    made = engine("torch", target="tests.support.callables:echo")
    with pytest.raises(InvalidRequestError, match="takes no pictures; its input has no field 'messages'"):
        made.add(ask(TEXT))
    said = run(made, ask(TEXT, payloads={0: {"text": "seen"}}))["k"]
    assert "".join(output.text for output in said) == "what is this"


def test_a_callable_that_takes_messages_gets_the_pictures() -> None:
    said = run(engine("torch", target="tests.support.callables:look"), ask(TEXT, shown()))["k"]
    assert "".join(output.text for output in said).split()[::2] == ["image/png"] * 2


def test_a_pipeline_that_draws_refuses_to_be_shown_something() -> None:
    traits = Traits("Fake", frozenset({"prompt"}), True, 8, 512)
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]: this stage takes text only"):
        read_drawing(ask(TEXT), traits)


def test_links_on_the_first_stages_list_are_let_in_and_no_others() -> None:
    links = MediaLinks(domains=("example.org",))
    for part in (shown("https://example.org/x.png"), {"type": "video_url", "video_url": "http://example.org/x.mp4"}):
        assert parse_chat(body(TEXT, part), links).messages[0]["content"][1] == part
    for part, said in (
        (shown("https://example.net/x.png"), r"messages\[0\].content\[0\]: image_url: only files of example.org"),
        (shown("file:///etc/passwd"), "files of the replica's host are not read"),
        ({"type": "input_audio", "input_audio": {"data": "https://example.org/x", "format": "wav"}}, "not a URL"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            parse_chat(body(part), links)


@pytest.mark.attack("Y6")
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * (MAX_OBJECTS + 1),
        [{"role": "user", "content": [TEXT] * MAX_OBJECTS}],
        [{"role": "assistant", "tool_calls": [{}] * MAX_OBJECTS}, {"role": "user", "content": "x"}],
    ],
)
def test_thousands_of_messages_parts_and_calls_are_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"messages, parts and calls, and {MAX_OBJECTS} are the most"):
        parse_chat(json.dumps({"messages": messages}).encode())
