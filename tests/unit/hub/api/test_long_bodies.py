"""Long bodies take turns: what one client sends costs the others at most half of the hub's loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hub.api.long_bodies import ClientTurns, HeldBodies, LongBodies, WaitingBodies, hold_messages, long_body
from hub.json_memory import memory_of
from omni_discovery.errors import OverloadedError

LONG = 100_000
TOOK_S = 0.02


async def _nothing(*_: Any) -> Any:
    pass


async def scopes_of(*clients: str) -> list[dict[str, Any]]:
    """A scope for each client, all of one server."""
    turns = LongBodies(_nothing, 2 << 30)
    scopes: list[dict[str, Any]] = [{"type": "http", "client": (client, 1)} for client in clients]
    for scope in scopes:
        await turns(scope, _nothing, _nothing)
    return scopes


def work() -> None:
    """Take the loop for a while, as decoding a body does."""
    until_s = time.thread_time() + TOOK_S
    while time.thread_time() < until_s:
        pass


def test_each_client_has_one_body_in_turn_the_first_first() -> None:
    bodies: WaitingBodies[str] = WaitingBodies()
    for body in ("a1", "a2", "a3", "b1", "b2", "c1"):
        assert bodies.add_body(body[0], body, 10) == []
    assert [bodies.next_body() for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]
    assert bodies.size_bytes == 0


def test_where_the_room_is_taken_whoever_has_the_most_loses_the_last_of_it() -> None:
    bodies: WaitingBodies[str] = WaitingBodies(most_bytes=100)
    bodies.add_body("a", "a1", 40)
    bodies.add_body("a", "a2", 40)
    assert bodies.add_body("b", "b1", 30) == ["a2"]
    assert bodies.add_body("a", "a3", 90) == ["a3"]
    assert bodies.size_bytes == 70
    bodies.remove_body("a", "a1")
    bodies.remove_body("a", "a1")
    assert (bodies.size_bytes, bodies.next_body(), bodies.next_body()) == (30, "b1", None)


@pytest.mark.attack("S2")
async def test_between_two_long_bodies_the_loop_has_as_long_for_everything_else() -> None:
    """1. the last bytes of ten bodies come at one moment; to read each takes 20 ms
    2. they are read one after the other, and others have 20 ms between any two
    """
    spans: list[tuple[float, float]] = []

    async def read(scope: dict[str, Any]) -> None:
        await long_body(scope, LONG)
        began_s = time.monotonic()
        work()
        spans.append((began_s, time.monotonic()))

    scopes = await scopes_of(*["10.0.0.1"] * 10)
    await asyncio.gather(*map(read, scopes))
    pauses_s = [begins_s - ended_s for (_, ended_s), (begins_s, _) in itertools.pairwise(spans)]
    assert len(pauses_s) == 9
    assert min(pauses_s) >= 0.9 * TOOK_S


async def test_a_client_with_one_body_does_not_wait_for_all_of_anothers() -> None:
    order: list[str] = []

    async def read(scope: dict[str, Any]) -> None:
        await long_body(scope, LONG)
        order.append(scope["client"][0])
        work()

    await asyncio.gather(*map(read, await scopes_of(*["10.0.0.1"] * 8, "10.0.0.2")))
    assert order.index("10.0.0.2") <= 2


async def test_short_bodies_wait_for_nothing_and_those_that_are_read_quickly_have_no_rest_behind() -> None:
    first, *others = await scopes_of(*["10.0.0.1"] * 200)
    await long_body(first, LONG)
    work()
    with pytest.raises(StopIteration):
        long_body(others[0], 1000).send(None)
    began_s = time.monotonic()
    await asyncio.gather(*(long_body(each, LONG) for each in others))
    assert time.monotonic() - began_s < 199 * 0.005


async def test_a_body_that_is_given_up_while_it_waits_lets_the_next_one_pass() -> None:
    first, second, third = await scopes_of(*["10.0.0.1"] * 3)
    await long_body(first, LONG)
    work()
    left = asyncio.create_task(long_body(second, LONG))
    waits = asyncio.create_task(long_body(third, LONG))
    await asyncio.sleep(0)
    # It is cancelled when its turn has just come, too.
    asyncio.get_running_loop().call_later(TOOK_S, left.cancel)
    await asyncio.wait_for(waits, 5)
    assert left.done()


async def test_more_than_there_is_room_for_is_refused_as_overloaded() -> None:
    scopes = await scopes_of(*["10.0.0.1"] * 4)
    await long_body(scopes[0], LONG)
    work()
    waiting = [asyncio.create_task(long_body(each, 100 << 20)) for each in scopes[1:]]
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), type(None), OverloadedError]


async def test_without_a_server_nothing_waits() -> None:
    async with asyncio.timeout(1):
        for _ in range(3):
            await long_body({"type": "http"}, LONG)
            work()


@pytest.mark.parametrize("size_bytes", [0, 16383])
async def test_who_is_short_takes_no_turn(size_bytes: int) -> None:
    first, second = await scopes_of("10.0.0.1", "10.0.0.1")
    await long_body(first, size_bytes)
    work()
    with pytest.raises(StopIteration):
        long_body(second, LONG).send(None)


@pytest.mark.attack("T4")
def test_one_client_may_hold_half_of_the_memory_and_others_find_room() -> None:
    held = HeldBodies(most_bytes=1000)
    held.hold("a", 400)
    held.hold("a", 100)
    with pytest.raises(OverloadedError):
        held.hold("a", 1)
    held.hold("b", 250)
    with pytest.raises(OverloadedError):
        held.hold("b", 1)
    held.hold("c", 125)
    held.release("a", 500)
    held.hold("b", 187)
    for client, size_bytes in (("b", 437), ("c", 125)):
        held.release(client, size_bytes)
    assert held.size_bytes == 0
    held.hold("a", 500)


@pytest.mark.attack("T4")
async def test_what_is_made_of_a_body_counts_until_the_request_is_answered() -> None:
    """Also where something between has copied the scope, and once for all answers to it."""
    answered, seen = asyncio.Event(), asyncio.Queue[str]()

    async def serve(scope: Any, *_: Any) -> None:
        try:
            for _ in range(3):
                await long_body(dict(scope), LONG, 1 << 29)
        except OverloadedError:
            seen.put_nowait("refused")
            return
        seen.put_nowait(scope["client"][0])
        await answered.wait()

    server = LongBodies(serve, 2 << 30)

    async def ask(*clients: str) -> list[str]:
        """What becomes of a request of each of these clients, in any order."""
        scopes = ({"type": "http", "client": (client, 1)} for client in clients)
        requests.extend(asyncio.create_task(server(each, _nothing, _nothing)) for each in scopes)
        return sorted([await seen.get() for _ in clients])

    requests: list[asyncio.Task[None]] = []
    async with asyncio.timeout(30):
        assert await ask("10.0.0.1", "10.0.0.1", "10.0.0.1") == ["10.0.0.1", "10.0.0.1", "refused"]
        assert await ask("10.0.0.2") == ["10.0.0.2"]
        answered.set()
        await asyncio.gather(*requests)
        assert await ask("10.0.0.1", "10.0.0.1") == ["10.0.0.1", "10.0.0.1"]


@pytest.mark.attack("T4")
def test_the_memory_of_a_body_is_that_of_its_values_and_parts() -> None:
    """Half a million token ids took 22 MB; of a picture or a text there is the text itself."""
    ids = json.dumps({"prompt": list(range(10_000, 510_000))})
    assert 20 << 20 < memory_of(ids) < 30 << 20
    picture = json.dumps({"messages": [{"role": "user", "content": "A" * 3_000_000}]})
    assert 3_000_000 < memory_of(picture.encode()) < 3_010_000
    assert memory_of("{}") < 1000


@pytest.mark.attack("T4")
async def test_what_a_websocket_has_waiting_counts_at_its_most() -> None:
    first, second = await scopes_of("10.0.0.1", "10.0.0.1")
    hold_messages(first, 1 << 29)
    hold_messages(first, 1 << 20)
    hold_messages(second, 1 << 29)
    with pytest.raises(OverloadedError):
        hold_messages(first, (1 << 29) + 1)


async def work_aside(turns: ClientTurns, client: str, size_bytes: int, act: Callable[[], object]) -> None:
    """Have a thread do something in a client's turn."""
    async with turns.turn(client, size_bytes):
        await asyncio.to_thread(act)


@pytest.mark.attack("T2")
async def test_the_bodies_of_one_client_are_not_all_worked_on_before_anothers() -> None:
    turns, order = ClientTurns(1), list[str]()
    clients = ["a"] * 20 + ["b"]
    await asyncio.gather(*(work_aside(turns, each, 100, lambda each=each: order.append(each)) for each in clients))
    assert len(order) == 21
    assert order.index("b") <= 2


@pytest.mark.attack("T2")
async def test_bodies_that_wait_for_a_place_are_bounded_in_memory() -> None:
    """The first has the place; of 256 MiB and 100 more, the last one has no room."""
    turns = ClientTurns(1)
    sizes = (100, 128 << 20, 128 << 20, 100)
    ends = await asyncio.gather(*(work_aside(turns, "a", each, list) for each in sizes), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None), type(None), type(None), OverloadedError]
    await work_aside(turns, "a", 100, list)


@pytest.mark.attack("T2")
async def test_a_body_that_is_given_up_while_it_waits_for_a_place_lets_the_next_one_pass() -> None:
    """One is given up in the queue, another in the moment in which its turn comes, a third at work."""
    turns, may_end = ClientTurns(1), threading.Event()
    first = asyncio.create_task(work_aside(turns, "a", 100, lambda: may_end.wait(30)))
    await asyncio.sleep(0)
    in_queue, at_turn, last = (asyncio.create_task(work_aside(turns, "a", 100, list)) for _ in range(3))
    await asyncio.sleep(0)
    in_queue.cancel()
    first.cancel()
    await asyncio.sleep(0)
    at_turn.cancel()
    may_end.set()
    async with asyncio.timeout(30):
        await last
        await work_aside(turns, "a", 100, list)
    assert [each.cancelled() for each in (first, in_queue, at_turn)] == [True, True, True]
