"""EncoderThreads: sound is encoded off the hub's loop, by a few threads, slice by slice.

A request has one slice at a time in work, so that all of them share the threads and none can fill them with one long
piece. While its slice waits, a request takes no more of its outputs, and its replica is paused as for a slow client.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from hub.api.audio.encoder import SLICE_BYTES, SoundFile
from hub.media import read_wav
from omni_discovery.errors import EngineFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_Made = TypeVar("_Made")

#: A second of sound takes at most some 10 ms to encode: two threads are enough for a hundred voices.
_THREADS: Final = 2
#: How long a slice may wait for a thread and take in it.
_SLICE_S: Final = 30.0


class EncoderThreads:
    """The threads of one hub. They start when they are first needed, and end with the process."""

    def __init__(self, threads: int = _THREADS, slice_s: float = _SLICE_S) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encoder")
        self._slice_s = slice_s

    async def encoded(self, sound: SoundFile, file: bytes) -> AsyncIterator[bytes]:
        """The bytes that become ready as a WAV file is added. Raise EngineFailedError."""
        kind, frames = await self._run(lambda: read_wav(file))
        for start in range(0, len(frames), SLICE_BYTES):
            made = await self._run(partial(sound.add, kind, frames[start : start + SLICE_BYTES]))
            if made:
                yield made

    async def finished(self, sound: SoundFile) -> bytes:
        """End the sound; return its last bytes. Raise EngineFailedError."""
        return await self._run(sound.finish)

    async def _run(self, work: Callable[[], _Made]) -> _Made:
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            async with asyncio.timeout(self._slice_s):
                return await running
        except TimeoutError as error:
            reason = f"a piece of sound was not encoded within {self._slice_s:g} s: this hub's host is overloaded"
            raise EngineFailedError(reason) from error
        except ImportError as error:
            raise EngineFailedError(f"to bring this sound to 24 kHz takes PyAV on the hub's host: {error}") from error
        except (ValueError, OSError) as error:
            # FFmpeg's errors are of these types.
            raise EngineFailedError(f"the sound can't be encoded: {error}") from error
