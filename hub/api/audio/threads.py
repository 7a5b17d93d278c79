"""EncoderThreads: sound is encoded off the hub's loop, by a few threads, slice by slice.

A request has one slice at a time in work, so that all of them share the threads and none can fill them with one long
piece. The clients have turns, however many requests or sessions one has. While its slice waits, a request takes no more
of its outputs, and its replica is paused as for a slow client.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hub.api.audio.encoder import SLICE_BYTES, SoundFile, SpeechFile
from hub.api.exchange import client_name, current_exchange
from hub.api.long_bodies import ClientTurns
from hub.media import read_wav
from omni_discovery.errors import EngineFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_Made = TypeVar("_Made")

#: A second of sound takes at most some 10 ms to encode: two threads are enough for a hundred voices.
_THREADS: Final = 2
#: How long a slice may wait for a thread and take in it.
_SLICE_S: Final = 30.0
#: How many threads may be past their time and still at work before others are no longer started in their place.
_MOST_LATE: Final = 4


class EncoderThreads:
    """The threads of one hub. They start when they are first needed, and end with the process."""

    def __init__(self, threads: int = _THREADS, slice_s: float = _SLICE_S) -> None:
        self._threads, self._slice_s = threads, slice_s
        self._pool = self._new_pool()
        self._turns = ClientTurns(threads)
        #: Slices that nobody waits for any more, while a thread is still at work on them.
        self._late: set[Future[Any]] = set()

    async def encoded(self, sound: SoundFile, file: bytes) -> AsyncIterator[bytes]:
        """For each slice of a WAV file, the bytes that are ready then; it may be none. Raise EngineFailedError."""
        kind, frames = await self.run(lambda: read_wav(file))
        step = sound.slice_bytes(kind)
        for start in range(0, len(frames), step):
            yield await self.run(partial(sound.add, kind, frames[start : start + step]))

    async def finished(self, sound: SoundFile) -> bytes:
        """End the sound; return its last bytes. Raise EngineFailedError."""
        return await self.run(sound.finish)

    async def speech_file(self, samples: bytes) -> bytes:
        """Samples of PCM16 as one small file, see SpeechFile. Raise EngineFailedError."""
        file = SpeechFile()
        slices = (samples[start : start + SLICE_BYTES] for start in range(0, len(samples), SLICE_BYTES))
        made = [await self.run(partial(file.add, each)) for each in slices]
        return b"".join([*made, await self.run(file.finish)])

    async def run(self, work: Callable[[], _Made]) -> _Made:
        """What a piece of work returns. Raise EngineFailedError if it fails or takes too long."""
        running: Future[_Made] | None = None
        exchange = current_exchange()
        try:
            async with asyncio.timeout(self._slice_s), self._turns.turn(client_name(exchange.key, exchange.host)):
                running = self._pool.submit(work)
                return await asyncio.wrap_future(running)
        except TimeoutError as error:
            if running is not None:
                self._give_up(running)
            reason = f"a piece of sound was not encoded within {self._slice_s:g} s: this hub's host is overloaded"
            raise EngineFailedError(reason) from error
        except ImportError as error:
            raise EngineFailedError(f"to encode this sound takes PyAV on the hub's host: {error}") from error
        except (ValueError, OSError) as error:
            # FFmpeg's errors are of these types.
            raise EngineFailedError(f"the sound can't be encoded: {error}") from error

    def _give_up(self, running: Future[Any]) -> None:
        """Leave a thread that does not end to its slice, and start others for the slices of other requests."""
        # A thread can't be stopped; a slice that no thread had begun was taken back.
        self._late = {each for each in (*self._late, running) if not each.done()}
        if running in self._late and len(self._late) <= _MOST_LATE:
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, thread_name_prefix="encoder")
