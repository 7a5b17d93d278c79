"""What one client has sent reaches its parser in slices, and others have their turn between them."""

from __future__ import annotations

import asyncio
import itertools

from hub.api.turns import Turns


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
    turns = Turns(taken.append, lambda: True, slow_clock)
    turns.came(b"x" * 8192, transport, asyncio.get_running_loop())
    turns.came(b"y", transport, asyncio.get_running_loop())
    assert taken == [b"x" * 8192, b"y"]
    assert transport.calls == []


async def test_what_is_quickly_parsed_waits_for_no_turn_either() -> None:
    taken: list[bytes] = []
    transport = Transport()
    Turns(taken.append, lambda: True, lambda: 0.0).came(b"x" * 100_000, transport, asyncio.get_running_loop())
    assert b"".join(taken) == b"x" * 100_000
    assert transport.calls == []


async def test_others_have_a_turn_between_slices_and_the_order_stays() -> None:
    taken: list[bytes] = []
    transport, loop = Transport(), asyncio.get_running_loop()
    turns = Turns(taken.append, lambda: True, slow_clock)
    turns.came(b"a" * 8192 + b"b" * 8192, transport, loop)
    turns.came(b"c" * 10, transport, loop)
    assert (taken, transport.calls) == ([b"a" * 8192], ["pause", "pause"])
    await asyncio.sleep(0)
    assert taken[1:] == [b"b" * 8192]
    await asyncio.sleep(0)
    assert taken[2:] == [b"c" * 10]
    assert transport.calls == ["pause", "pause", "resume"]


async def test_a_parser_that_is_full_is_not_read_for() -> None:
    transport = Transport()
    turns = Turns(lambda data: None, lambda: False, slow_clock)
    turns.came(bytes(10_000), transport, asyncio.get_running_loop())
    await asyncio.sleep(0)
    assert transport.calls == ["pause"]


async def test_nothing_is_parsed_after_the_end() -> None:
    for end in ("close", "end"):
        taken: list[bytes] = []
        transport = Transport()
        turns = Turns(taken.append, lambda: False, slow_clock)
        turns.came(bytes(50_000), transport, asyncio.get_running_loop())
        (transport.close if end == "close" else turns.end)()
        await asyncio.sleep(0)
        assert len(taken) == 1
        # Another protocol goes on with the connection.
        assert ("resume" in transport.calls) == (end == "end")
