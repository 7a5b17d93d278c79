"""The header that shows a client where its time went; a replica chooses the names in it."""

from __future__ import annotations

from hub.api.chat_answer import server_timing


def test_timings_are_milliseconds_in_the_order_of_their_names() -> None:
    assert server_timing({"queue": 0.25, "first_output": 1.5}) == "first_output;dur=1500.000, queue;dur=250.000"


def test_what_would_end_the_header_or_is_no_number_is_left_out() -> None:
    bad = {"x\r\nSet-Cookie: a": 1.0, "": 1.0, "ü": 1.0, "a b": 1.0, "n" * 65: 1.0, "a,b;c": 1.0, "queue\n": 1.0}
    odd = {"not_a_number": float("nan"), "endless": float("inf")}
    assert server_timing({**bad, **odd, "queue": 0.25}) == "queue;dur=250.000"
