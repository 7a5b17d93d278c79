"""The events of one response, and how much of its sound a client can have heard."""

from __future__ import annotations

import base64

from hub.api.realtime.conversation import BYTES_PER_MS, ConversationItem
from hub.api.realtime.response import SpokenResponse
from hub.api.realtime.settings import SessionSettings


def response(modality: str = "audio") -> SpokenResponse:
    item = ConversationItem("item_1", "message", "assistant", status="in_progress")
    return SpokenResponse("resp_1", item, SessionSettings(modality=modality), "conv_1")


def test_sound_is_cut_into_messages_that_clients_take() -> None:
    """Twenty seconds in one piece; each message is a piece that can be decoded by itself."""
    made = response()
    made.first(None)
    sound = bytes(range(256)) * 3750
    events = made.sound(sound, 1.0)
    pieces = [base64.b64decode(each["delta"]) for each in events]
    assert b"".join(pieces) == sound
    assert all(len(each) <= 48_000 and len(each) % 2 == 0 for each in pieces)


def test_a_client_has_heard_what_was_sent_but_no_more_than_time_allows() -> None:
    made = response()
    assert made.heard_ms(5.0) == 0
    made.first(None)
    made.sound(bytes(1000 * BYTES_PER_MS), 2.0)
    made.sound(bytes(1000 * BYTES_PER_MS), 2.1)
    assert [made.heard_ms(now_s) for now_s in (2.0, 3.5, 60.0)] == [0, 1500, 2000]


def test_a_response_without_output_has_no_item() -> None:
    made = response("text")
    assert made.end("completed", None) == []
    done = made.done()
    assert (done["response"]["output"], done["response"]["status"]) == ([], "completed")
