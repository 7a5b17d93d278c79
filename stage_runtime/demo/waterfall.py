"""When each stage of a spoken answer was at work, as bars of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stage_runtime.demo.http_client import Reply

_BAR: Final = 48


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, in seconds since the question."""

    name: str
    begin_s: float
    end_s: float


def spans(reply: Reply) -> list[Span]:
    """Of a spoken answer: thinker, talker and vocoder by the hub's timings, and the sound as the client heard it."""
    timings: Mapping[str, float] = reply.timings_s
    asked_s = timings.get("hub_in", 0.0)
    thought_s = asked_s + timings["stage0.total"]
    ended_s = reply.seconds
    return [
        Span("thinker", asked_s, thought_s),
        Span("talker", thought_s, min(ended_s, thought_s + timings["stage2.total"])),
        Span("vocoder", max(thought_s, ended_s - timings["stage3.total"]), ended_s),
        Span("sound", reply.first_sound_s, ended_s),
    ]


def bars(title: str, shown: list[Span], width_s: float) -> Iterator[str]:
    """A line for each span. ``width_s`` is the time of the whole width, the same for figures to be compared."""
    yield title
    for span in shown:
        begin = min(_BAR - 1, round(_BAR * span.begin_s / width_s))
        length = max(1, min(_BAR, round(_BAR * span.end_s / width_s)) - begin)
        bar = " " * begin + "█" * length
        yield f"  {span.name:8}|{bar:{_BAR}}| {1000 * span.begin_s:4.0f} to {1000 * span.end_s:4.0f} ms"


def waterfall(with_pieces: Reply, without: Reply) -> str:
    """The same question with ``async_chunk`` and without it, one above the other."""
    width_s = max(with_pieces.seconds, without.seconds)
    lines = [
        *bars("with async_chunk: codes travel as the talker makes them", spans(with_pieces), width_s),
        *bars("without: the vocoder begins when the talker has ended", spans(without), width_s),
    ]
    return "\n".join(lines)
