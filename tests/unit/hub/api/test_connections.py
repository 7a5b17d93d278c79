"""Which connections wait for their client, since when, and which are closed."""

from __future__ import annotations

import pytest

from hub.api.connections import BODY_BYTES_PER_S, ConnectionLimits, Connections, Cut

LIMITS = ConnectionLimits(
    header_timeout_s=10, body_timeout_s=20, send_timeout_s=30, max_connections=3, max_unfinished_bytes=1000
)


def connections(*names: str) -> Connections[str]:
    made: Connections[str] = Connections(LIMITS)
    for number, name in enumerate(names):
        assert made.opened(name, float(number)) == {}
    return made


def nothing_unsent(_: str) -> int:
    return 0


def test_a_header_has_a_time_from_the_connection_or_the_first_byte_of_a_later_request() -> None:
    """1. a connects and is answered; 2. it is idle: the server's own timer ends that
    3. its next request begins at 50: it has until 60
    """
    made = connections("a")
    made.answered("a")
    made.header_awaited("a", 5.0, is_idle=True)
    assert made.overdue(50.0, nothing_unsent) == {}
    made.header_awaited("a", 50.0)
    made.header_awaited("a", 59.0)
    assert made.overdue(60.0, nothing_unsent) == {}
    assert made.overdue(60.1, nothing_unsent) == {"a": Cut.HEADER_TIMEOUT}
    assert made.overdue(70.0, nothing_unsent) == {}


def test_a_body_may_neither_pause_long_nor_come_too_slowly() -> None:
    made = Connections[str](ConnectionLimits(body_timeout_s=20))
    for name in ("silent", "slow", "long"):
        made.opened(name, 0.0)
        made.body_came(name, 10 * BODY_BYTES_PER_S if name == "silent" else 0, 0.0)
    for now_s in range(1, 20):
        made.body_came("slow", 1, float(now_s))
        made.body_came("long", BODY_BYTES_PER_S, float(now_s))
        assert made.overdue(float(now_s), nothing_unsent) == {}
    for name in ("slow", "long"):
        made.body_came(name, 1, 20.0)
    assert made.overdue(20.5, nothing_unsent) == {"silent": Cut.BODY_TIMEOUT, "slow": Cut.BODY_TIMEOUT}
    assert made.unfinished_bytes == 19 * BODY_BYTES_PER_S + 1


def test_the_largest_body_gives_way_where_the_memory_for_them_is_taken() -> None:
    made = connections("a", "b", "c")
    assert made.body_came("a", 500, 0.0) == {}
    assert made.body_came("b", 400, 0.0) == {}
    assert made.body_came("c", 200, 0.0) == {"a": Cut.BODY_MEMORY}
    assert made.unfinished_bytes == 600
    made.answered("b")
    made.closed("c")
    assert made.unfinished_bytes == 0
    assert made.body_came("b", 5000, 0.0) == {"b": Cut.BODY_MEMORY}


def test_the_one_that_has_waited_longest_gives_its_place() -> None:
    """1. a is served, b sends a body since 1, c a header since 2: d takes the place of b, e that of c
    2. all are served: f is refused; 3. one leaves: g has room
    """
    made = connections("a", "b", "c")
    made.answered("a")
    made.body_came("b", 10, 1.5)
    made.header_awaited("c", 3.0)
    assert made.opened("d", 4.0) == {"c": Cut.DISPLACED}
    made.closed("c")
    assert made.opened("e", 5.0) == {"b": Cut.DISPLACED}
    made.closed("b")
    for each in "de":
        made.answered(each)
    assert made.opened("f", 6.0) == {"f": Cut.REFUSED}
    made.closed("f")
    made.closed("a")
    assert made.opened("g", 7.0) == {}
    assert len(made) == 3


def test_a_client_that_takes_nothing_is_given_up_and_one_that_takes_a_little_is_not() -> None:
    made = connections("dead", "slow", "quick")
    for name in ("dead", "slow", "quick"):
        made.answered(name)
    for now_s in range(100):
        unsent = {"dead": 100 + now_s, "slow": 1000 - now_s // 20, "quick": 5 * (now_s % 2)}
        cut = made.overdue(float(now_s), unsent.__getitem__)
        assert cut == ({"dead": Cut.SEND_TIMEOUT} if "dead" in cut else {})
        assert ("dead" in cut) == (now_s > 30)


def test_one_that_takes_what_lies_in_the_kernel_is_not_given_up_before_it_stops() -> None:
    """What waits in the hub stays the same all the time; the client reads until second 50, and nothing after that."""
    made = connections("slow")
    made.answered("slow")
    for now_s in range(100):
        cut = made.overdue(float(now_s), lambda _: 1000, lambda _, now_s=now_s: min(now_s // 10, 5))  # type: ignore[misc]
        assert cut == ({"slow": Cut.SEND_TIMEOUT} if now_s > 80 else {})


@pytest.mark.attack("Z56")
def test_one_whose_output_lies_gives_its_place_where_none_waits_to_send() -> None:
    """1. all are served; of a and b output lies from 10 and 12 on, though they take some of it all the time
    2. at 14 a newcomer is refused, at 15 it has the place of a, and the next that of b only from 17 on
    """
    made = connections("a", "b", "c")
    for each in "abc":
        made.answered(each)
    for now_s in range(10, 15):
        lies = {"a": 1000 - now_s, "b": 1000 - now_s if now_s >= 12 else 0, "c": 0}
        assert made.overdue(float(now_s), lies.__getitem__) == {}
    assert made.opened("d", 14.9) == {"d": Cut.REFUSED}
    made.closed("d")
    assert made.opened("d", 15.0) == {"a": Cut.DISPLACED}
    made.closed("a")
    made.answered("d")
    assert made.opened("e", 16.9) == {"e": Cut.REFUSED}
    made.closed("e")
    assert made.opened("e", 17.0) == {"b": Cut.DISPLACED}


def test_a_websocket_has_time_but_gives_its_place_until_it_has_sent_something() -> None:
    """1. a and b become WebSockets, c is served; 2. d takes the place of a; b sends, so that e is refused"""
    made = connections("a", "b", "c")
    made.answered("c")
    for each in "ab":
        made.closed(each)
        made.adopted(each, 3.0)
    assert len(made) == 3
    assert made.overdue(1000.0, nothing_unsent) == {}
    assert made.waiting() == ["a", "b"]
    assert made.opened("d", 4.0) == {"a": Cut.DISPLACED}
    made.closed("a")
    made.answered("b")
    made.answered("d")
    assert made.opened("e", 5.0) == {"e": Cut.REFUSED}
    assert sorted(made.all()) == ["b", "c", "d", "e"]


def test_the_message_of_a_websocket_has_the_bounds_of_a_body() -> None:
    made = connections("a")
    made.closed("a")
    made.adopted("a", 0.0)
    assert made.body_came("a", 500, 5.0) == {}
    assert made.unfinished_bytes == 500
    assert made.overdue(26.0, nothing_unsent) == {"a": Cut.BODY_TIMEOUT}
    assert made.unfinished_bytes == 0


def test_a_handshake_holds_a_place_that_its_connection_takes_over() -> None:
    """1. x waits for TLS since 0: with d there is one too many, and x goes; 2. y hands its place on to b: none goes"""
    made = connections()
    assert made.opened("x", 0.0, is_handshake=True) == {}
    assert made.opened("y", 1.0, is_handshake=True) == {}
    assert made.opened("c", 2.0) == {}
    assert made.opened("d", 3.0) == {"x": Cut.DISPLACED}
    made.closed("x")
    assert made.opened("b", 4.0, after="y") == {}
    assert sorted(made.all()) == ["b", "c", "d"]


def test_where_all_are_served_one_handshake_more_may_end_so_that_its_client_is_told() -> None:
    """1. all are served: x may go on to TLS, and then is refused; 2. of two such handshakes the older one goes"""
    made = connections("a", "b", "c")
    for each in "abc":
        made.answered(each)
    assert made.opened("x", 4.0, is_handshake=True) == {}
    assert made.opened("d", 5.0, after="x") == {"d": Cut.REFUSED}
    made.closed("d")
    assert made.opened("y", 6.0, is_handshake=True) == {}
    assert made.opened("z", 7.0, is_handshake=True) == {"y": Cut.DISPLACED}
    assert made.overdue(17.1, nothing_unsent) == {"z": Cut.HEADER_TIMEOUT}


@pytest.mark.attack("Z69")
def test_messages_that_no_endpoint_takes_are_counted_with_unfinished_bodies() -> None:
    """1. two of a and one of b wait, and a body of c comes: the most is a's, and it gives way
    2. what is taken, or goes with its connection, counts no more
    """
    made = connections("a", "b", "c")
    assert made.message_came("a", 300) == {}
    assert made.message_came("a", 200) == {}
    assert made.message_came("b", 400) == {}
    assert made.body_came("c", 200, 0.0) == {"a": Cut.BODY_MEMORY}
    made.message_taken("a", 300)
    assert (made.held_bytes, made.unfinished_bytes) == (400, 200)
    made.message_taken("b", 400)
    assert made.held_bytes == 0
    assert made.message_came("b", 900) == {"b": Cut.BODY_MEMORY}
    assert made.message_came("b", 700) == {}
    made.closed("b")
    made.closed("c")
    assert (made.held_bytes, made.unfinished_bytes) == (0, 0)
    assert made.message_came("a", 1001) == {"a": Cut.BODY_MEMORY}


@pytest.mark.attack("Z73")
def test_of_answers_that_lie_unread_the_largest_go_where_all_are_too_much() -> None:
    """1. a, b and c leave 500, 900 and 100 bytes unread, and take a little each second; 1000 may lie: b goes after 5 s
    2. one that is larger has just come, and stays: the others go
    """
    made: Connections[str] = Connections(ConnectionLimits(max_held_bytes=1000))
    for name in "abcd":
        assert made.opened(name, 0.0) == {}
        made.answered(name)
    lies = {"a": 500, "b": 900, "c": 100, "d": 0}
    for now_s in range(10, 16):
        lies = {name: max(0, size - 1) for name, size in lies.items()}
        found = made.overdue(float(now_s), lies.__getitem__)
        assert found == ({"b": Cut.UNREAD_MEMORY} if now_s == 15 else {})
    made.closed("b")
    lies["d"] = 2000
    assert made.overdue(16.0, lies.__getitem__) == {"a": Cut.UNREAD_MEMORY, "c": Cut.UNREAD_MEMORY}
