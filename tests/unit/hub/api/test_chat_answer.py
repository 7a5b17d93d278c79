"""What is kept of an answer, and the header that shows a client where its time went: a replica chooses its names."""

from __future__ import annotations

import base64
import json

import pytest

from hub.api.chat_answer import Answer, server_timing, shown_timings
from hub.api.exchange import Exchange
from hub.request.outputs import OmniOutput
from omni_discovery.errors import EngineFailedError


def drawn(size_bytes: int) -> OmniOutput:
    return OmniOutput("r", 1, "image", data=bytes(size_bytes), mime="image/png")


@pytest.mark.attack("A22")
def test_a_whole_answer_is_bounded_and_a_streamed_one_keeps_nothing() -> None:
    whole, streamed = (Answer(Exchange(), "m", 0, is_streamed=each) for each in (False, True))
    picture = drawn(30 << 20)
    for _ in range(3):
        whole.add(picture)
    with pytest.raises(EngineFailedError, match="longer than 128 MiB"):
        whole.add(picture)
    for _ in range(50):
        assert streamed.add(picture) == 0
    assert streamed.completion()["choices"][0]["message"]["content"] == ""


async def test_long_answers_read_as_short_ones_do() -> None:
    """They are made in a thread."""
    for size_bytes in (10, 2 << 20):
        url = f"data:image/png;base64,{base64.b64encode(bytes(size_bytes)).decode()}"
        answer, output = Answer(Exchange(), "m", 0), drawn(size_bytes)
        assert answer.add(output) == 0
        body = json.loads(await answer.body())
        assert body["choices"][0]["message"]["content"] == [{"type": "image_url", "image_url": {"url": url}}]
        event = (await answer.event(output, 0, first=True)).removeprefix(b"data: ")
        assert event.endswith(b"\n\n")
        assert json.loads(event)["choices"][0]["delta"]["content"][0]["image_url"]["url"] == url


def test_timings_are_milliseconds_in_the_order_of_their_names() -> None:
    assert server_timing({"queue": 0.25, "first_output": 1.5}) == "first_output;dur=1500.000, queue;dur=250.000"


def test_what_would_end_the_header_or_is_no_number_is_left_out() -> None:
    bad = {"x\r\nSet-Cookie: a": 1.0, "": 1.0, "ü": 1.0, "a b": 1.0, "n" * 65: 1.0, "a,b;c": 1.0, "queue\n": 1.0}
    odd = {"not_a_number": float("nan"), "endless": float("inf")}
    assert server_timing({**bad, **odd, "queue": 0.25}) == "queue;dur=250.000"


@pytest.mark.attack("A25")
def test_a_replica_that_names_sixty_thousand_timings_makes_no_header_that_clients_refuse() -> None:
    timings_s = {f"stage0.{number:032}": 1.0 for number in range(60_000)} | {"hub_in": 0.5, "total": 2.0}
    header = server_timing(timings_s)
    assert len(header) <= 4000
    assert header.startswith("hub_in;dur=500.000, total;dur=2000.000, stage0.")
    assert not header.endswith(",")
    shown = shown_timings(timings_s)
    assert len(shown) == 256
    assert {"hub_in", "total"} <= shown.keys()
    assert list(shown) == sorted(shown)
