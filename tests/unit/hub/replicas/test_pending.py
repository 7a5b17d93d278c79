"""What a hub still waits for: answers to dispatches, acknowledgements of aborts, turns of retries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hub.config import HubConfig, QueueFullError
from hub.orchestrator.aborts import AbortTracker
from hub.orchestrator.retry_budget import PacedRetries, RetryDue
from hub.replicas.pending import DispatchBatcher, PendingAborts, PendingDispatches
from hub.request.events import Dispatch
from omni_discovery import wire
from tests.support.hub_fakes import until

CONFIG = replace(HubConfig(), accept_timeout_s=0.02, accept_limit_s=0.1)


def dispatch(attempt: int = 0) -> Dispatch:
    return Dispatch(0, attempt, {}, {}, (), (), frozenset(), is_retry=True)


async def test_a_dispatch_without_an_answer_is_heard_of_again_and_again_until_its_limit() -> None:
    silent: list[tuple[str, int, bool]] = []
    awaited = PendingDispatches(CONFIG, lambda *about: silent.append(about))
    awaited.add_dispatch(("a", 0))
    awaited.add_dispatch(("b", 3))
    awaited.add_dispatch(("answered", 0))
    awaited.resolve_dispatch(("answered", 0))
    awaited.resolve_dispatch(("unknown", 0))
    await until(lambda: len(silent) >= 2)
    assert silent[:2] == [("a", 0, False), ("b", 3, False)]
    awaited.forget_request("a")
    heard = len(silent)
    await until(lambda: silent[-1][2])
    assert set(silent[heard:]) == {("b", 3, False), ("b", 3, True)}
    assert silent.count(("b", 3, False)) == 3, "after 20, 40 and 80 ms"


async def test_a_silent_dispatch_does_not_delay_the_news_of_a_later_one() -> None:
    """1. one is silent and waits for its second moment, far away; 2. the next one's first moment comes in time"""
    silent: list[tuple[str, int, bool]] = []
    awaited = PendingDispatches(replace(CONFIG, accept_limit_s=30.0), lambda *about: silent.append(about))
    awaited.add_dispatch(("one", 0))
    await asyncio.sleep(0.04)
    awaited.add_dispatch(("two", 0))
    await asyncio.sleep(0.06)
    assert ("two", 0, False) in silent
    assert not any(is_final for _, _, is_final in silent)
    awaited.forget_all()


async def test_nothing_is_heard_of_what_was_cleared() -> None:
    silent: list[tuple[str, int, bool]] = []
    awaited = PendingDispatches(CONFIG, lambda *about: silent.append(about))
    awaited.add_dispatch(("a", 0))
    awaited.forget_all()
    awaited.add_dispatch(("b", 0))
    awaited.resolve_dispatch(("b", 0))
    await asyncio.sleep(0.1)
    assert silent == []


def test_an_abort_is_open_until_the_attempt_that_was_meant_is_acknowledged() -> None:
    aborts = PendingAborts()
    aborts.add_abort("r", 1)
    aborts.add_abort("r", 0)
    assert aborts.open_aborts() == [("r", 1)]
    assert aborts
    assert not aborts.acknowledge_abort("r", 0)
    assert not aborts.acknowledge_abort("other", 5)
    assert aborts.acknowledge_abort("r", 1)
    assert not aborts.acknowledge_abort("r", 1)
    aborts.add_abort("s", 0)
    assert aborts.abandon_aborts() == ["s"]
    assert aborts.abandon_aborts() == []
    assert aborts.open_aborts() == [("s", 0)]
    assert not aborts.acknowledge_abort("s", 0)
    assert aborts.open_aborts() == []
    assert not aborts


async def test_a_cancel_is_done_when_the_last_replica_has_acknowledged() -> None:
    aborts = AbortTracker(timeout_s=5.0)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    aborts.abort_sent("r", "one")
    aborts.abort_sent("r", "two")
    aborts.when_quiet(["r"], done)
    aborts.acknowledged("r", "one")
    aborts.acknowledged("other", "two")
    assert not done.done()
    aborts.client_gone("two")
    assert done.done()
    assert not len(aborts)


async def test_a_replica_that_never_acknowledges_holds_a_cancel_no_longer_than_the_timeout() -> None:
    aborts = AbortTracker(timeout_s=0.02)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    aborts.abort_sent("r", "silent", "0/7")
    second: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    aborts.abort_sent("r", "silent, too", "0/1")
    aborts.when_quiet(["r"], done)
    aborts._timeout_s = 60.0
    aborts.when_quiet(["r"], second)
    with pytest.raises(TimeoutError, match="replica 0/1, 0/7 has not acknowledged the abort within"):
        await done
    # Whoever asks later has the whole time to wait, too.
    assert not second.done()
    aborts.acknowledged("r", "silent")
    aborts.acknowledged("r", "silent, too")
    assert second.result() is None
    nobody: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    aborts.when_quiet(["nobody works on it"], nobody)
    assert nobody.done()


async def test_retries_beyond_the_budget_wait_their_turn_and_come_in_order() -> None:
    due: list[RetryDue] = []
    retries = PacedRetries(due.append)
    went = 0
    while retries.may_go("first", dispatch()):
        went += 1
    assert went >= 20
    retries.may_go("second", dispatch())
    assert len(retries) == 2
    assert not due
    for _ in range(10):
        retries.admitted()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if len(due) == 2:
            break
    assert [each.request_id for each in due] == ["first", "second"]
    retries.close()


@pytest.mark.attack("E9")
def test_aborts_that_a_replica_never_acknowledges_are_bounded_and_repeated_in_turn() -> None:
    aborts = PendingAborts()
    for number in range(20_000):
        aborts.add_abort(f"r{number}", 0)
    assert len(aborts.open_aborts()) == 16_384
    first, second = aborts.aborts_to_repeat(), aborts.aborts_to_repeat()
    assert (len(first), len(second), set(first) & set(second)) == (64, 64, set())
    assert first[0] == ("r3616", 0)
    assert aborts.acknowledge_abort("r3616", 0)
    assert len(aborts.open_aborts()) == 16_383


class Wire:
    """What a DispatchBatcher has sent: the request ids of each frame. ``is_full``: nothing can leave."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.unsent: list[object] = []
        self.is_full = False
        self.batcher = DispatchBatcher(self.send, self.unsent.append)

    def send(self, frames: Sequence[bytes]) -> None:
        if self.is_full:
            raise QueueFullError("full")
        self.sent.append([getattr(each, "request_id", "") for each in wire.decode_to_replica(frames)])

    def dispatch(self, name: str, size_bytes: int = 1) -> None:
        message = wire.Submit(epoch=1, request_id=name, inputs={"prompt": "a" * size_bytes})
        self.batcher.push_dispatch((name, 0), wire.encode(message))

    def release(self, name: str) -> None:
        self.batcher.push_release(name, wire.encode(wire.ReleasePayloads(epoch=1, request_id=name)))


async def test_releases_leave_with_the_next_dispatch_or_soon_and_never_behind_it() -> None:
    """1. releases wait for a dispatch and leave in front of it; what comes behind it in its turn leaves together
    2. a long dispatch leaves alone, behind the releases
    3. without a dispatch they leave soon
    """
    line = Wire()
    line.release("a")
    line.release("b")
    assert line.sent == []
    line.dispatch("1")
    line.release("1")
    line.dispatch("1")
    assert line.sent == [["a", "b", "1"]]
    await asyncio.sleep(0)
    assert line.sent[1:] == [["1", "1"]]
    line.release("c")
    line.dispatch("long", 300_000)
    assert line.sent[2:] == [["c"], ["long"]]
    await asyncio.sleep(0)
    line.release("d")
    await until(lambda: line.sent[4:] == [["d"]])
    assert line.unsent == []


async def test_releases_that_could_not_leave_are_told_of_or_wait_on() -> None:
    """1. a dispatch that can't leave raises, and the release before it waits on
    2. alone it can't leave either: it is told of, as is what the end of a session drops
    """
    line = Wire()
    line.is_full = True
    line.release("a")
    with pytest.raises(QueueFullError):
        line.dispatch("1")
    assert line.unsent == []
    await until(lambda: line.unsent == ["a"])
    line.release("b")
    assert line.batcher.forget_waiting() == ["b"]
    line.release("c")
    line.batcher.close()
    line.is_full = False
    await asyncio.sleep(0.03)
    assert line.sent == []
    assert line.unsent == ["a"]
