"""VoiceDetector: whether sound is voice, frame by frame, by WebRTC's voice activity detector.

It takes about a tenth of a millisecond for a second of sound, so that short pieces are looked at where they come.
"""

from __future__ import annotations

import importlib.util
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hub.api.realtime.listening import FRAME_BYTES

if TYPE_CHECKING:
    from hub.api.audio.threads import EncoderThreads

#: The rate that the library gets. It knows no 24 kHz; what it looks at lies below 4 kHz.
_RATE_HZ: Final = 48_000
#: The library's modes, from one that finds much voice to one that finds little.
_MODES: Final = 4
#: Beyond 4 s, sound is looked at by a thread.
_SHORT_BYTES: Final = 192_000

NO_DETECTOR: Final = (
    "voice detection needs webrtcvad on this hub's host (pip install webrtcvad-wheels); send null, and commit each turn"
)


def detector_missing() -> str:
    """Why there is no voice detection on this host; empty: there is."""
    return "" if importlib.util.find_spec("webrtcvad") is not None else NO_DETECTOR


class VoiceDetector:
    """The detector of one session, which remembers what it has heard."""

    def __init__(self, threads: EncoderThreads) -> None:
        import webrtcvad

        self._threads = threads
        self._vad: Any = webrtcvad.Vad()
        #: What is no whole frame yet.
        self._rest = b""

    def reset(self) -> None:
        """Begin anew: some sound was not shown to it."""
        self._rest = b""

    async def voiced(self, samples: bytes, threshold: float) -> list[bool]:
        """For each further frame of 20 ms that is whole with these samples, whether it is voice."""
        self._vad.set_mode(min(_MODES - 1, int(threshold * _MODES)))
        if len(samples) <= _SHORT_BYTES:
            return self._look(samples)
        return await self._threads.run(partial(self._look, samples))

    def _look(self, samples: bytes) -> list[bool]:
        heard = self._rest + samples
        whole = len(heard) - len(heard) % FRAME_BYTES
        self._rest = heard[whole:]
        return [
            bool(self._vad.is_speech(_doubled(heard[start : start + FRAME_BYTES]), _RATE_HZ))
            for start in range(0, whole, FRAME_BYTES)
        ]


def _doubled(frame: bytes) -> bytes:
    """Each sample twice: the same sound at twice the rate."""
    samples = array("h", frame)
    twice = array("h", bytes(2 * len(frame)))
    twice[0::2] = samples
    twice[1::2] = samples
    return twice.tobytes()
