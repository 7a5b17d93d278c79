"""FailureLog: one log line for each failed request, and under a storm of failures a few lines and their sum. Pure."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from omni_discovery.text import one_line, replace_hidden

#: Characters of a cause and of any other value in a line.
_MOST_CAUSE: Final = 400
_MOST_VALUE: Final = 200
#: Values that a sum lists of its kinds and stages each.
_MOST_COUNTED: Final = 20
#: The W3C's header: version, trace id, id of the span, flags. An id of zeros is none.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed. ``attempt`` None: it was not dispatched; ``parent``: the request whose companion it is."""

    request_id: str
    #: Empty where no stage is to blame.
    stage: str
    #: ``<stage>/<replica id>``; empty where no replica had the request.
    replica: str
    attempt: int | None
    #: The type of the error, or the wire's failure kind.
    kind: str
    #: The text that the client gets.
    cause: str
    parent: str = ""
    #: The client's name for the request; empty if it gave none.
    label: str = ""
    #: The name of the API key that it came in with; empty where none was asked for.
    key: str = ""
    #: The life of the replica that had it; 0 if no replica had.
    epoch: int = 0
    #: The id of its trace; empty if it has none.
    trace: str = ""

    def message(self) -> tuple[str, tuple[object, ...]]:
        """Template and arguments of a log call: one line of printable characters, at most about 1200 of them."""
        values: dict[str, object] = {"request": word(self.request_id)}
        if self.parent:
            values["parent"] = word(self.parent)
        if self.label:
            values["x_request_id"] = word(self.label)
        if self.key:
            values["key"] = word(self.key)
        if self.trace:
            values["trace"] = word(self.trace)
        values |= {"stage": word(self.stage), "replica": word(self.replica)}
        if self.epoch:
            values["epoch"] = self.epoch
        values |= {
            "attempt": "-" if self.attempt is None else self.attempt,
            "kind": word(self.kind),
            "cause": _cause(self.cause),
        }
        return " ".join(["request.failed", *(f"{name}=%s" for name in values)]), tuple(values.values())


@dataclass(slots=True)
class _Window:
    """The failures of one log level within ``window_s`` of the first of them."""

    began_at_s: float
    ends_at_s: float
    lines: int = 0
    #: The failures without a line of their own, by kind and by stage.
    kinds: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)


class FailureLog:
    """Belongs to one thread, which calls ``write_due`` when the moment comes that it returns, and ``close`` at the end.

    ``write`` gets a level of ``logging``, a template and its arguments; ``now_s`` gives monotonic seconds. In each
    ``window_s`` and level, the first ``most_lines`` failures have a line each; the others are counted in one line when
    the window is over.
    """

    def __init__(
        self,
        write: Callable[..., None],
        now_s: Callable[[], float],
        most_lines: int = 20,
        window_s: float = 10.0,
    ) -> None:
        self._write = write
        self._now_s = now_s
        self._most_lines = most_lines
        self._window_s = window_s
        #: By level.
        self._windows: dict[int, _Window] = {}

    def add(self, failure: Failure, level: int = logging.WARNING) -> None:
        """Log a failure, or count it for the sum of its window."""
        self.write_due()
        now_s = self._now_s()
        window = self._windows.setdefault(level, _Window(now_s, now_s + self._window_s))
        if window.lines < self._most_lines:
            window.lines += 1
            template, arguments = failure.message()
            self._write(level, template, *arguments)
        else:
            window.kinds[word(failure.kind)] += 1
            window.stages[word(failure.stage)] += 1

    def write_due(self) -> float | None:
        """Log the sums of windows that are over. Return when the next sum is due (monotonic), None if none will be."""
        now_s = self._now_s()
        for level, window in list(self._windows.items()):
            if now_s >= window.ends_at_s:
                self._end_window(level, now_s)
        return min((window.ends_at_s for window in self._windows.values() if window.kinds), default=None)

    def close(self) -> None:
        """Log the sums of all windows. Idempotent."""
        for level in list(self._windows):
            self._end_window(level, self._now_s())

    def _end_window(self, level: int, now_s: float) -> None:
        window = self._windows.pop(level)
        if window.kinds:
            kinds, stages = window.kinds, window.stages
            text = "requests.failed count=%d kinds=%s stages=%s in_s=%.1f"
            self._write(level, text, kinds.total(), _counts(kinds), _counts(stages), now_s - window.began_at_s)


def _counts(counter: Counter[str]) -> str:
    listed = counter.most_common(_MOST_COUNTED)
    more = counter.total() - sum(count for _, count in listed)
    return "{" + ",".join([f"{name}:{count}" for name, count in listed] + [f"others:{more}"] * (more > 0)) + "}"


def word(text: str) -> str:
    """The text as one word of at most 200 characters: a client may name its request by anything."""
    return replace_hidden(text[:_MOST_VALUE], lambda _char: "_").replace(" ", "_") or "-"


def trace_id(traceparent: str) -> str:
    """The id of the trace that the W3C's header names; empty if it names none."""
    named = _TRACEPARENT.fullmatch(traceparent)
    return named[1] if named is not None else ""


def _cause(text: str) -> str:
    # The reason stands at the beginning, what was made of it at the end.
    if len(text) > _MOST_CAUSE:
        half = _MOST_CAUSE // 2
        text = f"{text[:half]}...{text[-half:]}"
    return one_line(text) or "-"
