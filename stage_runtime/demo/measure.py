"""The demo's figures: start-up time, memory, and the hub's overhead for each request."""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from stage_runtime.demo.http_client import DemoError, Reply, ask, json_headers
from stage_runtime.demo.processes import descendants, memory_bytes, run_time_s

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Numbers:
    """The figures of one run. ``hub_*_ms``: HTTP in to stage 0's send, plus the last stage's receive to HTTP out."""

    requests: int
    ready_s: float
    memory_mib: float
    processes: int
    hub_p50_ms: float
    hub_p99_ms: float
    request_p50_ms: float
    request_p99_ms: float

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure, for people."""
        yield "everything ready after", f"{self.ready_s:.1f} s"
        yield "memory of all processes", f"{self.memory_mib:.0f} MiB in {self.processes} processes"
        yield "hub overhead per request", f"p50 {self.hub_p50_ms:.2f} ms, p99 {self.hub_p99_ms:.2f} ms"
        yield "whole request", f"p50 {self.request_p50_ms:.0f} ms, p99 {self.request_p99_ms:.0f} ms"
        yield "over", f"{self.requests} requests, one at a time"

    def to_json(self) -> str:
        """The figures for a file."""
        return json.dumps({name: round(value, 3) for name, value in asdict(self).items()}, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class SpeechNumbers:
    """The figures of spoken answers, asked for one at a time; medians."""

    answers: int
    first_sound_ms: float
    first_sound_whole_ms: float
    #: Time to make the sound, over its length.
    real_time_factor: float
    hub_ms_per_s: float

    def lines(self) -> Iterator[tuple[str, str]]:
        """Name and value of each figure, for people."""
        yield (
            "first sound after",
            f"{self.first_sound_ms:.0f} ms; without async_chunk {self.first_sound_whole_ms:.0f} ms",
        )
        yield "real-time factor", f"{self.real_time_factor:.2f}, from the question to the last sample"
        yield "hub's processor time", f"{self.hub_ms_per_s:.1f} ms for a second of sound"
        yield "over", f"{self.answers} spoken answers, one at a time"

    def to_json(self) -> str:
        """The figures for a file."""
        return json.dumps({name: round(value, 3) for name, value in asdict(self).items()}, indent=2) + "\n"


def measure_speech(url: str, hub_pid: int, answers: int = 6) -> tuple[SpeechNumbers, Reply, Reply]:
    """Have so many sums answered aloud, and as many again without async_chunk.

    Beside the figures, the answer of each kind that took the median time. Raise DemoError if two sound differently.
    """
    questions = [f"what is {7 * index} + {5 + index}?" for index in range(answers)]
    began_s = run_time_s(hub_pid)
    with_pieces = [ask(url, question, on_sound=_unheard, picture=False) for question in questions]
    hub_s = run_time_s(hub_pid) - began_s
    without = [ask(url, question, on_sound=_unheard, picture=False, async_chunk=False) for question in questions]
    if any(one.samples != other.samples for one, other in zip(with_pieces, without, strict=True)):
        raise DemoError("the same question had another sound without async_chunk")
    lengths_s = [len(reply.samples) / 2 / reply.rate_hz for reply in with_pieces]
    numbers = SpeechNumbers(
        answers=answers,
        first_sound_ms=1000 * statistics.median(reply.first_sound_s for reply in with_pieces),
        first_sound_whole_ms=1000 * statistics.median(reply.first_sound_s for reply in without),
        real_time_factor=statistics.median(
            reply.seconds / length_s for reply, length_s in zip(with_pieces, lengths_s, strict=True)
        ),
        hub_ms_per_s=1000 * hub_s / sum(lengths_s),
    )
    return numbers, _median(with_pieces), _median(without)


def _median(replies: list[Reply]) -> Reply:
    return sorted(replies, key=lambda reply: reply.seconds)[len(replies) // 2]


def _unheard(_samples: bytes, _rate_hz: int) -> None:
    """Hear nothing."""


def measure_memory(hub_pid: int) -> tuple[float, int]:
    """Memory of the hub and all its descendants in MiB, and the number of these processes."""
    pids = descendants(hub_pid)
    return memory_bytes(pids) / (1 << 20), len(pids)


def measure(url: str, ready_s: float, memory: tuple[float, int], requests: int) -> Numbers:
    """Send ``requests`` sums one after the other and read each answer's ``Server-Timing``."""
    overheads, wholes = [], []
    for index in range(requests):
        begin_s = time.perf_counter()
        timings = _one(url, f"what is {index % 50} + {index % 49}?", index)
        wholes.append(1000 * (time.perf_counter() - begin_s))
        overheads.append(timings["hub_in"] + timings["hub_out"])
    return Numbers(
        requests=requests,
        ready_s=ready_s,
        memory_mib=memory[0],
        processes=memory[1],
        hub_p50_ms=statistics.median(overheads),
        hub_p99_ms=_p99(overheads),
        request_p50_ms=statistics.median(wholes),
        request_p99_ms=_p99(wholes),
    )


def _one(url: str, question: str, seed: int) -> dict[str, float]:
    body = {"messages": [{"role": "user", "content": question}], "modalities": ["text", "image"], "seed": seed}
    request = urllib.request.Request(  # noqa: S310 - the address is our own
        f"{url}/v1/chat/completions", json.dumps(body).encode(), json_headers()
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        response.read()
        return _server_timing(response.headers["Server-Timing"])


def _server_timing(header: str) -> dict[str, float]:
    """The header's entries in milliseconds: ``name;dur=1.5, name2;dur=2``."""
    pairs = (entry.split(";dur=") for entry in header.split(","))
    return {name.strip(): float(value) for name, value in pairs}


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
