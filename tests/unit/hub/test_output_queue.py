"""The output that waits for one client: when the client counts as behind, and when it has caught up."""

from __future__ import annotations

import asyncio
import time
from math import inf

import pytest

from hub.orchestrator.active import AbortRequest, Ended
from hub.output_queue import Delivery, OutputQueue, Unread, Watermarks
from hub.request.events import ClientBackpressure
from hub.request.outputs import OmniOutput
from omni_discovery.errors import OverloadedError, RequestError

BEHIND, CAUGHT_UP = ClientBackpressure(is_behind=True), ClientBackpressure(is_behind=False)


def test_each_crossing_is_told_once_and_only_far_below_it_the_next() -> None:
    """Half of the bound makes it behind; it has caught up with a quarter: in between nothing is new."""
    marks = Watermarks(8, 1000)
    seen = [marks.crossed(outputs, 0) for outputs in (3, 4, 5, 4, 3, 2, 1, 3, 4, 0)]
    assert seen == [None, BEHIND, None, None, None, CAUGHT_UP, None, None, BEHIND, CAUGHT_UP]


def test_either_bound_makes_it_behind_and_both_must_be_low_again() -> None:
    marks = Watermarks(8, 1000)
    assert marks.crossed(1, 500) == BEHIND
    assert marks.crossed(3, 250) is None
    assert marks.crossed(2, 251) is None
    assert marks.crossed(2, 250) == CAUGHT_UP


def test_with_a_bound_of_one_whatever_waits_is_too_much() -> None:
    marks = Watermarks(1, 1)
    assert (marks.crossed(1, 0), marks.crossed(0, 0)) == (BEHIND, CAUGHT_UP)


@pytest.mark.attack("Z84")
async def test_where_too_much_waits_for_all_each_is_behind_sooner() -> None:
    """1. two leave 3 MiB each, of 4 MiB for all: the second is behind, a third with little is not
    2. what nobody reads any more counts for nothing
    """
    paces: list[list[ClientBackpressure]] = [[], [], []]
    unread = Unread(4 << 20)
    queues = [OutputQueue(512, 256 << 20, each.append, unread=unread) for each in paces]
    piece = OmniOutput("r", 0, "image", data=bytes(1 << 20))
    for queue in queues[:2]:
        for _ in range(3):
            queue.put(piece)
    queues[2].put(OmniOutput("r", 0, "text", text="word"))
    assert paces == [[], [BEHIND], []]
    assert unread.is_too_much
    # Not every engine pauses; one that was not told takes the next.
    assert [queues[1].put(piece) for _ in range(16)] == [True] * 15 + [False]
    assert queues[0].put(piece)
    assert paces[0] == [BEHIND]
    queues[0].forget()
    queues[0].forget()
    assert unread.size_bytes == (18 << 20) + 4
    queues[1].discard(RequestError("gone"))
    assert await queues[2].get() is not None
    assert unread.size_bytes == 0


async def test_a_queue_tells_what_its_reader_does_until_its_request_has_ended() -> None:
    """1. four of eight places are taken; 2. text is joined meanwhile, which is no news; 3. the reader takes two
    4. it falls behind again; what it reads after the end is nobody's business
    """
    paces: list[ClientBackpressure] = []
    queue = OutputQueue(8, 1000, paces.append)
    for number in range(6):
        assert queue.put(OmniOutput("r", 0, "text", text=f"{number} "))
    assert paces == [BEHIND]
    for _ in range(2):
        await queue.get()
    assert paces == [BEHIND, CAUGHT_UP]
    for _ in range(2):
        queue.put(OmniOutput("r", 0, "text", text="x" * 100))
    assert paces == [BEHIND, CAUGHT_UP, BEHIND]
    queue.end(None)
    while await queue.get() is not None:
        pass
    assert len(paces) == 3


async def test_an_output_that_a_bug_keeps_from_its_client_ends_that_request_and_no_other() -> None:
    queues = {"bad": OutputQueue(8, 1000), "good": OutputQueue(8, 1000)}
    aborted: list[AbortRequest] = []

    deliver = Delivery(queues, aborted.append).deliver
    queues["bad"].put = None  # type: ignore[assignment,method-assign]
    deliver("bad", OmniOutput("bad", 0, "text", text="x"))
    deliver("gone", Ended(RequestError("no")))
    deliver("good", OmniOutput("good", 0, "text", text="x"))
    with pytest.raises(RequestError, match="a bug in the hub"):
        await queues["bad"].get()
    output = await queues["good"].get()
    assert output is not None
    assert output.text == "x"
    assert [abort.request_id for abort in aborted] == ["bad"]


async def test_an_output_that_is_waited_for_may_be_taken_in_place_of_its_reader() -> None:
    """1. nobody waits: what comes is queued, and read
    2. the reader waits: what the taker takes never gets there, and nothing is unread; what it leaves wakes the reader
    3. the reader is awake, or something is queued: nothing is taken, so nothing overtakes
    """
    taken: list[str] = []

    def take(output: OmniOutput) -> bool:
        if output.text != "left":
            taken.append(output.text)
        return output.text != "left"

    queue = OutputQueue(8, 1000, taker=take)
    queue.put(OmniOutput("r", 0, "text", text="before"))
    assert await queue.get() == OmniOutput("r", 0, "text", text="before")
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    for text in ("a", "b", "left", "behind"):
        assert queue.put(OmniOutput("r", 0, "text", text=text))
    assert taken == ["a", "b"]
    assert await reader == OmniOutput("r", 0, "text", text="left")
    assert queue.unread_since_s < inf
    assert await queue.get() == OmniOutput("r", 0, "text", text="behind")
    assert queue.unread_since_s == inf


async def test_the_oldest_output_says_how_far_behind_a_client_is_and_may_be_dropped() -> None:
    """1. two outputs wait: since when the first does; it is read, and the second is the oldest; none: no time at all
    2. what waits is dropped, and the reader gets the error at once, also where the end had come
    """
    queue = OutputQueue(8, 1000)
    assert queue.unread_since_s == inf
    began_s = time.monotonic()
    queue.put(OmniOutput("r", 0, "text", text="a"))
    between_s = time.monotonic()
    queue.put(OmniOutput("r", 0, "text", text="b"))
    assert began_s <= queue.unread_since_s <= between_s
    assert await queue.get() is not None
    assert between_s <= queue.unread_since_s < inf
    queue.end(None)
    queue.discard(OverloadedError("too slow"))
    assert queue.unread_since_s == inf
    with pytest.raises(OverloadedError, match="too slow"):
        await queue.get()
