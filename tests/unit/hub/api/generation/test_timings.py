"""The header that shows a client where its time went: a replica chooses its names."""

from __future__ import annotations

import pytest

from hub.api.generation.timings import server_timing, shown_timings


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
