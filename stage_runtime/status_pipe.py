"""Status messages from a replica to its supervisor, as marked lines in what the replica prints.

They share the replica's output because that pipe exists however the replica was started, and because a message then
reaches the supervisor before the end of the process does.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from omni_discovery.metrics.samples import ReplicaSample, decode_sample, encode_sample
from omni_discovery.text import one_line

#: In no text. Output before it in a line is an unfinished line of another thread or library.
_MARK: Final = b"\x00omni "
_STDOUT: Final = 1
_NAME: Final = re.compile(rb"\d+/\d+")
#: A text is cut to so many bytes with its mark.
_MOST_BYTES: Final = 512
#: Linux never interleaves a write of at most this many bytes (PIPE_BUF) with another one.
_MOST_SAMPLE_BYTES: Final = 4096
#: Hubs that a sample too long for that names, those with the most credits; and the name of the rest, which no hub has.
_MOST_HUBS: Final = 16
_OTHER_HUBS: Final = "(others)"


@dataclass(frozen=True, slots=True)
class Up:
    """The replica takes requests from now on."""


@dataclass(frozen=True, slots=True)
class Exiting:
    """The replica is about to end because of ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Registered:
    """The replica has a name from now on, ``<stage>/<replica id>``; it may get another one later.

    ``epoch``, its life under that name, stays in its process: the supervisor is told the name alone.
    """

    name: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the replica is with its start."""

    phase: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """The state of the replica at one moment, for metrics."""

    sample: ReplicaSample


StatusMessage = Up | Exiting | Registered | Loading | Sampled
WriteStatus = Callable[[StatusMessage], None]


def write_status(message: StatusMessage) -> None:
    """Write a message to standard output. Does nothing if the supervisor has closed the pipe.

    A reason is cut, and a long sample has fewer details. Raise ValueError for one that is too long without them.
    """
    match message:
        case Up():
            content = b"up"
        case Exiting(reason):
            content = _cut(b"end " + one_line(reason).encode("utf-8", "replace"))
        case Registered(name):
            content = b"name " + name.encode()
        case Loading(phase):
            content = _cut(b"phase " + one_line(phase).encode("utf-8", "replace"))
        case Sampled(sample):
            content = _fitting(sample)
    with contextlib.suppress(OSError):
        os.write(_STDOUT, _MARK + content + b"\n")


def _fitting(sample: ReplicaSample) -> bytes:
    for shorter in _ever_shorter(sample):
        content = b"sample " + encode_sample(shorter)
        if len(_MARK) + len(content) + 1 <= _MOST_SAMPLE_BYTES:
            return content
    raise ValueError(f"a sample of {len(content)} bytes is too long for one line of {_MOST_SAMPLE_BYTES}")


def _ever_shorter(sample: ReplicaSample) -> Iterator[ReplicaSample]:
    yield sample
    # Each hub makes it longer, and there may be any number.
    yield replace(sample, credits_by_hub=_with_most(sample.credits_by_hub))
    yield replace(sample, credits_by_hub={})
    yield replace(sample, credits_by_hub={}, engine={})


def _with_most(credits_by_hub: Mapping[str, int]) -> dict[str, int]:
    by_count = sorted(credits_by_hub.items(), key=lambda each: -each[1])
    left_out = by_count[_MOST_HUBS:]
    others = {_OTHER_HUBS: sum(count for _, count in left_out)} if left_out else {}
    return {**dict(by_count[:_MOST_HUBS]), **others}


def _cut(content: bytes) -> bytes:
    return content[: _MOST_BYTES - len(_MARK) - 1]


def no_status(message: StatusMessage) -> None:
    """Write nothing: for a replica without a supervisor."""


def split_line(line: bytes) -> tuple[bytes, StatusMessage | None]:
    """Split one output line into (text to print, status message or None). Unknown messages are dropped."""
    printed, mark, message = line.partition(_MARK)
    if not mark:
        return line, None
    word, _, text = message.partition(b" ")
    match word:
        case b"up":
            return printed, Up()
        case b"end":
            return printed, Exiting(text.decode("utf-8", "replace"))
        case b"name" if _NAME.fullmatch(text):
            return printed, Registered(text.decode())
        case b"phase":
            return printed, Loading(text.decode("utf-8", "replace"))
        case b"sample" if isinstance(sample := decode_sample(text), ReplicaSample):
            return printed, Sampled(sample)
        case _:
            return printed, None
