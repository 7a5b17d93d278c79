"""Encoders of sound: whatever comes in pieces is one file that players read, at the right length and pitch."""

from __future__ import annotations

import io
import math
import struct
import wave
from collections.abc import Iterator

import av
import numpy as np
import pytest

from hub.api.audio.encoder import FORMATS, PCM16, SLICE_BYTES, SoundFile, check_sound
from hub.media import SoundKind
from omni_discovery.errors import EngineFailedError, InvalidRequestError
from omni_discovery.inputs.sounds import LEAST_RATE_HZ, MOST_RATE_HZ

TONE_HZ = 440


def tone(kind: SoundKind, seconds: float) -> bytes:
    """A tone in the samples of this kind."""
    frames = bytearray()
    for number in range(round(kind.rate_hz * seconds)):
        value = round(9000 * math.sin(2 * math.pi * TONE_HZ * number / kind.rate_hz))
        sample = struct.pack("<i", value << 16)[4 - kind.width_bytes :]
        if kind.width_bytes == 1:
            sample = bytes((sample[0] ^ 0x80,))
        frames += sample * kind.channels
    return bytes(frames)


def encode(name: str, kind: SoundKind, frames: bytes, speed: float = 1.0, *, streamed: bool = True) -> bytes:
    """The file of these frames, given in uneven pieces."""
    file, made = SoundFile(name, speed, is_streamed=streamed), b""
    step = 777 * kind.channels * kind.width_bytes
    for start in range(0, len(frames), step):
        made += file.add(kind, frames[start : start + step])
    return made + file.finish()


def heard(name: str, file: bytes) -> tuple[float, float]:
    """Seconds and pitch of what a player makes of a file."""
    if name == "pcm16":
        samples, rate_hz = np.frombuffer(file, "<i2").astype(float), PCM16.rate_hz
    else:
        pieces = list(_decoded(file))
        samples, rate_hz = np.concatenate([each for each, _ in pieces]), pieces[0][1]
    strongest = int(np.argmax(np.abs(np.fft.rfft(samples))))
    return len(samples) / rate_hz, strongest * rate_hz / len(samples)


def _decoded(file: bytes) -> Iterator[tuple[np.ndarray, int]]:
    with av.open(io.BytesIO(file)) as container:
        resampler = av.AudioResampler(format="flt", layout="mono")
        for frame in container.decode(audio=0):
            for each in resampler.resample(frame):
                yield each.to_ndarray()[0], each.sample_rate


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "kind", [PCM16, SoundKind(2, 3, 44_100), SoundKind(1, 1, 8000), SoundKind(2, 4, 7000)], ids=str
)
def test_every_format_plays_as_it_was_said(name: str, kind: SoundKind) -> None:
    seconds, pitch_hz = heard(name, encode(name, kind, tone(kind, 1.0)))
    assert seconds == pytest.approx(1.0, abs=0.4)
    assert pitch_hz == pytest.approx(TONE_HZ, rel=0.02)


@pytest.mark.parametrize("speed", [0.25, 0.6, 1.5, 4.0])
@pytest.mark.parametrize("name", ["wav", "pcm16", "mp3"])
def test_speed_changes_the_length_and_not_the_pitch(name: str, speed: float) -> None:
    seconds, pitch_hz = heard(name, encode(name, PCM16, tone(PCM16, 3.0), speed))
    assert seconds * speed == pytest.approx(3.0, rel=0.1)
    assert pitch_hz == pytest.approx(TONE_HZ, rel=0.02)


def test_raw_samples_and_wav_are_the_samples_themselves() -> None:
    frames = tone(PCM16, 0.1)
    assert encode("pcm16", PCM16, frames) == frames
    for streamed in (True, False):
        with wave.open(io.BytesIO(encode("wav", PCM16, frames, streamed=streamed))) as reader:
            length = len(frames) // 2
            assert reader.readframes(length + 1) == frames
            # A stream can't say how long it will be.
            assert (reader.getnframes() == length) is not streamed


@pytest.mark.parametrize("name", ["mp3", "opus", "aac", "flac", "pcm16", "wav"])
def test_a_stream_leaves_as_it_is_made(name: str) -> None:
    """After two of four seconds, the client has about half of the file, at least a third."""
    file, second = SoundFile(name, is_streamed=True), tone(PCM16, 1.0)
    halves = [b"".join(file.add(PCM16, second) for _ in range(2)) for _ in range(2)]
    rest = file.finish()
    assert len(halves[0]) > (sum(map(len, halves)) + len(rest)) / 3


def test_nothing_makes_no_file_and_pieces_of_two_kinds_are_refused() -> None:
    assert SoundFile("mp3", is_streamed=True).finish() == b""
    file = SoundFile("wav", is_streamed=False)
    file.add(PCM16, bytes(4))
    with pytest.raises(EngineFailedError, match="several sample rates"):
        file.add(SoundKind(1, 2, 8000), bytes(4))
    with pytest.raises(EngineFailedError, match="6 channels"):
        SoundFile("mp3", is_streamed=True).add(SoundKind(6, 2, 8000), bytes(12))


@pytest.mark.attack("F4")
@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("name", FORMATS)
def test_a_slice_holds_whole_frames_and_stays_small_whatever_it_becomes(name: str, speed: float) -> None:
    """Of the lowest and the highest rate that pass the door: encoded in every format, few bytes in and few out."""
    for rate_hz, channels, width in ((LEAST_RATE_HZ, 1, 1), (LEAST_RATE_HZ, 2, 4), (MOST_RATE_HZ, 2, 3)):
        kind = SoundKind(channels, width, rate_hz)
        file = SoundFile(name, speed, is_streamed=True)
        size_bytes = file.slice_bytes(kind)
        assert 0 < size_bytes <= SLICE_BYTES
        assert size_bytes % (channels * width) == 0
        made = [len(file.add(kind, bytes(size_bytes))) for _ in range(2)]
        assert max(made) <= 1.5 * SLICE_BYTES
        assert file.size_bytes == sum(made)
        # FFmpeg holds back a slice for each step that it takes.
        assert len(file.finish()) <= 2.5 * SLICE_BYTES


def test_a_file_that_is_held_until_its_end_counts_from_the_beginning() -> None:
    file = SoundFile("wav", 0.5, is_streamed=False)
    assert [file.add(PCM16, bytes(PCM16.rate_hz * 2)) for _ in range(3)] == [b""] * 3
    held = file.size_bytes
    assert 4 * PCM16.rate_hz < held <= len(file.finish())


def test_an_unknown_format_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequestError, match=r"'audio.format' is 'midi'; there are wav, pcm16, mp3"):
        check_sound("midi", "audio.format")


def test_without_the_library_a_host_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    check_sound("wav", "audio.format")
    check_sound("pcm16", "audio.format")
    with pytest.raises(InvalidRequestError, match="pip install av"):
        check_sound("mp3", "audio.format")
    with pytest.raises(InvalidRequestError, match="'speed' 2 needs PyAV"):
        check_sound("wav", "response_format", 2.0)
