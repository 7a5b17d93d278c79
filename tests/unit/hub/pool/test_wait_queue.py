"""The line of those who wait, beside a list that is sorted anew each time; and whom it asks for credits."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hub.pool.credits import CreditRequester
from hub.pool.wait_queue import PriorityQueue, Waiter


def waiter(name: str, priority: int = 0, arrived_s: float = 0.0, *avoid: str) -> Waiter[str]:
    return Waiter(name, {}, None, avoid, priority, arrived_s, name)


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-2, 2)),
        st.tuples(st.sampled_from(["pop", "pop and put back", "discard"]), st.integers(0, 200)),
    ),
    max_size=300,
)


@given(_steps)
def test_the_line_is_by_priority_and_arrival_whoever_leaves_it(steps: list[tuple[str, int]]) -> None:
    line: PriorityQueue[str] = PriorityQueue()
    model: list[Waiter[str]] = []
    for number, (verb, value) in enumerate(steps):
        first = min(model, key=lambda each: (each.priority, each.number), default=None)
        if verb == "add":
            added = waiter(str(number), value, float(number), *(["x"] if number % 3 == 0 else []))
            line.add(added)
            model.append(added)
        elif verb == "discard":
            if model:
                gone = model.pop(value % len(model))
                line.discard(gone)
                line.discard(gone)
        else:
            assert line.pop() is first
            if first is not None and verb == "pop":
                model.remove(first)
            elif first is not None:
                line.put_back(first)
        assert len(line) == len(model)
        assert set(line.avoiding) == {each.number for each in model if each.avoid}
        oldest_s = min((each.arrived_s for each in model), default=float(number))
        assert line.oldest_wait_s(float(number)) == number - oldest_s


def test_a_line_that_many_have_passed_through_is_no_longer_than_those_who_wait() -> None:
    """One has waited from the start; it must not keep all who came and went after it."""
    line: PriorityQueue[str] = PriorityQueue()
    line.add(waiter("patient", priority=9))
    for number in range(5000):
        line.add(waiter(str(number), arrived_s=float(number)))
        popped = line.pop()
        assert popped is not None
        assert popped.token == str(number)
    assert len(line._arrivals) < 100
    assert len(line._heap) < 100
    assert line.oldest_wait_s(5000.0) == 5000.0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.01, 0.03, 0.2])), max_size=60))
def test_what_replicas_were_told_last_is_never_more_than_is_wanted_of_16(steps: list[tuple[int, int, float]]) -> None:
    """A replica's book by what it was told: within 50 ms of a change it asks for about what is waited for."""
    asking, book, now_s = CreditRequester(), dict[str, int](), 0.0
    last_s: dict[str, float] = {}
    for waiting, givers, passes_s in steps:
        now_s += passes_s
        wants: list[Any] = asking.due(now_s, waiting, 1.0, [f"a{number}" for number in range(givers)])
        for want in wants:
            if want.waiting and book.get(want.addr):
                assert now_s - last_s[want.addr] >= 0.0499
            book[want.addr], last_s[want.addr] = want.waiting, now_s
        asked = [count for count in book.values() if count]
        assert len(asked) <= 16
        if wants and waiting and givers:
            assert waiting <= sum(asked) < waiting + 16
        if not waiting:
            assert not asked
            assert asking.next_s(0, givers) is None
        elif givers:
            assert asking.next_s(waiting, givers) is not None
