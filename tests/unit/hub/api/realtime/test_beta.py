"""Every event that a session sends, as OpenAI's beta knows it."""

from __future__ import annotations

from openai.types.beta.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from hub.api.realtime.beta import as_beta
from tests.unit.hub.api.realtime.test_machine import Talk


def test_the_betas_events_are_those_of_its_library() -> None:
    """Sound in, sound and text out, a call of a function, an error, a truncation."""
    talk = Talk()
    talk.say("session.update", session={"voice": "ann"})
    call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c1"}
    talk.say("conversation.item.create", item=call)
    talk.hear(500, 900)
    talk.answer("Good ", "day", sound_ms=100)
    talk.end()
    talk.say("conversation.item.truncate", item_id=talk.sent[-2]["item"]["id"], content_index=0, audio_end_ms=50)
    talk.say("response.create", response={"modalities": ["text"]})
    talk.answer("words")
    talk.end()
    talk.say("input_audio_buffer.clear")
    talk.say("response.cancel")
    adapter = TypeAdapter(RealtimeServerEvent)
    shown = [as_beta(event) for event in talk.sent]
    for event in shown:
        if event is not None and "session" in event:
            # It only knows OpenAI's own models.
            assert event["session"].pop("model") == "omni"
    seen = [adapter.validate_python(event).type for event in shown if event is not None]
    assert shown.count(None) == sum(event["type"] == "conversation.item.done" for event in talk.sent) > 0
    assert {"conversation.item.created", "response.audio.delta", "response.audio_transcript.done"} < set(seen)
    assert {"response.text.delta", "response.text.done", "error", "conversation.item.truncated"} < set(seen)
    assert shown[0] is not None
    assert shown[0]["session"]["modalities"] == ["text", "audio"]
    done = [event["response"] for event in shown if event and event["type"] == "response.done"]
    assert [each["output"][0]["content"][0]["type"] for each in done] == ["audio", "text"]
    assert [each["modalities"] for each in done] == [["text", "audio"], ["text"]]
