"""What a replica tells its supervisor: lines among those that it prints, which the supervisor keeps to itself.

They travel with the output because there is one pipe for it already, whichever way a replica was started, and because
they then come before the end of the process, always.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_discovery.text import one_line

#: No text has it. What stands before it in its line was left unfinished by somebody else.
_MARK: Final = b"\x00omni "
_STDOUT: Final = 1
#: A write of this many bytes or fewer is never torn apart by another one.
_MOST_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class IsUp:
    """It takes requests from now on."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """It is about to end, and this is why."""

    reason: str


Tiding = IsUp | LastWords
Tell = Callable[[Tiding], None]


def tell(tiding: Tiding) -> None:
    """Tell the supervisor; if it can't be told, it will find out in time."""
    match tiding:
        case IsUp():
            content = b"up"
        case LastWords(reason):
            content = b"end " + one_line(reason).encode("utf-8", "replace")
    with contextlib.suppress(OSError):
        os.write(_STDOUT, _MARK + content[: _MOST_BYTES - len(_MARK) - 1] + b"\n")


def tell_nobody(tiding: Tiding) -> None:
    """For a replica without a supervisor."""


def read(line: bytes) -> tuple[bytes, Tiding | None]:
    """What of a line is to be printed, and what is told by the rest of it; an unknown word tells nothing."""
    printed, mark, told = line.partition(_MARK)
    if not mark:
        return line, None
    word, _, text = told.partition(b" ")
    match word:
        case b"up":
            return printed, IsUp()
        case b"end":
            return printed, LastWords(text.decode("utf-8", "replace"))
        case _:
            return printed, None
