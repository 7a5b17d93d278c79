"""Threads that serve the clients in turn: whose turn it is, and what becomes of what is cancelled."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from stage_runtime.engines.client_threads import ClientThreads, work_of

WAIT_S = 30.0


@pytest.fixture
def threads() -> Iterator[ClientThreads]:
    with ClientThreads(2, "test") as made:
        yield made


@pytest.mark.attack("W1")
def test_one_client_leaves_a_thread_to_the_others(threads: ClientThreads) -> None:
    """1. one client's task takes long, and more of its tasks wait
    2. what others have asked for meanwhile is done; then the rest
    """
    may_end = threading.Event()
    with work_of("many"):
        asked = [threads.submit(may_end.wait, WAIT_S) for _ in range(5)]
    for client in ("one", "two", "one", ""):
        with work_of(client):
            assert threads.submit(str, client).result(WAIT_S) == client
    assert not any(each.done() for each in asked)
    may_end.set()
    assert [each.result(WAIT_S) for each in asked] == [True] * 5


@pytest.mark.attack("W1")
def test_clients_have_turns_whatever_each_has_asked_for(threads: ClientThreads) -> None:
    done: list[str] = []
    may_begin = threading.Event()
    blocked = []
    for client in ("x", "y"):
        with work_of(client):
            blocked.append(threads.submit(may_begin.wait, WAIT_S))
    asked = []
    for client, number in [("many", each) for each in range(4)] + [("few", 0), ("few", 1)]:
        with work_of(client):
            asked.append(threads.submit(done.append, f"{client} {number}"))
    # With one thread for all of these, their order is that of the turns.
    keeper = threading.Event()
    with work_of("x"):
        threads.submit(keeper.wait, WAIT_S)
    may_begin.set()
    for each in (*blocked, *asked):
        each.result(WAIT_S)
    keeper.set()
    assert sorted(done) == ["few 0", "few 1", "many 0", "many 1", "many 2", "many 3"]
    assert max(done.index("few 0"), done.index("few 1")) <= 4


def test_what_was_cancelled_is_not_done_and_takes_no_memory(threads: ClientThreads) -> None:
    class Body:
        def read(self) -> None:
            raise AssertionError("it was cancelled")

    may_end, body = threading.Event(), Body()
    with work_of("a"):
        first = threads.submit(may_end.wait, WAIT_S)
        second = threads.submit(body.read)
        third = threads.submit(str, 3)
    assert second.cancel()
    found = weakref.ref(body)
    del body
    gc.collect()
    assert found() is None
    may_end.set()
    assert (first.result(WAIT_S), third.result(WAIT_S)) == (True, "3")
    with pytest.raises(CancelledError):
        second.result()


def test_what_waits_is_not_begun_any_more_once_they_are_shut_down() -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end.wait(WAIT_S)

    threads = ClientThreads(1, "test")
    with work_of("a"):
        first, second = threads.submit(work), threads.submit(str, 2)
    assert has_begun.wait(WAIT_S)
    threads.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    may_end.set()
    assert first.result(WAIT_S)
    threads.shutdown()
