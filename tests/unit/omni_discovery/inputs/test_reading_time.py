"""How long answers are read for calls."""

from __future__ import annotations

import re
import time

import pytest

from omni_discovery.inputs.reading_time import ReadingTime, TookTooLongError

#: Searched for what it does not hold in the square of its length: about a minute.
LONG = "<a>" * 40_000


def search(text: str) -> list[str]:
    try:
        return re.findall(r"<a>([\s\S]*?)</a>", text)
    except Exception:  # noqa: BLE001 - as vLLM's parsers do
        return []


def spent_s(reading: ReadingTime) -> float:
    """How long a search goes on before it is cut short."""
    began_s = time.thread_time()
    with pytest.raises(TookTooLongError, match="120000 characters"):
        reading.read(LONG, lambda: search(LONG))
    return time.thread_time() - began_s


@pytest.mark.attack("U1")
def test_a_search_is_cut_short_and_the_next_has_less_time_until_some_has_passed() -> None:
    """1. a search takes what all answers have to spare; 2. the next ones stop sooner; 3. there is time again later"""
    now_s = 0.0
    reading = ReadingTime(lambda: now_s)
    first_s = spent_s(reading)
    assert 0.5 < first_s < 10
    others_s = [spent_s(reading) for _ in range(5)]
    assert min(others_s) < first_s / 2
    now_s = 60.0
    assert spent_s(reading) > max(0.5, min(others_s))


def test_a_short_search_gives_what_it_finds() -> None:
    """Also behind one that was cut short: a signal that comes late interrupts nothing."""
    reading = ReadingTime()
    spent_s(reading)
    for _ in range(100):
        assert reading.read("<a>b</a>", lambda: search("<a>b</a>")) == ["b"]


def test_an_error_of_a_search_is_its_callers() -> None:
    def fail() -> None:
        raise ValueError("no call")

    with pytest.raises(ValueError, match="no call"):
        ReadingTime().read("x", fail)
