"""What h11 may be given to parse: the costs of one request's framing."""

from __future__ import annotations

import h11
import pytest

from hub.api.connections import Cut
from hub.api.protocols import _Framing, place_of

LINE = b"a: b\r\n"


def parsed(*pieces: bytes) -> tuple[list[type], Cut | None]:
    """The events of what a client sends, and what is wrong with it."""
    framing, events = _Framing(), list[type]()
    for piece in pieces:
        framing.receive_data(piece)
        while (event := framing.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            events.append(type(event))
    return events, framing.fault


@pytest.mark.attack("T1")
@pytest.mark.parametrize("line", [LINE, b" x\r\n", b"a:\n"])
def test_a_header_with_thousands_of_lines_is_refused_before_it_is_parsed(line: bytes) -> None:
    """Each took some 5 us of the loop, of whatever length: 24 KiB of them held all clients up for 24 ms."""
    begin = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    assert parsed(begin + line * 2000, line * 1000 + b"\r\n") == ([], Cut.MANY_LINES)
    assert parsed(begin + LINE * 200 + b"\r\n") == ([h11.Request, h11.EndOfMessage], None)


@pytest.mark.attack("T1")
def test_what_comes_behind_a_body_has_few_lines_too() -> None:
    begin = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    assert parsed(begin, LINE * 2000 + b"\r\n") == ([h11.Request, h11.Data], Cut.MANY_LINES)
    assert parsed(begin, LINE * 10 + b"\r\n") == ([h11.Request, h11.Data, h11.EndOfMessage], None)


@pytest.mark.attack("X5")
def test_addresses_of_one_network_of_a_host_have_turns_together() -> None:
    assert place_of(("2001:db8::1", 5)) == place_of(("2001:db8::2%eth0", 6)) == "2001:db8::/64"
    assert place_of(("::ffff:10.0.0.1", 5)) == place_of(("10.0.0.1", 6)) == "10.0.0.1"
    assert place_of(None) == ""
