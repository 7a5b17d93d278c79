"""Which pictures are drawn together."""

from __future__ import annotations

from stage_runtime.engines.pictures.batches import BatchQueue


def queue_of(*asked: tuple[str, str, int]) -> BatchQueue[str]:
    queue: BatchQueue[str] = BatchQueue()
    for key, alike, priority in asked:
        queue.add(key, key.upper(), alike, priority)
    return queue


def keys(queue: BatchQueue[str], capacity: int = 4) -> list[str]:
    return [each.key for each in queue.pop_batch(capacity)]


def test_whoever_is_first_is_drawn_with_those_behind_that_are_alike() -> None:
    queue = queue_of(("a", "big", 0), ("b", "small", 0), ("c", "big", 0), ("d", "small", 0))
    assert [keys(queue), keys(queue), keys(queue)] == [["a", "c"], ["b", "d"], []]


def test_a_batch_has_as_many_as_there_is_room_for() -> None:
    queue = queue_of(*((key, "", 0) for key in "abcde"))
    assert [keys(queue, 2), keys(queue, 2), keys(queue, 2)] == [["a", "b"], ["c", "d"], ["e"]]


def test_lower_priorities_go_first_and_equals_as_they_came() -> None:
    queue = queue_of(("late", "x", 5), ("first", "y", 0), ("second", "z", 0), ("urgent", "x", -1))
    assert [keys(queue) for _ in range(3)] == [["urgent", "late"], ["first"], ["second"]]


def test_the_one_that_waits_longest_is_never_passed_by() -> None:
    """1. a small one stands before many big ones; 2. it is next, however many more big ones come"""
    queue = queue_of(("big 1", "big", 0), ("small", "small", 0), *((f"big {n}", "big", 0) for n in range(2, 9)))
    assert keys(queue, 2) == ["big 1", "big 2"]
    queue.add("big 9", "", "big")
    assert keys(queue, 2) == ["small"]


def test_those_of_a_batch_that_failed_are_drawn_alone_at_their_old_places() -> None:
    queue = queue_of(*((key, "", 0) for key in "abcd"))
    failed = queue.pop_batch(3)
    queue.add("e", "E", "")
    queue.requeue_alone(failed)
    assert [keys(queue) for _ in range(4)] == [["a"], ["b"], ["c"], ["d", "e"]]


def test_who_is_taken_out_is_not_drawn() -> None:
    queue = queue_of(("a", "", 0), ("b", "", 0))
    assert "a" in queue
    assert queue.remove("a")
    assert not queue.remove("a")
    assert "a" not in queue
    assert len(queue) == 1
    assert keys(queue) == ["b"]
