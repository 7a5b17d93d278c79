"""The judge of ``python -m tests.fault`` and its clients: they notice what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fault.faults import all_faults
from tests.fault.judge import Moments, Promise, Row, judge
from tests.fault.load import LOADS, Clients, Load, Report, Seen, answer_of

GOOD = Seen(1, asked_s=9.0, first_after_s=0.1, stall_s=0.2, stalled_at_s=10.5, ended_s=11.0)
MOMENTS = Moments(broke_s=10.0, healed_s=14.0, noticed_s=10.5, whole_s=15.0, ended_s=20.0)


def judged(
    *more: Seen,
    promise: Promise | None = None,
    load: str = "steady",
    hubs: int = 3,
    moments: Moments = MOMENTS,
    found: Sequence[str] = (),
) -> Row:
    name, report = ("some-fault", load, hubs), Report([GOOD, *more], 0.0)
    return judge(name, LOADS[load], promise or Promise(), report, moments, {"retries": 2.0}, found)


def stalled(stall_s: float, at_s: float = 10.5) -> Seen:
    return Seen(2, asked_s=9.0, first_after_s=0.1, stall_s=stall_s, stalled_at_s=at_s, ended_s=at_s + stall_s + 1.0)


def test_a_good_run_has_its_figures_and_no_broken_promise() -> None:
    row = judged()
    assert row.wrong == ()
    assert (row.requests, row.errors, row.longest_stall_s, row.run_again) == (1, 0, 0.2, 2)
    assert (row.detect_s, row.recover_s) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"error": "wrong answer"}, "request 2: wrong answer"),
        ({"broken": 1, "causes": ["OSError: gone"]}, "request 2 broke: OSError: gone"),
        ({"refused": 1}, "request 2 was told to come later"),
    ],
)
def test_what_a_client_should_not_have_seen_is_a_broken_promise(more: dict[str, Any], said: str) -> None:
    row = judged(Seen(2, asked_s=12.0, ended_s=13.0, **more))
    assert row.wrong == (said,)


def test_where_a_hub_is_taken_clients_may_ask_again_and_still_see_no_error() -> None:
    promise = Promise(takes_a_hub=True)
    again = Seen(2, asked_s=12.0, ended_s=13.0, broken=3, causes=["OSError"])
    assert judged(again, promise=promise).wrong == ()
    given_up = Seen(2, asked_s=12.0, ended_s=13.0, broken=6, causes=["OSError"], error="asked 6 times")
    assert judged(given_up, promise=promise).wrong == ("request 2: asked 6 times",)


def test_too_much_load_is_refused_rightly() -> None:
    assert judged(Seen(2, asked_s=12.0, ended_s=13.0, refused=1), load="overload").wrong == ()


def test_a_stream_may_stand_still_as_long_as_is_promised() -> None:
    assert judged(stalled(0.9)).wrong == ()
    assert judged(stalled(1.1)).wrong == ("a stream stood still for 1.10 s; 1 s are promised",)
    assert judged(stalled(1.1, at_s=8.0)).wrong == (), "that was before the fault"
    assert judged(stalled(1.1), promise=Promise(stall_alone_s=2.0), hubs=1).wrong == ()
    assert judged(stalled(1.1), promise=Promise(stall_alone_s=2.0)).wrong != ()
    assert judged(stalled(8.9), load="overload").wrong == (), "it waits for a slot"
    assert judged(stalled(9.1), load="overload").wrong != ()
    assert judged(stalled(4.9), promise=Promise(stall_s=None)).wrong == (), "as long as the fault, and a second"


def test_a_site_has_to_recover_in_time() -> None:
    late = Moments(broke_s=10.0, healed_s=14.0, noticed_s=None, whole_s=30.0, ended_s=40.0)
    assert judged(moments=late).wrong == ("it took 16.0 s to recover; 15 s are promised",)
    never = Moments(broke_s=10.0, healed_s=14.0, noticed_s=None, whole_s=None, ended_s=90.0)
    assert judged(moments=never).wrong == ("it did not recover",)


def test_what_was_found_beside_the_answers_counts() -> None:
    assert judged(found=["a key is left"]).wrong == ("a key is left",)


def test_every_fault_has_a_story() -> None:
    faults = all_faults()
    assert len(faults) >= 20
    assert all(story for _, story in faults.values())


def stream(pieces: Sequence[str], *, whole: bool = True) -> bytes:
    events = [{"choices": [{"delta": {"content": piece}}], "resume": str(place)} for place, piece in enumerate(pieces)]
    lines = [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"] * whole
    return ("HTTP/1.1 200 OK\r\n\r\n" + "\n\n".join(lines) + "\n\n").encode()


async def asked_of(*answers: bytes) -> tuple[Seen, list[str]]:
    """What one client saw of a server that gives these answers, one for each time, and the places it was asked for."""
    places: list[str] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        places.extend(line.split(": ")[1] for line in head.splitlines() if line.startswith("x-omni-resume"))
        clients.stop()
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    clients = Clients("127.0.0.1", server.sockets[0].getsockname()[1], Load(clients=1))
    async with server:
        report = await asyncio.wait_for(clients.run(), 20.0)
    (seen,) = report.requests
    return seen, places


async def test_a_right_answer_is_right() -> None:
    seen, _ = await asked_of(stream([answer_of(1)]))
    assert (seen.error, seen.broken) == ("", 0)


async def test_a_wrong_word_is_an_error() -> None:
    seen, _ = await asked_of(stream([answer_of(2)]))
    assert seen.error.startswith("wrong answer")


async def test_a_cut_stream_is_asked_for_again_behind_what_came() -> None:
    words = answer_of(1).split(" ")
    half = [word + " " for word in words[:5]]
    seen, places = await asked_of(stream(half, whole=False), stream([" ".join(words[5:])]))
    assert (seen.error, seen.broken, places) == ("", 1, ["new", "4"])
    doubled, _ = await asked_of(stream(half, whole=False), stream([" ".join(words)]))
    assert doubled.error.startswith("wrong answer")


async def test_an_error_of_the_server_is_asked_again_and_one_of_the_client_is_not() -> None:
    seen, _ = await asked_of(b"HTTP/1.1 503 X\r\n\r\n{}", stream([answer_of(1)]))
    assert (seen.error, seen.broken) == ("", 1)
    seen, _ = await asked_of(b"HTTP/1.1 400 X\r\n\r\n{}")
    assert seen.error.startswith("400")
    seen, _ = await asked_of(b"HTTP/1.1 429 X\r\nRetry-After: 0\r\n\r\n{}", stream([answer_of(1)]))
    assert (seen.error, seen.broken, seen.refused) == ("", 0, 1)


async def test_a_bound_of_the_hub_is_a_refusal_and_a_lack_of_replicas_is_not() -> None:
    """Both are a 503 with a time to come again: the first is meant under overload, the second never."""
    head = b"HTTP/1.1 503 X\r\nRetry-After: 0\r\n\r\n"
    seen, _ = await asked_of(head + b'{"error":{"code":"too_many_connections"}}', stream([answer_of(1)]))
    assert (seen.error, seen.broken, seen.refused) == ("", 0, 1)
    seen, _ = await asked_of(head + b'{"error":{"code":"stage_unavailable"}}', stream([answer_of(1)]))
    assert (seen.error, seen.broken, seen.refused) == ("", 1, 0)
    seen, _ = await asked_of(b"HTTP/1.1 429 X\r\n\r\n{}")
    assert seen.error.startswith("429"), "without a time to come again"
