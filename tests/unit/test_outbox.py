"""The queues towards the hubs: in order, bounded, and each hub only in its own way."""

from __future__ import annotations

from stage_runtime.outbox import Frames, Outbox, SendResult


class Line:
    """Where frames go; ``state`` says what becomes of them."""

    def __init__(self) -> None:
        self.state: dict[str, SendResult] = {}
        self.sent: list[tuple[str, bytes]] = []

    def send(self, hub_id: str, frames: Frames) -> SendResult:
        result = self.state.get(hub_id, SendResult.SENT)
        if result is SendResult.SENT:
            self.sent.append((hub_id, frames[0]))
        return result


def test_what_can_not_be_sent_waits_and_leaves_in_order() -> None:
    line = Line()
    outbox = Outbox(line.send, 10, 1000)
    line.state["a"] = SendResult.FULL
    for frame in (b"1", b"2"):
        assert outbox.push("a", (frame,), 0.0)
        assert outbox.push("b", (frame,), 0.0)
    assert line.sent == [("b", b"1"), ("b", b"2")]
    line.state.clear()
    outbox.push("a", (b"3",), 0.0)
    outbox.retry(1.0)
    assert line.sent[2:] == [("a", b"1"), ("a", b"2"), ("a", b"3")]
    assert outbox.waiting() == 0


def test_both_bounds_hold_and_only_for_the_hub_that_fills_them() -> None:
    line = Line()
    outbox = Outbox(line.send, 2, 100)
    line.state = dict.fromkeys(("a", "b"), SendResult.FULL)
    assert [outbox.push("a", (b"x",), 0.0) for _ in range(3)] == [True, True, False]
    assert [outbox.push("b", (b"x" * 60,), 0.0) for _ in range(2)] == [True, False]
    assert outbox.push("c", (b"x" * 60,), 0.0)


def test_absence_is_counted_from_the_first_failure_and_ends_with_a_send() -> None:
    line = Line()
    outbox = Outbox(line.send, 10, 1000)
    line.state["a"] = SendResult.GONE
    outbox.push("a", (b"1",), 100.0)
    outbox.retry(109.0)
    assert outbox.gone_for(10.0, 109.0) == []
    assert outbox.gone_for(10.0, 110.5) == ["a"]
    line.state.clear()
    outbox.retry(111.0)
    assert outbox.gone_for(10.0, 200.0) == []


def test_a_dropped_hub_is_forgotten() -> None:
    line = Line()
    outbox = Outbox(line.send, 10, 1000)
    line.state["a"] = SendResult.GONE
    outbox.push("a", (b"1",), 0.0)
    assert outbox.drop("a") == 1
    assert outbox.drop("a") == 0
    assert not outbox.has_waiting("a")
