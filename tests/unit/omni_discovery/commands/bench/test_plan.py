"""What a load test sends and when."""

from __future__ import annotations

from random import Random

import pytest

from omni_discovery.commands.bench.plan import Asking, LoadPlan, arrivals, made_prompt


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    """Gaps have the mean 1 / rate, and vary by as much: a steady beat would not."""
    dues = list(arrivals(LoadPlan(20_000, None, rate_per_s=50.0), Random(1).random))
    gaps = [after - before for before, after in zip([0.0, *dues], dues, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert len(dues) == 20_000
    assert mean == pytest.approx(0.02, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)


def test_arrivals_end_with_the_time_or_the_number_whichever_comes_first() -> None:
    in_time = list(arrivals(LoadPlan(None, 10.0, rate_per_s=10.0), Random(2).random))
    assert 60 < len(in_time) < 140
    assert max(in_time) < 10.0
    assert list(arrivals(LoadPlan(3, 10.0, rate_per_s=10.0), Random(2).random)) == in_time[:3]
    assert list(arrivals(LoadPlan(3, None), Random(2).random)) == []


def test_a_made_prompt_has_the_words_that_were_asked_for_and_no_two_begin_alike() -> None:
    """Else caches of prefixes would answer the second one faster."""
    prompts = [made_prompt(number, 12, Random(number).random) for number in range(50)]
    assert {len(prompt.split()) for prompt in prompts} == {12}
    assert len({prompt.split()[0] for prompt in prompts}) == 50
    assert made_prompt(0, 1, Random(0).random) == "1"


def test_a_chat_is_streamed_and_asks_for_what_was_said() -> None:
    asking = Asking("m", modalities=("text", "audio"), max_tokens=5, more={"temperature": 0})
    assert asking.path == "/v1/chat/completions"
    assert asking.body("hello") == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "modalities": ["text", "audio"],
        "max_tokens": 5,
        "temperature": 0,
    }
    assert "modalities" not in Asking("m").body("hello")


def test_speech_is_asked_for_as_it_is_made_and_own_fields_win() -> None:
    asking = Asking("m", is_speech=True, max_tokens=7, more={"voice": "ann"})
    assert asking.path == "/v1/audio/speech"
    assert asking.body("hello") == {
        "model": "m",
        "input": "hello",
        "voice": "ann",
        "response_format": "pcm",
        "stream_format": "audio",
        "max_new_tokens": 7,
    }


def test_a_plan_says_what_it_does() -> None:
    assert LoadPlan(100, None, concurrency=4).describe() == "4 at a time, 100 requests"
    assert LoadPlan(None, 2.5, rate_per_s=20).describe() == "20 requests/s, as they come, 2.5 s"
