"""What a session has heard and not yet taken as a turn; and where, by voice detection, turns begin and end. Pure.

Whether 20 ms of sound are voice is the detector's word. Speech begins when enough of the last 160 ms is voice, and ends
when that has not been so for as long as the client wants. Moments are milliseconds since the session's first sound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hub.api.realtime.conversation import BYTES_PER_MS
from hub.api.realtime.schema import TurnDetection

#: The length of what is voice or not, and how many of them decide.
FRAME_MS: Final = 20
FRAME_BYTES: Final = FRAME_MS * BYTES_PER_MS
_WINDOW: Final = 8


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Speech has begun, with what is kept of the sound before."""

    start_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """Speech has ended; these are its samples."""

    end_ms: int
    samples: bytes


class Listening:
    """The buffer of one session; ``max_ms``: the longest turn."""

    def __init__(self, max_ms: int) -> None:
        self._max_bytes = max_ms * BYTES_PER_MS
        self._buffer = bytearray()
        #: Where the buffer begins, and how far the detector has listened, in bytes of all sound.
        self._begin = self._looked = 0
        #: Whether each of the latest frames was voice.
        self._window: deque[bool] = deque(maxlen=_WINDOW)
        self.is_speaking = False
        #: When speech was last certain, in bytes.
        self._certain = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of sound that are kept."""
        return len(self._buffer)

    def room_bytes(self) -> int:
        """Bytes that still fit into this turn."""
        return self._max_bytes - len(self._buffer)

    def add(self, samples: bytes) -> None:
        """Take sound in, of which nothing is looked at: the client says where its turns end."""
        self._buffer += samples
        self._looked = self._begin + len(self._buffer)

    def hear(
        self, samples: bytes, voiced: Sequence[bool], detection: TurnDetection
    ) -> list[SpeechStarted | SpeechStopped]:
        """Take sound in, and what the detector says of the next frames; return what has begun and ended.

        The detector gets the sound in whole frames: what it says may be of a frame that began in an earlier piece.
        """
        self._buffer += samples
        found: list[SpeechStarted | SpeechStopped] = []
        for is_voice in voiced:
            self._looked = min(self._looked + FRAME_BYTES, self._begin + len(self._buffer))
            self._window.append(is_voice)
            change = self._change(detection)
            if change is not None:
                found.append(change)
        if not self.is_speaking:
            self._forget(self._looked - (detection.prefix_padding_ms + _WINDOW * FRAME_MS) * BYTES_PER_MS)
        return found

    def _change(self, detection: TurnDetection) -> SpeechStarted | SpeechStopped | None:
        needed = max(1, math.ceil(detection.threshold * _WINDOW))
        count = sum(self._window)
        if not self.is_speaking:
            if count < needed:
                return None
            self.is_speaking, self._certain = True, self._looked
            first = self._looked - (len(self._window) - self._window.index(True)) * FRAME_BYTES
            self._forget(first - detection.prefix_padding_ms * BYTES_PER_MS)
            return SpeechStarted(self._begin // BYTES_PER_MS)
        # It takes less to go on than to begin: speech has pauses.
        if self._window[-1] and count >= max(1, needed // 2):
            self._certain = self._looked
        silence_ms = (self._looked - self._certain) // BYTES_PER_MS
        is_full = self._looked - self._begin >= self._max_bytes
        if silence_ms < detection.silence_duration_ms and not is_full:
            return None
        return SpeechStopped(self._looked // BYTES_PER_MS, self._take(self._looked))

    def take_all(self) -> bytes:
        """End the turn, and return its samples."""
        return self._take(self._begin + len(self._buffer))

    def clear(self) -> None:
        """Forget the sound. Idempotent."""
        self.take_all()

    def forget_speech(self) -> None:
        """Go on as if no speech had begun; the sound stays."""
        self.is_speaking = False
        self._window.clear()
        self._looked = self._begin + len(self._buffer)

    def _take(self, end: int) -> bytes:
        size = end - self._begin
        samples = bytes(self._buffer[:size])
        self._forget(end)
        self.is_speaking = False
        self._window.clear()
        self._looked = max(self._looked, self._begin)
        return samples

    def _forget(self, end: int) -> None:
        """Drop the sound before this place."""
        size = max(0, end - self._begin)
        # Whole samples.
        size -= size % 2
        del self._buffer[:size]
        self._begin += size
