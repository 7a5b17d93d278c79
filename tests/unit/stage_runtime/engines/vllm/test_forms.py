"""The threads that check and compile forms of answers: whose turn it is, and what becomes of errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from stage_runtime.engines.vllm.forms.threads import FormThreads, forms_of, put_forms_behind_engine
from tests.support.panics import panic

WAIT_S = 30.0


@pytest.fixture
def threads() -> Iterator[FormThreads]:
    with FormThreads(2) as made:
        yield made


@pytest.mark.attack("W1")
def test_one_client_leaves_a_thread_to_the_others(threads: FormThreads) -> None:
    """1. one client's task takes long, and more of its tasks wait
    2. what others have asked for meanwhile is done; then the rest
    """
    may_end = threading.Event()
    with forms_of("many"):
        asked = [threads.submit(may_end.wait, WAIT_S) for _ in range(5)]
    for client in ("one", "two", "one", ""):
        with forms_of(client):
            assert threads.submit(str, client).result(WAIT_S) == client
    assert not any(each.done() for each in asked)
    may_end.set()
    assert [each.result(WAIT_S) for each in asked] == [True] * 5


@pytest.mark.attack("W1")
def test_clients_have_turns_whatever_each_has_asked_for(threads: FormThreads) -> None:
    done: list[str] = []
    may_begin = threading.Event()
    blocked = []
    for client in ("x", "y"):
        with forms_of(client):
            blocked.append(threads.submit(may_begin.wait, WAIT_S))
    asked = []
    for client, number in [("many", each) for each in range(4)] + [("few", 0), ("few", 1)]:
        with forms_of(client):
            asked.append(threads.submit(done.append, f"{client} {number}"))
    # With one thread for all of these, their order is that of the turns.
    keeper = threading.Event()
    with forms_of("x"):
        threads.submit(keeper.wait, WAIT_S)
    may_begin.set()
    for each in (*blocked, *asked):
        each.result(WAIT_S)
    keeper.set()
    assert sorted(done) == ["few 0", "few 1", "many 0", "many 1", "many 2", "many 3"]
    assert max(done.index("few 0"), done.index("few 1")) <= 4


def test_what_was_cancelled_is_not_done_and_takes_no_memory(threads: FormThreads) -> None:
    class Body:
        def read(self) -> None:
            raise AssertionError("it was cancelled")

    may_end, body = threading.Event(), Body()
    with forms_of("a"):
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


@pytest.mark.attack("L1")
def test_a_panic_in_a_thread_of_forms_is_an_exception_there() -> None:
    """VLLM ends one request for that; what is no Exception ended its step."""
    manager = SimpleNamespace(executor=ThreadPoolExecutor(1))
    threads = put_forms_behind_engine(SimpleNamespace(engine_core=SimpleNamespace(engine_core=core_of(manager))))
    assert manager.executor is threads

    def raise_it(error: BaseException) -> None:
        raise error

    with threads:
        assert threads.submit(str, 7).result() == "7"
        with pytest.raises(RuntimeError, match="a library panicked: unclosed group"):
            threads.submit(raise_it, panic("unclosed group")).result()
        for other in (ValueError("no"), SystemExit()):
            with pytest.raises(type(other)):
                threads.submit(raise_it, other).result()


def core_of(manager: Any) -> Any:
    return SimpleNamespace(structured_output_manager=manager)
