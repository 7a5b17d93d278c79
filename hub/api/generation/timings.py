"""The timings of a request as a client gets them, in its answer and in the ``Server-Timing`` header. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Final

#: Characters of the Server-Timing header, and timings of one answer.
_MOST_HEADER: Final = 4000
_MOST_TIMINGS: Final = 256
#: Names that the Server-Timing header allows.
_TOKEN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def server_timing(timings_s: Mapping[str, float]) -> str:
    """The timings as the standard ``Server-Timing`` header has them: ``name;dur=milliseconds``.

    Those of the hub come first; what is beyond the length that clients and proxies take is left out.
    """
    shown = shown_timings(timings_s)
    names = [name for name in shown if "." not in name] + [name for name in shown if "." in name]
    text = ", ".join([f"{name};dur={1000 * shown[name]:.3f}" for name in names])
    return text if len(text) < _MOST_HEADER - 1 else text[: text.rindex(", ", 0, _MOST_HEADER)]


def shown_timings(timings_s: Mapping[str, float]) -> dict[str, float]:
    """The finite timings with names that a header may hold, sorted by name: 256 at most, the hub's own first of all."""
    # The names come from a replica: one with a line break would begin another header.
    is_token = _TOKEN.fullmatch
    names = sorted([name for name, seconds in timings_s.items() if isfinite(seconds) and is_token(name)])
    if len(names) > _MOST_TIMINGS:
        names = sorted(sorted(names, key=lambda name: "." in name)[:_MOST_TIMINGS])
    return {name: timings_s[name] for name in names}
