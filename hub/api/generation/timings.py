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
    parts: list[str] = []
    left = _MOST_HEADER
    for name, seconds in sorted(shown_timings(timings_s).items(), key=lambda each: "." in each[0]):
        part = f"{name};dur={1000 * seconds:.3f}"
        left -= len(part) + 2
        if left < 0:
            break
        parts.append(part)
    return ", ".join(parts)


def shown_timings(timings_s: Mapping[str, float]) -> dict[str, float]:
    """The finite timings with names that a header may hold, sorted by name: 256 at most, the hub's own first of all."""
    # The names come from a replica: one with a line break would begin another header.
    names = [name for name in sorted(timings_s) if _TOKEN.fullmatch(name) and isfinite(timings_s[name])]
    if len(names) > _MOST_TIMINGS:
        names = sorted(sorted(names, key=lambda name: "." in name)[:_MOST_TIMINGS])
    return {name: timings_s[name] for name in names}
