"""What one client has sent reaches its parser in slices, and others have their turn between them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from hub.api.turns import LoopShare, Turns


class Transport(asyncio.Transport):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def is_closing(self) -> bool:
        return "close" in self.calls

    def close(self) -> None:
        self.calls.append("close")

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


def slow_clock() -> float:
    """Each look takes a second, so that every slice takes a whole turn."""
    return float(next(SECONDS))


SECONDS = itertools.count()


async def test_what_is_small_waits_for_no_turn() -> None:
    taken: list[bytes] = []
    transport = Transport()
    turns = Turns(taken.append, lambda: True, LoopShare(), str, lambda: 0.0)
    turns.came(b"x" * 8192, transport)
    turns.came(b"y", transport)
    assert taken == [b"x" * 8192, b"y"]
    assert transport.calls == []


async def test_what_is_quickly_parsed_waits_for_no_turn_either() -> None:
    taken: list[bytes] = []
    transport = Transport()
    Turns(taken.append, lambda: True, LoopShare(), str, lambda: 0.0).came(b"x" * 100_000, transport)
    assert b"".join(taken) == b"x" * 100_000
    assert transport.calls == []


async def test_others_have_a_turn_between_slices_and_the_order_stays() -> None:
    taken: list[bytes] = []
    transport = Transport()
    turns = Turns(taken.append, lambda: True, LoopShare(slow_clock), str, slow_clock)
    turns.came(b"a" * 8192 + b"b" * 8192, transport)
    turns.came(b"c" * 10, transport)
    assert (taken, transport.calls) == ([b"a" * 8192], ["pause", "pause"])
    await asyncio.sleep(0)
    assert taken[1:] == [b"b" * 8192]
    await asyncio.sleep(0)
    assert taken[2:] == [b"c" * 10]
    assert transport.calls == ["pause", "pause", "resume"]


async def test_a_parser_that_is_full_is_not_read_for() -> None:
    transport = Transport()
    turns = Turns(lambda data: None, lambda: False, LoopShare(), str, slow_clock)
    turns.came(bytes(10_000), transport)
    await asyncio.sleep(0)
    assert transport.calls == ["pause"]


async def test_nothing_is_parsed_after_the_end() -> None:
    for end in ("close", "end"):
        taken: list[bytes] = []
        transport = Transport()
        turns = Turns(taken.append, lambda: False, LoopShare(), str, slow_clock)
        turns.came(bytes(50_000), transport)
        (transport.close if end == "close" else turns.end)()
        await asyncio.sleep(0)
        assert len(taken) == 1
        # Another protocol goes on with the connection.
        assert ("resume" in transport.calls) == (end == "end")


@pytest.mark.attack("X5")
async def test_what_all_connections_send_at_one_moment_has_a_share_of_each_turn_the_clients_in_turn() -> None:
    """1. the first is taken at once; 2. of the others one in each turn; 3. a client with one behind many is second"""
    taken: list[bytes] = []
    share = LoopShare(slow_clock)
    waiting = []
    for number in range(6):
        transport, client = Transport(), "b" if number == 5 else "a"
        turns = Turns(taken.append, lambda: True, share, lambda client=client: client, slow_clock)  # type: ignore[misc]
        turns.came(f"{client}{number}".encode(), transport)
        waiting.append(transport)
    assert taken == [b"a0"]
    for count in range(2, 7):
        await asyncio.sleep(0)
        assert len(taken) == count
    assert taken == [b"a0", b"a1", b"b5", b"a2", b"a3", b"a4"]
    assert [each.calls for each in waiting] == [[]] + [["pause", "resume"]] * 5
    await asyncio.sleep(0)
    assert share.has_room


async def test_a_connection_that_closes_before_its_turn_is_not_parsed_and_a_fault_of_one_stops_no_other() -> None:
    taken: list[bytes] = []
    share, faults = LoopShare(slow_clock), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    gone, good = (Turns(taken.append, lambda: True, share, lambda: "a", slow_clock) for _ in range(2))
    share.do_now(lambda _: None, b"")
    gone.came(b"gone", Transport())
    share.wait("a", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    good.came(b"good", Transport())
    gone.close()
    for _ in range(4):
        await asyncio.sleep(0)
    assert taken == [b"good"]
    assert [type(each) for each in faults] == [ZeroDivisionError]
