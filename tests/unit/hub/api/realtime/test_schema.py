"""Events of clients: what can't be read, and what its error says."""

from __future__ import annotations

import pytest

from hub.api.realtime.schema import BufferCommit, id_of, parse_event
from omni_discovery.errors import InvalidRequestError


@pytest.mark.attack("J1")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "not binary"),
        ("", "not JSON"),
        ("\ud800", "not JSON"),
        ("[]", "can't be used"),
        ('{"type": "song"}', "the event 'song' is not known here; there are conversation.item.create"),
        ('{"type": 5}', "can't be used"),
        ('{"type": "\\u0073ong"}', "the event 'song' is not known here"),
        ('{"type": "response.create", "response": {"input": ' + "[" * 50_001, "more than 50000 lists"),
        ('{"type": "response.create", "response": ' + '{"a":' * 5000 + "1" + "}" * 5001, "can't be used"),
        ('{"type": "conversation.item.create", "item": {"type": "mcp_call"}}', "mcp_call"),
        ('{"type": "conversation.item.delete"}', "item_id"),
        ('{"type": "input_audio_buffer.append", "audio": 5}', "$.audio"),
        ('{"type": "input_audio_buffer.commit", "colour": 1}', "colour"),
        ('{"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": -1}', "audio_end"),
    ],
)
def test_a_wrong_event_is_refused_by_name(text: str | None, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_event(text)
    assert said in str(error.value)


def test_the_id_of_a_wrong_event_is_read_if_there_is_one() -> None:
    assert id_of('{"type": "song", "event_id": "e1"}') == "e1"
    assert id_of('{"event_id": "\\u00e9\\ud83d\\ude00"}') == "é😀"
    assert id_of('{"event_id": "' + "\\ud83d\\ude00" * 512 + '"}') == "😀" * 512
    for text in (None, "", "{", "[]", '{"event_id": 5}', '{"event_id": "\\ud800"}'):
        assert id_of(text) is None
    assert id_of('{"event_id": "' + "x" * 513 + '"}') is None


def test_an_event_may_have_an_id() -> None:
    assert parse_event('{"type": "input_audio_buffer.commit", "event_id": "e1"}') == BufferCommit(event_id="e1")


@pytest.mark.attack("Q1")
def test_what_a_wrong_event_has_in_the_place_of_its_id_is_not_read() -> None:
    """3 MiB of such numbers took the hub's loop 4 s, and as long again for the id of the error."""
    text = '{"type": "response.create", "event_id": [' + "1e308," * 2000 + "1]}"
    with pytest.raises(InvalidRequestError, match="more than 1024 numbers"):
        parse_event(text)
    assert id_of(text) is None
    # Not even whether it is a number that there is.
    assert id_of('{"type": "song", "event_id": 1e999}') is None
    with pytest.raises(InvalidRequestError, match="the event 'song' is not known here"):
        parse_event('{"type": "song", "event_id": [1e999]}')
