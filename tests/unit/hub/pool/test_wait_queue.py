"""The queue of waiting picks beside a list that is sorted each time; and its rules, over a pool of one number."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hub.pool.wait_queue import PriorityQueue, Waiter, WaitQueue
from omni_discovery.errors import StageUnavailableError


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


class Pending:
    """The result of a pick to come."""

    def __init__(self) -> None:
        self.result: Any = None

    def done(self) -> bool:
        return self.result is not None

    def set_result(self, result: Any) -> None:
        self.result = result

    def set_exception(self, exception: Exception) -> None:
        self.result = exception


class Slots:
    """A pool that has so many free slots at one replica, and nothing else."""

    starved_slots: int | None = None

    def __init__(self) -> None:
        self.tried: list[str] = []
        #: Slots of an ejected replica; who avoids "the rest" has no other left.
        self.ejected_free_count = 0
        self.free_count = self.pickable_version = 0
        self.unavailable_since_s: float | None = None

    def free(self, count: int) -> None:
        self.free_count += count
        self.pickable_version += 1

    def pick(
        self, request_id: str, task: Any, affinity_request_id: Any = None, avoid: Any = (), *, may_wait: bool = False
    ) -> Any:
        self.tried.append(request_id)
        if "the rest" in avoid and self.ejected_free_count:
            self.ejected_free_count -= 1
            return f"{request_id} at an ejected one"
        if not self.free_count or "x" in avoid or "the rest" in avoid:
            return None
        self.free_count -= 1
        return request_id

    def all_avoided(self, avoid: Any) -> bool:
        return "everything" in avoid

    def only_ejected_left(self, avoid: Any) -> bool:
        return "the rest" in avoid

    def why_absent(self) -> str:
        return "none is registered"


def queued(queue: WaitQueue, name: str, priority: int = 0, *avoid: str) -> tuple[Pending, Waiter[Any]]:
    pending = Pending()
    added: Waiter[Any] = Waiter(name, {}, None, avoid, priority, 0.0, pending)
    queue.add(added)
    return pending, added


def test_slots_go_to_the_next_waiters_that_can_use_them() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    late, first, other = (queued(queue, name, *more)[0] for name, *more in (("late", 5), ("first",), ("other", 0, "x")))
    slots.free(2)
    queue.serve()
    assert [each.result for each in (late, first, other)] == ["late", "first", None]
    assert len(queue) == 1


def test_a_waiter_that_has_to_avoid_everything_fails_at_the_next_change() -> None:
    queue = WaitQueue(7, Slots(), 10.0)
    pending, _ = queued(queue, "r", 0, "everything")
    queue.recheck()
    assert isinstance(pending.result, StageUnavailableError)
    assert (pending.result.stage_id, len(queue)) == (7, 0)


def test_a_waiter_fails_once_no_replica_was_pickable_for_the_whole_timeout() -> None:
    """1. all are full: it is looked at again after another timeout
    2. the last one goes: it is looked at again when a timeout is over since then, and fails
    """
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    pending, added = queued(queue, "r")
    assert queue.time_out(added, 10.0) == 10.0
    slots.unavailable_since_s = 14.0
    assert queue.time_out(added, 20.0) == 4.0
    assert queue.time_out(added, 24.0) is None
    assert str(pending.result) == "no UP replica for stage 0 after 10.0s (none is registered)"
    assert queue.time_out(added, 25.0) is None


def test_slots_of_ejected_replicas_go_to_those_that_have_no_other_left_by_priority() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    queued_ = [("late", 5, "the rest"), ("first", 0, "the rest"), ("second", 0, "the rest"), ("other", -1, "x")]
    late, first, second, other = (queued(queue, *each)[0] for each in queued_)
    slots.ejected_free_count = 2
    slots.free(0)
    queue.serve()
    served = [each.result for each in (late, first, second, other)]
    assert served == [None, "first at an ejected one", "second at an ejected one", None]
    assert slots.tried == ["first", "second"]


def test_all_wait_for_the_best_while_the_oldest_does_and_the_best_lack_only_credits() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    assert not queue.all_prefer_best
    slots.starved_slots = 1
    assert queue.all_prefer_best
    _, oldest = queued(queue, "r")
    oldest.prefers_best = True
    assert queue.all_prefer_best
    queue.stop_preferring(oldest)
    assert not queue.all_prefer_best
    queued(queue, "s", 0, "x")
    oldest.prefers_best = True
    assert not queue.all_prefer_best


def test_a_pick_that_may_only_wait_is_not_tried_again_as_it_comes_and_one_beyond_the_best_is() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    slots.free(1)
    first, _ = queued(queue, "first")
    assert (slots.tried, first.result) == ([], None)
    slots.starved_slots = 1
    second, _ = queued(queue, "second")
    assert (slots.tried, first.result, second.result) == (["first"], "first", None)


def test_after_a_change_all_are_tried_again_though_no_slot_came() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    pending, _ = queued(queue, "r", 0, "x")
    slots.free(1)
    queue.serve()
    queue.serve()
    assert slots.tried == ["r"]
    queue.recheck()
    assert (slots.tried, pending.result) == (["r", "r"], None)


def test_who_was_served_by_an_ejected_replica_waits_no_more() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    pending, _ = queued(queue, "r", 0, "the rest")
    slots.ejected_free_count = 2
    slots.free(0)
    queue.serve()
    assert (pending.result, len(queue)) == ("r at an ejected one", 0)


def test_a_pick_that_was_cancelled_takes_no_slot() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    gone, _ = queued(queue, "gone")
    left, _ = queued(queue, "left")
    aside, _ = queued(queue, "aside", 0, "the rest")
    gone.result = aside.result = "cancelled"
    slots.ejected_free_count = 1
    slots.free(1)
    queue.serve()
    assert (slots.tried, gone.result, aside.result, left.result) == (["left"], "cancelled", "cancelled", "left")


def test_a_policy_that_raises_fails_the_pick_that_it_was_asked_for_and_no_other() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    (first, _), (second, _) = queued(queue, "first"), queued(queue, "second")
    pick, error = slots.pick, RuntimeError("a third party's bug")

    def broken(request_id: str, *more: Any, **options: Any) -> Any:
        if request_id == "first":
            raise error
        return pick(request_id, *more, **options)

    slots.pick = broken  # type: ignore[method-assign]
    slots.free(2)
    queue.serve()
    assert (first.result, second.result, len(queue)) == (error, "second", 0)


def test_nobody_is_tried_while_nothing_has_become_pickable() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    queued(queue, "r", 0, "x")
    slots.free(1)
    queue.serve()
    queued(queue, "s")
    queue.serve()
    assert slots.tried == ["r"]
    slots.free(0)
    queue.serve()
    assert slots.tried == ["r", "r", "s"]


def test_ejected_replicas_are_needed_by_who_avoids_all_others() -> None:
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    queued(queue, "r", 0, "x")
    assert not queue.needs_ejected
    queued(queue, "s", 0, "the rest")
    assert queue.needs_ejected


def test_only_as_many_wait_for_the_best_as_the_best_have_slots_for() -> None:
    """Three wait, the best have one slot: the first two may not wait any more, and the third may."""
    slots = Slots()
    queue = WaitQueue(0, slots, 10.0)
    asked: list[tuple[str, bool]] = []

    def pick(request_id: str, *_: Any, may_wait: bool, **__: Any) -> Any:
        asked.append((request_id, may_wait))

    slots.pick = pick  # type: ignore[assignment,method-assign]
    waiting = [queued(queue, name)[1] for name in "abc"]
    slots.starved_slots = 1
    slots.free(1)
    queue.serve()
    assert asked == [("a", False), ("b", False), ("c", True)]
    asked.clear()
    queue.stop_preferring(waiting[2])
    assert asked == [("a", False), ("b", False), ("c", False)]
    assert len(queue) == 3


def test_a_pick_times_out_by_the_later_of_its_arrival_and_the_loss_of_the_last_replica() -> None:
    slots = Slots()
    slots.unavailable_since_s = 2.0
    queue = WaitQueue(3, slots, 10.0)
    pending = Pending()
    late: Waiter[Any] = Waiter("r", {}, None, (), 0, 5.0, pending)
    queue.add(late)
    assert queue.time_out(late, 12.0) == 3.0
    assert queue.time_out(late, 15.0) is None
    assert isinstance(pending.result, StageUnavailableError)
    assert pending.result.stage_id == 3


def test_an_empty_line_has_nobody_who_waits() -> None:
    line: PriorityQueue[str] = PriorityQueue()
    assert (line.pop(), line.oldest(), line.oldest_wait_s(5.0), len(line)) == (None, None, 0.0, 0)
    line.add(waiter("r", arrived_s=9.0))
    assert line.oldest_wait_s(5.0) == 0.0
    assert repr(line) == "PriorityQueue(1 waiting, 0 avoiding replicas)"
