"""WAV files of replicas: what their headers may say."""

from __future__ import annotations

import struct

import pytest

from hub.media import SoundKind, read_wav, wav_file
from omni_discovery.errors import EngineFailedError


def odd_file(rate_hz: int, bits: int = 16) -> bytes:
    """A WAV file of two samples whose header says so."""
    frame_bytes = bits // 8
    form = struct.pack("<HHIIHH", 1, 1, rate_hz, rate_hz * frame_bytes & 0xFFFFFFFF, frame_bytes, bits)
    rest = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", 4) + bytes(4)
    return b"RIFF" + struct.pack("<I", len(rest)) + rest


@pytest.mark.attack("F4")
@pytest.mark.parametrize("rate_hz", [0, 1, 10, 3999, 384_001, (1 << 31) - 1, (1 << 32) - 1])
def test_sample_rates_that_nobody_hears_are_the_replicas_error(rate_hz: int) -> None:
    with pytest.raises(EngineFailedError, match=r"sample rate of .* Hz: 4000 to 384000 can be played"):
        read_wav(odd_file(rate_hz))


@pytest.mark.attack("F4")
@pytest.mark.parametrize("bits", [40, 64, 65_528])
def test_samples_that_are_too_wide_are_the_replicas_error(bits: int) -> None:
    with pytest.raises(EngineFailedError, match=f"samples of {bits} bits: up to 32"):
        read_wav(odd_file(24_000, bits))


@pytest.mark.parametrize("kind", [SoundKind(1, 1, 4000), SoundKind(2, 4, 384_000)], ids=str)
def test_all_others_are_read(kind: SoundKind) -> None:
    assert read_wav(wav_file(kind, bytes(16))) == (kind, bytes(16))
