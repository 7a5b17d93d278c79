"""A session's machine: events in, actions out. No clock, no socket; sounds are encoded by a word."""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hub.api.realtime.conversation import BYTES_PER_MS, messages_of
from hub.api.realtime.events import (
    BeginResponse,
    EncodeSounds,
    EndResponse,
    EventFailed,
    RealtimeAction,
    RealtimeEvent,
    ResponseEnded,
    SendEvent,
    SoundCame,
    SoundMade,
    SoundsEncoded,
    WordsMade,
)
from hub.api.realtime.machine import RealtimeMachine
from hub.api.realtime.schema import BufferAppend, parse_event
from hub.api.realtime.settings import Abilities
from hub.config import RealtimeBounds
from omni_discovery.errors import InvalidRequestError, OverloadedError
from omni_discovery.wire import ToolCall

BOTH = Abilities("omni", speaks=True, writes=True)
ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
FRAME = bytes(20 * BYTES_PER_MS)


class Talk:
    """A client, and what the driver does."""

    def __init__(self, abilities: Abilities = BOTH, bounds: RealtimeBounds | None = None) -> None:
        self.machine = RealtimeMachine("x", abilities, bounds or RealtimeBounds(), 99)
        self.now_s = 1.0
        self.sent: list[dict[str, Any]] = []
        self.begun: list[BeginResponse] = []
        self.ended: list[str] = []
        self._do(self.machine.begin())

    def say(self, kind: str, **fields: Any) -> list[str]:
        """Send an event; return the types of what comes."""
        return self.come(parse_event(json.dumps({"type": kind, **fields})))

    def come(self, event: RealtimeEvent) -> list[str]:
        before = len(self.sent)
        self._do(self.machine.handle(event, self.now_s))
        return [each["type"] for each in self.sent[before:]]

    def hear(self, *lengths_ms: int) -> list[str]:
        """Voice and silence by turns."""
        types = []
        for number, length_ms in enumerate(lengths_ms):
            count = length_ms // 20
            types += self.come(SoundCame(FRAME * count, [number % 2 == 0] * count))
        return types

    def text(self, text: str, **fields: Any) -> list[str]:
        part = {"type": "input_text", "text": text}
        item = {"type": "message", "role": "user", "content": [part]}
        return self.say("conversation.item.create", item=item, **fields)

    def answer(self, *words: str, sound_ms: int = 0) -> list[str]:
        response_id = self.begun[-1].response_id
        types = [kind for word in words for kind in self.come(WordsMade(response_id, word))]
        if sound_ms:
            types += self.come(SoundMade(response_id, bytes(sound_ms * BYTES_PER_MS)))
        return types

    def end(self, **more: Any) -> list[str]:
        return self.come(ResponseEnded(self.begun[-1].response_id, {"total_tokens": 3}, **more))

    @property
    def last(self) -> dict[str, Any]:
        return self.sent[-1]

    def _do(self, actions: list[RealtimeAction]) -> None:
        for action in actions:
            match action:
                case SendEvent(event):
                    self.sent.append(json.loads(json.dumps(event)))
                case EncodeSounds(item_id, sounds):
                    self._do(self.machine.handle(SoundsEncoded(item_id, [("AAAA", "opus")] * len(sounds)), self.now_s))
                case BeginResponse():
                    self.begun.append(action)
                case EndResponse(response_id):
                    self.ended.append(response_id)


def test_a_spoken_answer_has_its_events_in_openais_order() -> None:
    talk = Talk()
    assert [each["type"] for each in talk.sent] == ["session.created"]
    assert talk.text("hello") == ["conversation.item.added", "conversation.item.done"]
    assert talk.say("response.create") == ["response.created"]
    assert talk.begun[0].messages == [{"role": "user", "content": "hello"}]
    assert talk.answer("Good ", "day", sound_ms=1500) == [
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio_transcript.delta",
        # A second each.
        "response.output_audio.delta",
        "response.output_audio.delta",
    ]
    assert talk.end() == [
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    done = talk.last["response"]
    assert (done["status"], done["usage"]) == ("completed", {"total_tokens": 3})
    assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": "Good day"}]
    assert len({each["event_id"] for each in talk.sent}) == len(talk.sent)


def test_a_text_answer_has_no_sound_though_the_pipeline_makes_some() -> None:
    talk = Talk()
    talk.text("hello")
    talk.say("response.create", response={"output_modalities": ["text"]})
    assert talk.answer("Good day", sound_ms=100)[-1] == "response.output_text.delta"
    talk.end()
    assert talk.last["response"]["output"][0]["content"] == [{"type": "output_text", "text": "Good day"}]


def test_speech_becomes_a_turn_that_is_answered() -> None:
    """Silence of 500 ms ends it; the sound that the item has begins 300 ms before the voice."""
    talk = Talk()
    assert talk.come(SoundCame(FRAME * 50, [False] * 50)) == []
    assert talk.hear(1000, 400) == ["input_audio_buffer.speech_started"]
    assert talk.last["audio_start_ms"] == 700
    started = talk.last["item_id"]
    assert talk.come(SoundCame(FRAME * 30, [False] * 30)) == [
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
    ]
    stopped = next(each for each in talk.sent if each["type"].endswith("speech_stopped"))
    assert (stopped["audio_end_ms"], stopped["item_id"]) == (2500, started)
    (part,) = talk.begun[0].messages[0]["content"]
    assert part == {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "opus"}}


def test_a_turn_gets_no_answer_where_its_speaker_goes_on_already() -> None:
    """Both have come in one piece: the later turn is answered, with the first in front of it."""
    talk = Talk()
    types = talk.come(SoundCame(FRAME * 110, [True] * 50 + [False] * 40 + [True] * 20))
    assert types.count("input_audio_buffer.speech_started") == 2
    assert "response.created" not in types
    assert talk.come(SoundCame(FRAME * 40, [False] * 40))[-1] == "response.created"
    assert len(talk.begun[0].messages) == 2


def test_speech_ends_the_answer_and_what_was_not_heard_is_forgotten() -> None:
    """1. ten words, 4 s of sound; 2. the client speaks 2 s after the first sound: half is heard, and kept"""
    talk = Talk()
    talk.text("count")
    talk.say("response.create")
    talk.answer("one two three four five six seven eight nine ten", sound_ms=4000)
    talk.now_s += 2.0
    types = talk.hear(200)
    assert types[0] == "input_audio_buffer.speech_started"
    assert types[-2:] == ["response.done", "conversation.item.truncated"]
    assert talk.ended == [talk.begun[0].response_id]
    assert (talk.last["audio_end_ms"], talk.last["content_index"]) == (2000, 0)
    done = talk.sent[-2]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
    talk.hear(300, 800)
    assert talk.begun[1].messages[1] == {"role": "assistant", "content": "one two three four five"}


def test_what_comes_of_a_response_that_was_ended_is_dropped() -> None:
    talk = Talk()
    talk.text("count")
    talk.say("response.create")
    assert talk.say("response.cancel")[-1] == "response.done"
    assert talk.answer("late", sound_ms=100) == talk.end() == []
    assert talk.say("response.cancel") == ["error"]
    assert talk.last["error"]["code"] == "response_cancel_not_active"


def test_without_interruption_the_answer_goes_on_and_the_turn_gets_none() -> None:
    talk = Talk()
    detection = {"type": "server_vad", "interrupt_response": False}
    talk.say("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": detection}}})
    talk.text("count")
    talk.say("response.create")
    assert talk.hear(400, 800)[-1] == "error"
    assert talk.last["error"]["code"] == "conversation_already_has_active_response"
    assert (talk.machine.is_responding, talk.ended) == (True, [])


def test_without_detection_the_client_says_where_its_turns_end() -> None:
    talk = Talk()
    update = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
    assert talk.say("session.update", session=update) == ["session.updated"]
    assert talk.last["session"]["audio"]["input"]["turn_detection"] is None
    assert talk.say("input_audio_buffer.commit", event_id="e1") == ["error"]
    assert (talk.last["error"]["code"], talk.last["error"]["event_id"]) == ("input_audio_buffer_commit_empty", "e1")
    assert talk.come(SoundCame(FRAME * 50, None)) == []
    assert talk.say("input_audio_buffer.commit")[0] == "input_audio_buffer.committed"
    assert talk.begun == []
    talk.come(SoundCame(FRAME * 50, None))
    assert talk.say("input_audio_buffer.clear") == ["input_audio_buffer.cleared"]
    assert talk.say("input_audio_buffer.commit") == ["error"]


def test_a_buffer_that_is_full_takes_no_more_and_keeps_what_it_has() -> None:
    talk = Talk(bounds=RealtimeBounds(max_turn_s=1.0))
    talk.say("session.update", session={"turn_detection": None})
    assert talk.come(SoundCame(FRAME * 50, None)) == []
    assert talk.come(SoundCame(FRAME, None, "e2")) == ["error"]
    assert (talk.last["error"]["code"], talk.last["error"]["event_id"]) == ("input_audio_buffer_full", "e2")
    assert talk.say("input_audio_buffer.commit")[0] == "input_audio_buffer.committed"


def test_a_turn_without_end_is_ended_at_its_bound() -> None:
    talk = Talk(bounds=RealtimeBounds(max_turn_s=1.0))
    types = talk.hear(3000)
    assert types.count("input_audio_buffer.committed") >= 2
    assert talk.machine.size_bytes < 1200 * BYTES_PER_MS + 5000


def test_items_are_put_where_the_client_wants_them_shown_and_deleted() -> None:
    talk = Talk()
    talk.text("b")
    first = talk.last["item"]["id"]
    talk.text("a", previous_item_id="root")
    assert talk.last["previous_item_id"] is None
    talk.text("c", previous_item_id=first)
    assert [item.content[0].text for item in talk.machine.conversation] == ["a", "b", "c"]
    assert talk.text("d", previous_item_id="nobody") == ["error"]
    assert talk.say("conversation.item.retrieve", item_id=first) == ["conversation.item.retrieved"]
    assert talk.last["item"]["content"] == [{"type": "input_text", "text": "b"}]
    assert talk.say("conversation.item.delete", item_id=first) == ["conversation.item.deleted"]
    assert talk.say("conversation.item.retrieve", item_id=first, event_id="e3") == ["error"]
    assert (talk.last["error"]["code"], talk.last["error"]["event_id"]) == ("not_found", "e3")


def test_what_a_tool_has_said_reaches_the_stage_with_its_call() -> None:
    talk = Talk()
    call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c1"}
    talk.say("conversation.item.create", item=call)
    output = {"type": "function_call_output", "call_id": "c1", "output": "74"}
    talk.say("conversation.item.create", item=output)
    talk.say("response.create")
    assert talk.begun[0].messages == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "74"},
    ]


def test_a_function_is_called_and_what_it_says_is_answered() -> None:
    """1. the stage gets the tools as a chat has them; 2. words and two calls, each an item; 3. all that comes next"""
    talk = Talk()
    talk.say("session.update", session={"type": "realtime", "tools": [ADD], "output_modalities": ["text"]})
    assert talk.last["session"]["tools"] == [ADD]
    talk.text("26 plus 48")
    talk.say("response.create")
    function = {name: value for name, value in ADD.items() if name != "type"}
    assert talk.begun[0].settings.tools.inputs() == {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    talk.answer("I add.")
    calls = [ToolCall(name="add", arguments=each) for each in ('{"a": 26}', '{"a": 48}')]
    types = talk.end(calls=calls)
    assert types[:5] == [
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.output_item.added",
    ]
    of_call = [
        "response.output_item.added",
        "conversation.item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "conversation.item.done",
        "response.output_item.done",
    ]
    assert types[4:] == [*of_call, *of_call, "response.done"]
    message, first, second = talk.last["response"]["output"]
    assert (message["type"], first["name"], first["arguments"]) == ("message", "add", '{"a": 26}')
    assert first["status"] == second["status"] == "completed"
    assert [each["output_index"] for each in talk.sent if each["type"] == of_call[3]] == [1, 2]
    for item, said in ((first, "26"), (second, "")):
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": said}
        talk.say("conversation.item.create", item=output)
    talk.say("response.create", response={"tool_choice": "none"})
    assert talk.begun[1].settings.tools.inputs() == {}
    question, words, called, *answers = talk.begun[1].messages
    assert (question["content"], words["content"]) == ("26 plus 48", "I add.")
    assert [each["function"]["arguments"] for each in called["tool_calls"]] == ['{"a": 26}', '{"a": 48}']
    assert [(each["role"], each["content"]) for each in answers] == [("tool", "26"), ("tool", "")]


def test_a_call_outside_of_the_conversation_stays_outside() -> None:
    talk = Talk()
    asked = {"conversation": "none", "input": [{"type": "message", "role": "user", "content": []}], "tools": [ADD]}
    asked["input"] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "26 plus 48"}]}]
    talk.say("response.create", response=asked)
    types = talk.end(calls=[ToolCall(name="add", arguments="{}")])
    assert [each for each in types if each.startswith("conversation.")] == []
    assert [each["type"] for each in talk.last["response"]["output"]] == ["function_call"]
    assert len(talk.machine.conversation) == 0


def test_truncation_forgets_words_and_answers_for_what_it_can_not_do() -> None:
    talk = Talk()
    talk.text("count")
    user = talk.last["item"]["id"]
    talk.say("response.create")
    talk.answer("one two three four", sound_ms=2000)
    item_id = talk.begun and talk.sent[-1]["item_id"]
    fields = {"item_id": item_id, "content_index": 0}
    assert talk.say("conversation.item.truncate", **fields, audio_end_ms=1000) == ["error"]
    assert "response.cancel" in talk.last["error"]["message"]
    talk.end()
    assert talk.say("conversation.item.truncate", **fields, audio_end_ms=2001) == ["error"]
    assert talk.say("conversation.item.truncate", item_id=user, content_index=0, audio_end_ms=0) == ["error"]
    assert talk.say("conversation.item.truncate", **fields, audio_end_ms=1000) == ["conversation.item.truncated"]
    talk.say("conversation.item.retrieve", item_id=item_id)
    assert talk.last["item"]["content"] == [{"type": "output_audio", "transcript": "one two"}]


def test_a_response_of_its_own_leaves_the_conversation_as_it_is() -> None:
    talk = Talk()
    talk.text("remember this")
    item_id = talk.last["item"]["id"]
    part = {"type": "input_text", "text": "and classify it"}
    asked = [{"type": "item_reference", "id": item_id}, {"type": "message", "role": "user", "content": [part]}]
    response = {"conversation": "none", "input": asked, "instructions": "be brief", "metadata": {"topic": "x"}}
    talk.say("response.create", response=response)
    assert [each["content"] for each in talk.begun[0].messages] == ["be brief", "remember this", "and classify it"]
    assert "conversation.item.added" not in talk.answer("fine")
    talk.end()
    assert talk.last["response"]["metadata"] == {"topic": "x"}
    assert talk.last["response"]["conversation_id"] is None
    assert len(talk.machine.conversation) == 1


def test_a_response_that_fails_says_why_and_the_session_goes_on() -> None:
    talk = Talk()
    talk.text("hello")
    talk.say("response.create")
    talk.answer("Good")
    talk.end(error=OverloadedError("too much", 2.0))
    done = talk.last["response"]
    assert (done["status"], done["output"][0]["status"]) == ("failed", "incomplete")
    assert done["status_details"]["error"]["code"] == "overloaded"
    assert talk.say("response.create") == ["response.created"]
    talk.answer("Good")
    talk.end(is_cut=True)
    assert talk.last["response"]["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}


def test_nothing_to_answer_is_an_error_and_begins_nothing() -> None:
    talk = Talk()
    assert talk.say("response.create", event_id="e4") == ["error"]
    assert (talk.last["error"]["event_id"], talk.begun) == ("e4", [])
    assert talk.say("response.create", response={"instructions": "greet them"}) == ["response.created"]


def test_a_full_conversation_forgets_its_oldest_items_or_says_so() -> None:
    talk = Talk(bounds=RealtimeBounds(max_items=3))
    for number in range(4):
        types = talk.text(str(number))
    assert types[0] == "conversation.item.deleted"
    assert [item.content[0].text for item in talk.machine.conversation] == ["1", "2", "3"]
    first = next(iter(talk.machine.conversation)).item_id
    # The item behind which it was to be put is the one that went.
    assert talk.text("4", previous_item_id=first)[0] == "conversation.item.deleted"
    assert [item.content[0].text for item in talk.machine.conversation] == ["2", "3", "4"]
    talk.say("session.update", session={"truncation": "disabled"})
    assert talk.text("5") == ["error"]
    assert talk.last["error"]["code"] == "overloaded"


def test_an_item_that_can_not_be_encoded_is_left_out() -> None:
    machine = RealtimeMachine("x", BOTH, RealtimeBounds(), 99)
    machine.handle(SoundCame(FRAME * 100, [True] * 50 + [False] * 50), 1.0)
    actions = machine.handle(SoundsEncoded(next(iter(machine._coming)), []), 1.0)
    assert (actions, len(machine.conversation)) == ([], 0)


def test_a_pipeline_that_does_not_speak_answers_in_text_and_says_what_it_lacks() -> None:
    talk = Talk(Abilities("words", speaks=False, writes=True, no_detection="no detector here"))
    assert talk.sent[0]["session"]["output_modalities"] == ["text"]
    assert talk.sent[0]["session"]["audio"]["input"]["turn_detection"] is None
    assert talk.say("session.update", session={"output_modalities": ["audio"]}) == ["error"]
    assert "puts out no audio" in talk.last["error"]["message"]
    assert talk.say("session.update", session={"turn_detection": {"type": "server_vad"}}) == ["error"]
    assert "no detector here" in talk.last["error"]["message"]


def test_foreign_errors_become_events() -> None:
    talk = Talk()
    assert talk.come(EventFailed(InvalidRequestError("no"), "e5")) == ["error"]
    assert talk.last["error"] == {
        "type": "invalid_request_error",
        "code": "invalid_request",
        "message": "no",
        "param": None,
        "event_id": "e5",
    }


# ---- whatever comes, in whatever order

_TEXT = st.sampled_from(["", "hello there", "one two three four", "  "])
_ID = st.one_of(st.sampled_from(["root", "mine", "nobody"]), st.integers(1, 60).map(lambda n: f"item_x_{n}"))
_ROLES = st.sampled_from(["user", "assistant", "system"])
_SOUND = st.sampled_from([FRAME, FRAME * 10, FRAME * 60])


def _part(kind: str, text: str) -> dict[str, Any]:
    audio = base64.b64encode(FRAME * 7).decode()
    named = {"input_audio": {"audio": audio}, "output_audio": {"transcript": text}}
    return {"type": kind, **named.get(kind, {"text": text})}


_PARTS = st.builds(_part, st.sampled_from(["input_text", "input_audio", "output_text", "output_audio", "text"]), _TEXT)
_ITEMS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("message"), "role": _ROLES, "content": st.lists(_PARTS, min_size=1, max_size=2)},
        optional={"id": _ID},
    ),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, _TEXT),
    st.builds(lambda text: {"type": "function_call", "name": "f", "arguments": text}, _TEXT),
)
_DETECTION = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"type": st.just("server_vad")},
        optional={
            "threshold": st.sampled_from([0, 0.5, 1]),
            "prefix_padding_ms": st.sampled_from([0, 300, 5000]),
            "silence_duration_ms": st.sampled_from([20, 500]),
            "create_response": st.booleans(),
            "interrupt_response": st.booleans(),
        },
    ),
)
_SESSION = st.fixed_dictionaries(
    {},
    optional={
        "turn_detection": _DETECTION,
        "instructions": _TEXT,
        "truncation": st.sampled_from(["auto", "disabled"]),
        "output_modalities": st.sampled_from([["text"], ["audio"]]),
        "tools": st.sampled_from([[], [{"type": "function", "name": "add"}]]),
        "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "name": "add"}]),
    },
)
_RESPONSE = st.fixed_dictionaries(
    {},
    optional={
        "conversation": st.sampled_from(["auto", "none"]),
        "input": st.lists(st.one_of(_ITEMS, _ID.map(lambda name: {"type": "item_reference", "id": name})), max_size=3),
        "output_modalities": st.sampled_from([["text"], ["audio"]]),
    },
)


def _says(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


_CLIENT = st.one_of(
    _says("session.update", session=_SESSION),
    _says("input_audio_buffer.commit"),
    _says("input_audio_buffer.clear"),
    _says("conversation.item.create", item=_ITEMS, previous_item_id=st.one_of(st.none(), _ID)),
    _says("conversation.item.retrieve", item_id=_ID),
    _says("conversation.item.delete", item_id=_ID),
    _says("conversation.item.truncate", item_id=_ID, content_index=st.integers(0, 1), audio_end_ms=st.integers(0, 900)),
    _says("response.create", response=_RESPONSE),
    _says("response.create"),
    _says("response.cancel"),
)
_STEPS = st.one_of(
    _CLIENT,
    st.tuples(st.just("sound"), _SOUND, st.booleans()),
    st.tuples(st.just("words"), _TEXT, st.just(0)),
    st.tuples(st.just("made"), _SOUND, st.just(0)),
    st.tuples(st.just("end"), st.booleans(), st.booleans()),
    st.tuples(st.just("wait"), st.floats(0, 5), st.just(0)),
)
_BOUNDS = RealtimeBounds(max_turn_s=2.0, max_items=6, max_item_bytes=20_000)


def _step(talk: Talk, step: Any) -> None:
    response_id = talk.begun[-1].response_id if talk.begun else "resp_none"
    if isinstance(step, dict):
        talk.say(step.pop("type"), **step)
        return
    kind, value, other = step
    match kind:
        case "sound":
            voiced = None if talk.machine.settings.turn_detection is None else [other] * (len(value) // len(FRAME))
            talk.come(SoundCame(value, voiced))
        case "words":
            talk.come(WordsMade(response_id, value))
        case "made":
            talk.come(SoundMade(response_id, value))
        case "end":
            error = InvalidRequestError("it was told to fail") if value else None
            calls = [ToolCall(name="add", arguments="{}")] * other
            talk.come(ResponseEnded(response_id, None, other, error, calls))
        case "wait":
            talk.now_s += value


@settings(max_examples=150, deadline=None)
@given(st.lists(_STEPS, max_size=40))
def test_whatever_comes_nothing_is_raised_and_every_bound_holds(steps: list[Any]) -> None:
    talk = Talk(bounds=_BOUNDS)
    for step in steps:
        before = len(talk.sent)
        _step(talk, step)
        conversation = talk.machine.conversation
        assert len(conversation) <= _BOUNDS.max_items
        assert talk.machine._listening.size_bytes <= (2000 + 5200) * BYTES_PER_MS
        assert conversation.size_bytes == sum(item.size_bytes for item in conversation) or talk.machine.is_responding
        assert talk.machine._coming == {}
        assert len({each["event_id"] for each in talk.sent}) == len(talk.sent)
        # A refused event is answered by that alone; a turn that can't be answered is a turn all the same.
        new = [each["type"] for each in talk.sent[before:]]
        assert "error" not in new or isinstance(step, tuple) or new == ["error"]
    begun = [each["response"]["id"] for each in talk.sent if each["type"] == "response.created"]
    done = Counter(each["response"]["id"] for each in talk.sent if each["type"] == "response.done")
    assert set(done.values()) <= {1}
    assert begun[: len(done)] == list(done)
    assert len(begun) - len(done) == talk.machine.is_responding
    assert [each.response_id for each in talk.begun] == begun
    for each in talk.begun:
        assert each.messages
    added = Counter(each["item"]["id"] for each in talk.sent if each["type"] == "conversation.item.added")
    gone = Counter(each["item_id"] for each in talk.sent if each["type"] == "conversation.item.deleted")
    there = Counter(item.item_id for item in talk.machine.conversation)
    assert added - gone == there


def test_an_append_is_the_drivers_and_does_nothing_here() -> None:
    talk = Talk()
    assert talk.come(BufferAppend(audio="AAAA")) == []


@pytest.mark.parametrize("truncates", [True, False])
def test_a_request_holds_the_latest_items_that_fit(truncates: bool) -> None:
    """Seventeen sounds are one too many: the first is left out, or nothing is asked."""
    talk = Talk()
    talk.say("session.update", session={"turn_detection": None, "truncation": "auto" if truncates else "disabled"})
    for _ in range(17):
        talk.come(SoundCame(FRAME * 10, None))
        talk.say("input_audio_buffer.commit")
    if truncates:
        assert len(messages_of(list(talk.machine.conversation), "", truncates=True)) == 16
        assert talk.say("response.create") == ["response.created"]
    else:
        assert talk.say("response.create") == ["error"]
        assert "too long for one request" in talk.last["error"]["message"]
