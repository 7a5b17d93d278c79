"""What a load test sends and when: arrivals, prompts and bodies. Chance comes in as ``draw``.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

CHAT_PATH: Final = "/v1/chat/completions"
SPEECH_PATH: Final = "/v1/audio/speech"
#: Words of made prompts: short, and each a token or two of any vocabulary.
_WORDS: Final = (
    *("river", "stone", "green", "seven", "morning", "paper", "north", "open", "bread", "silver", "street", "winter"),
    *("garden", "letter", "quiet", "round", "field", "seldom", "music", "table", "under", "window", "yellow", "carry"),
)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a hub is loaded: open loop where ``rate_per_s`` is given, else ``concurrency`` requests at any time.

    It ends after ``requests`` or ``duration_s``, whichever comes first; one of them is not None.
    """

    requests: int | None
    duration_s: float | None
    rate_per_s: float | None = None
    concurrency: int = 1
    #: Open loop: requests that are due beyond so many wait, and their wait counts.
    most_in_flight: int = 1000
    #: Of one request, from when it is sent.
    timeout_s: float = 120.0

    @property
    def is_open(self) -> bool:
        """Whether requests are sent when they are due, whatever became of those before."""
        return self.rate_per_s is not None

    def describe(self) -> str:
        """The plan in words."""
        ends = [f"{self.requests} requests"] if self.requests is not None else []
        ends += [f"{self.duration_s:g} s"] if self.duration_s is not None else []
        how = f"{self.rate_per_s:g} requests/s, as they come" if self.is_open else f"{self.concurrency} at a time"
        return f"{how}, {' or '.join(ends)}"


def arrivals(plan: LoadPlan, draw: Callable[[], float]) -> Iterator[float]:
    """When each request of an open loop is due, in seconds from the start: a Poisson process.

    ``draw`` returns numbers from 0 up to, and without, 1.
    """
    due_s, number = 0.0, 0
    while plan.rate_per_s is not None and (plan.requests is None or number < plan.requests):
        due_s += -math.log(1.0 - draw()) / plan.rate_per_s
        if plan.duration_s is not None and due_s >= plan.duration_s:
            return
        yield due_s
        number += 1


def made_prompt(number: int, words: int, draw: Callable[[], float]) -> str:
    """A prompt of so many words, the first of which is the request's number: no two begin alike."""
    drawn = (_WORDS[int(draw() * len(_WORDS))] for _ in range(words - 1))
    return " ".join([str(number + 1), *drawn])


@dataclass(frozen=True, slots=True)
class Asking:
    """What each request asks for; ``more`` are fields of its body that win over all others."""

    model: str
    is_speech: bool = False
    #: Empty: all that the pipeline has.
    modalities: Sequence[str] = ()
    max_tokens: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The route."""
        return SPEECH_PATH if self.is_speech else CHAT_PATH

    def body(self, prompt: str) -> dict[str, Any]:
        """The body of a request with this prompt."""
        if self.is_speech:
            # Raw samples as they are made: nothing that an encoder would hold back.
            made: dict[str, Any] = {"input": prompt, "voice": "default", "response_format": "pcm"}
            made |= {"stream_format": "audio"}
            made |= {} if self.max_tokens is None else {"max_new_tokens": self.max_tokens}
        else:
            made = {"messages": [{"role": "user", "content": prompt}], "stream": True}
            made |= {"stream_options": {"include_usage": True}}
            made |= {"modalities": [*self.modalities]} if self.modalities else {}
            made |= {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {"model": self.model, **made, **self.more}
