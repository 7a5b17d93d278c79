"""The queues towards the hubs: in order, bounded, in few frames, and each hub only in its own way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery import wire
from stage_runtime.server.outbox import Frames, Outbox, SendResult


def head(number: int, size: int = 0) -> bytes:
    return wire.encode(
        wire.Chunk(epoch=1, request_id="r", seq=number, modality="text", queue_length=0, text="x" * size)
    )


class Line:
    """Where frames go, taken apart again; ``state`` says what becomes of them."""

    def __init__(self) -> None:
        self.state: dict[str, SendResult] = {}
        #: The numbers of the messages in each multipart, by hub.
        self.sent: list[tuple[str, list[int]]] = []
        self.attachments: list[bytes] = []

    def send(self, name: str, frames: Frames) -> SendResult:
        result = self.state.get(name, SendResult.SENT)
        if result is SendResult.SENT:
            messages, attachments = wire.decode_from_replica(frames)
            self.sent.append((name, [message.seq for message in messages if isinstance(message, wire.Chunk)]))
            self.attachments += [bytes(each) for each in attachments]
        return result


def test_what_can_not_be_sent_waits_and_leaves_in_order() -> None:
    line = Line()
    outbox = Outbox(line.send, 10, 1000)
    line.state["a"] = SendResult.FULL
    for number in (1, 2):
        assert outbox.push_message("a", head(number))
        assert outbox.push_message("b", head(number))
        outbox.flush_all(0.0)
    assert line.sent == [("b", [1]), ("b", [2])]
    line.state.clear()
    outbox.push_message("a", head(3))
    outbox.retry_all(1.0)
    assert line.sent[2:] == [("a", [1, 2, 3])]
    assert outbox.waiting == 0


def test_what_goes_to_one_hub_goes_together_and_attachments_alone() -> None:
    """1. two messages, one with a picture, two more; 2. three multiparts, in the order of the messages."""
    line = Line()
    outbox = Outbox(line.send, 10, 10_000)
    for number, attachment in ((1, None), (2, None), (3, b"png"), (4, None), (5, None)):
        outbox.push_message("a", head(number), attachment)
    outbox.flush_all(0.0)
    assert line.sent == [("a", [1, 2]), ("a", [3]), ("a", [4, 5])]
    assert line.attachments == [b"png"]
    assert outbox.waiting == 0


def test_a_batch_is_bounded_by_count_and_by_size() -> None:
    line = Line()
    outbox = Outbox(line.send, 5000, 64 << 20)
    for number in range(2500):
        outbox.push_message("a", head(number))
    for number in range(4):
        outbox.push_message("b", head(number, 150_000))
    outbox.flush_all(0.0)
    assert [len(numbers) for name, numbers in line.sent if name == "a"] == [128] * 19 + [68]
    assert [number for name, numbers in line.sent if name == "a" for number in numbers] == list(range(2500))
    assert [numbers for name, numbers in line.sent if name == "b"] == [[0], [1], [2], [3]]


def test_one_head_alone_is_no_batch() -> None:
    head_of_one = wire.encode(wire.Accepted(epoch=1, request_id="r", queue_length=0))
    assert wire.join([head_of_one]) == head_of_one


@pytest.mark.parametrize("count", [2, 15, 16, 17, 1024])
def test_joined_heads_are_the_batch_that_the_wire_would_write(count: int) -> None:
    messages = [wire.Accepted(epoch=1, request_id=f"r{number}", queue_length=number) for number in range(count)]
    assert wire.join([wire.encode(message) for message in messages]) == wire.encode(messages)


def test_both_bounds_hold_and_only_for_the_hub_that_fills_them() -> None:
    line = Line()
    outbox = Outbox(line.send, 2, 1000)
    line.state = dict.fromkeys(("a", "b"), SendResult.FULL)
    assert [outbox.push_message("a", head(1)) for _ in range(3)] == [True, True, False]
    assert [outbox.push_message("b", head(1, 600)) for _ in range(2)] == [True, False]
    assert outbox.push_message("c", head(1, 600))
    assert outbox.waiting == 4


def test_a_hub_is_behind_from_half_of_a_bound_on_until_a_quarter_waits() -> None:
    """1. of eight messages four wait: it is; 2. three are left: it still is; two: it has caught up; 3. by size alike"""
    line = Line()
    outbox = Outbox(line.send, 8, 1 << 20)
    line.state["a"] = SendResult.FULL
    for number in range(3):
        outbox.push_message("a", head(number), b"x", request="r")
    outbox.flush_all(0.0)
    assert (outbox.behind, outbox.blocked) == (set(), {"a"})
    outbox.push_message("a", head(3), b"x", request="r")
    assert outbox.behind == {"a"}
    taken: list[int] = []

    def one_more(_name: str, _frames: Frames) -> SendResult:
        taken.append(len(taken))
        return SendResult.SENT if len(taken) == 1 else SendResult.FULL

    outbox._send = one_more
    outbox.retry_all(1.0)
    assert outbox.behind == {"a"}
    taken.clear()
    outbox.retry_all(2.0)
    assert (outbox.behind, outbox.blocked) == (set(), {"a"})
    outbox.push_message("b", head(0, 600_000))
    assert outbox.behind == {"b"}
    outbox._send = line.send
    line.state.clear()
    outbox.retry_all(3.0)
    assert (outbox.behind, outbox.blocked, outbox.waiting) == (set(), set(), 0)


def test_a_hub_that_reads_nothing_is_blocked_since_the_first_try_and_until_it_reads() -> None:
    line = Line()
    outbox = Outbox(line.send, 8, 1000)
    line.state["a"] = SendResult.FULL
    outbox.push_message("a", head(0))
    outbox.flush_all(100.0)
    outbox.retry_all(109.0)
    assert outbox.blocked_peers(10.0, 110.0) == []
    assert outbox.blocked_peers(10.0, 110.5) == ["a"]
    line.state.clear()
    outbox.retry_all(111.0)
    assert outbox.blocked_peers(10.0, 200.0) == []


def test_the_request_that_takes_most_is_dropped_by_count_and_by_size_and_the_others_stay_in_order() -> None:
    """1. many small messages of one request, few of another, and what is of none: the first goes
    2. a large one weighs more than many small ones; 3. what is of no request is never dropped
    """
    line = Line()
    outbox = Outbox(line.send, 8, 10_000)
    line.state["a"] = SendResult.FULL
    for number, request in enumerate(["many", "few", "many", None, "many", "few"]):
        assert outbox.push_message("a", head(number), request=request)
    assert outbox.drop_largest("a") == "many"
    assert outbox.waiting == 3
    assert outbox.push_message("a", head(6, 8000), request="large")
    assert outbox.drop_largest("a") == "large"
    line.state.clear()
    outbox.retry_all(0.0)
    assert line.sent == [("a", [1, 3, 5])]
    line.state["a"] = SendResult.FULL
    outbox.push_message("a", head(7))
    assert outbox.drop_largest("a") is None
    assert outbox.drop_largest("b") is None
    assert outbox.waiting == 1


def test_outputs_leave_room_for_other_messages() -> None:
    line = Line()
    outbox = Outbox(line.send, 8, 10_000)
    assert [outbox.push_message("a", head(number), request="r") for number in range(9)] == [True] * 8 + [False]
    assert [outbox.push_message("a", head(number)) for number in range(2)] == [True, False]


def test_absence_is_counted_from_the_first_failure_and_ends_with_a_send() -> None:
    line = Line()
    outbox = Outbox(line.send, 10, 1000)
    line.state["a"] = SendResult.GONE
    outbox.push_message("a", head(1))
    outbox.flush_all(100.0)
    outbox.retry_all(109.0)
    assert outbox.unreachable_peers(10.0, 109.0) == []
    assert outbox.unreachable_peers(10.0, 110.5) == ["a"]
    line.state.clear()
    outbox.retry_all(111.0)
    assert outbox.unreachable_peers(10.0, 200.0) == []


def test_what_was_sent_on_a_connection_is_forgotten_with_it() -> None:
    outbox = Outbox(Line().send, 10, 1000)
    outbox.push_message("a", head(1))
    outbox.flush_all(5.0)
    assert outbox.was_sent_since("a", 5.0)
    outbox.drop_peer("a")
    assert not outbox.was_sent_since("a", 5.0)


def test_a_dropped_hub_is_forgotten() -> None:
    line = Line()
    outbox = Outbox(line.send, 10, 1000)
    line.state["a"] = SendResult.GONE
    outbox.push_message("a", head(1))
    assert outbox.drop_peer("a") == 1
    assert outbox.drop_peer("a") == 0
    outbox.flush_all(0.0)
    assert (outbox.has_waiting("a"), outbox.waiting, line.sent) == (False, 0, [])


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("ab"), st.booleans()),
        st.tuples(st.just("flush"), st.sampled_from(list(SendResult)), st.sampled_from(list(SendResult))),
    ),
    max_size=60,
)


@given(_steps)
def test_whatever_the_line_does_each_hub_gets_its_messages_once_and_in_order(steps: list[Any]) -> None:
    line = Line()
    outbox = Outbox(line.send, 1000, 1 << 20)
    pushed: dict[str, list[int]] = {"a": [], "b": []}
    for step in steps:
        if step[0] == "push":
            _, name, has_attachment = step
            assert outbox.push_message(name, head(len(pushed[name])), b"attached" if has_attachment else None)
            pushed[name].append(len(pushed[name]))
        else:
            line.state = {"a": step[1], "b": step[2]}
            outbox.flush_all(0.0)
            outbox.retry_all(0.0)
    line.state.clear()
    outbox.retry_all(0.0)
    for name in "ab":
        assert [number for to, numbers in line.sent if to == name for number in numbers] == pushed[name]
    assert outbox.waiting == 0


def test_an_attachment_counts_towards_the_size() -> None:
    outbox = Outbox(Line().send, 10, 1000)
    outbox.push_message("a", head(1), b"x" * 900)
    assert outbox.behind == {"a"}
    assert not outbox.push_message("a", head(2), b"x" * 900, request="r")


def test_a_hub_that_came_back_for_a_moment_is_absent_only_since_it_went_again() -> None:
    line = Line()
    outbox = Outbox(line.send, 10, 1000)
    outbox.push_message("a", head(1))
    for at_s, state in ((100.0, SendResult.GONE), (105.0, SendResult.FULL), (108.0, SendResult.GONE)):
        line.state["a"] = state
        outbox.retry_all(at_s)
    assert outbox.unreachable_peers(5.0, 112.0) == []
    assert outbox.unreachable_peers(5.0, 113.5) == ["a"]


def test_a_hub_is_behind_as_long_as_more_than_a_quarter_of_the_bytes_waits() -> None:
    """1. four pictures of 150 of 1000 bytes; 2. the first leaves, then nothing: 450 wait; 3. two more leave"""
    line, left = Line(), [1]

    def send(name: str, frames: Frames) -> SendResult:
        if not left[0]:
            return SendResult.FULL
        left[0] -= 1
        return line.send(name, frames)

    outbox = Outbox(send, 1000, 1000)
    size_bytes = 150 - len(head(1))
    for number in range(4):
        outbox.push_message("a", head(number), b"x" * size_bytes)
    outbox.flush_all(0.0)
    assert outbox.behind == {"a"}
    left[0] = 2
    outbox.retry_all(1.0)
    assert outbox.behind == set()
    assert line.sent == [("a", [0]), ("a", [1]), ("a", [2])]


def test_what_was_dropped_makes_room_for_as_many_bytes() -> None:
    line = Line()
    outbox = Outbox(line.send, 8, 1000)
    line.state["a"] = SendResult.FULL
    assert outbox.push_message("a", head(0), b"x" * 700, request="large")
    assert outbox.push_message("a", head(1), request="small")
    assert not outbox.push_message("a", head(2), b"x" * 700, request="next")
    assert outbox.behind == {"a"}
    assert outbox.drop_largest("a") == "large"
    assert outbox.behind == set()
    assert outbox.push_message("a", head(2), b"x" * 700, request="next")
