"""Sound is encoded off the loop, slice by slice, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading

import av
import pytest

from hub.api.audio.encoder import PCM16, SLICE_BYTES, SoundFile
from hub.api.audio.threads import EncoderThreads
from hub.api.exchange import Exchange, _current
from hub.media import wav_file
from omni_discovery.errors import EngineFailedError
from tests.support.hub_fakes import until
from tests.support.voice import vowel


class Slow(SoundFile):
    """Remembers its threads and slices; waits until it may go on."""

    def __init__(self) -> None:
        super().__init__("pcm16", is_streamed=True)
        self.seen: list[tuple[str, int]] = []
        self.go_on = threading.Event()

    def add(self, kind: object, frames: bytes) -> bytes:
        self.seen.append((threading.current_thread().name, len(frames)))
        self.go_on.wait(60.0)
        return frames


async def test_a_long_piece_is_encoded_in_slices_and_the_loop_goes_on() -> None:
    sound, made = Slow(), bytearray()

    async def encode() -> None:
        async for each in EncoderThreads().encoded(sound, wav_file(PCM16, bytes(2 * SLICE_BYTES + 10))):
            made.extend(each)

    encoding = asyncio.create_task(encode())
    # This test's loop turns while a thread is at work.
    await until(lambda: bool(sound.seen), 30.0)
    sound.go_on.set()
    await encoding
    assert [size for _, size in sound.seen] == [SLICE_BYTES, SLICE_BYTES, 10]
    assert all(name.startswith("encoder") for name, _ in sound.seen)
    assert len(made) == 2 * SLICE_BYTES + 10


async def test_speech_becomes_a_small_file_slice_by_slice() -> None:
    """Half a minute and a bit, as its listeners decode it; no sound at all is an empty file."""
    samples = vowel(30_100)
    file = await EncoderThreads().speech_file(samples)
    with av.open(io.BytesIO(file)) as container:
        (stream,) = container.streams.audio
        assert (stream.codec_context.name, container.format.name) in {("opus", "ogg"), ("libopus", "ogg")}
        length = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
    assert length == pytest.approx(30.1, abs=0.05)
    assert len(file) < len(samples) / 8
    assert await EncoderThreads().speech_file(b"") == b""


async def test_a_slice_that_takes_too_long_fails_its_request_and_says_why() -> None:
    sound = Slow()
    with pytest.raises(EngineFailedError, match="not encoded within"):
        async for _ in EncoderThreads(slice_s=0.2).encoded(sound, wav_file(PCM16, bytes(10))):
            pass
    sound.go_on.set()


@pytest.mark.attack("F4")
async def test_a_thread_that_is_past_its_time_is_replaced() -> None:
    """1. the one thread of a pool is lost to a slice; its request fails; 2. another request's sound is encoded
    3. of many such slices, only some get a thread more
    """
    stuck, threads = [Slow() for _ in range(7)], EncoderThreads(threads=1, slice_s=0.2)
    for sound in stuck[:1]:
        with pytest.raises(EngineFailedError, match="not encoded within"):
            await _all_of(threads, sound)
    threads._slice_s = 60.0
    assert await _all_of(threads, SoundFile("pcm16", is_streamed=True)) == bytes(10)
    threads._slice_s = 0.2
    for sound in stuck[1:]:
        with pytest.raises(EngineFailedError, match="not encoded within"):
            await _all_of(threads, sound)
    assert len(threads._late) == 5
    for sound in stuck:
        sound.go_on.set()
    threads._slice_s = 60.0
    assert await _all_of(threads, SoundFile("pcm16", is_streamed=True)) == bytes(10)


async def _all_of(threads: EncoderThreads, sound: SoundFile) -> bytes:
    return b"".join([made async for made in threads.encoded(sound, wav_file(PCM16, bytes(10)))])


async def test_what_is_no_sound_fails_its_request() -> None:
    with pytest.raises(EngineFailedError, match="no WAV file"):
        async for _ in EncoderThreads().encoded(Slow(), b"RIFF????"):
            pass


#: Ten minutes of sound, a tenth of a second at a time, and the growth of the process from the first minute on, in KiB.
TEN_MINUTES = """
import asyncio, resource, sys
from hub.api.audio.encoder import PCM16, SoundFile
from hub.api.audio.threads import EncoderThreads
from hub.api.exchange import Exchange, _current
from hub.media import wav_file

async def main(name):
    threads, sound, sent = EncoderThreads(), SoundFile(name, is_streamed=True), 0
    peaks = []
    for second in range(600):
        piece = bytes(range(256)) * 187 + bytes(128)
        async for made in threads.encoded(sound, wav_file(PCM16, piece)):
            sent += len(made)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    sent += len(await threads.finished(sound))
    print(sent, peaks[-1] - peaks[59])

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["flac", "pcm16"])
def test_ten_minutes_of_sound_cost_as_much_memory_as_one(name: str) -> None:
    command = [sys.executable, "-c", TEN_MINUTES, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    sent, growth_kib = map(int, done.stdout.split())
    assert sent > 2_000_000
    # The sound is 28 MB of samples.
    assert growth_kib < 2048


@pytest.mark.attack("Z74")
async def test_the_clients_have_turns_whatever_one_of_them_brings() -> None:
    """1. fifty sounds of one client wait for one thread, some are given up; 2. another client's is the next but one"""
    threads, done = EncoderThreads(threads=1), list[str]()

    async def encode(host: str) -> None:
        _current.set(Exchange(host=host))
        await threads.run(lambda: done.append(host))

    held = Slow()
    first = asyncio.create_task(threads.run(lambda: held.add(None, b"")))
    await until(lambda: bool(held.seen), 30.0)
    many = [asyncio.create_task(encode("10.0.0.1")) for _ in range(50)]
    await asyncio.sleep(0)
    for task in many[:10]:
        task.cancel()
    other = asyncio.create_task(encode("10.0.0.2"))
    await asyncio.sleep(0)
    held.go_on.set()
    await asyncio.gather(first, other)
    assert len(done) <= 2
    await asyncio.gather(*many, return_exceptions=True)
    assert done.count("10.0.0.1") == 40
    assert threads._turns._free == 1
