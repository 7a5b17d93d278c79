"""Sounds for voice detectors, made of arithmetic: a vowel that sounds like one, silence, and noise."""

from __future__ import annotations

import numpy as np

RATE_HZ = 24_000
#: The resonances of an open vowel: their frequencies and widths.
_FORMANTS = ((700, 110), (1200, 120), (2600, 160))


def vowel(length_ms: int, pitch_hz: float = 120.0) -> bytes:
    """A vowel: the harmonics of a voice, as loud as the resonances of a mouth make them, in syllables of 250 ms."""
    seconds = np.arange(length_ms * RATE_HZ // 1000) / RATE_HZ
    phase = 2 * np.pi * np.cumsum(pitch_hz * (1 + 0.05 * np.sin(2 * np.pi * 3 * seconds))) / RATE_HZ
    wave = np.zeros(len(seconds))
    for number in range(1, int(4000 / pitch_hz)):
        loudness = sum(1 / (1 + ((number * pitch_hz - at) / width) ** 2) for at, width in _FORMANTS)
        wave += loudness / number**0.5 * np.sin(number * phase)
    wave *= np.clip(0.6 + 0.4 * np.sin(2 * np.pi * 4 * seconds), 0.2, 1)
    return _samples(12_000 * wave / np.max(np.abs(wave)))


def silence(length_ms: int) -> bytes:
    """Nothing."""
    return bytes(2 * (length_ms * RATE_HZ // 1000))


def hiss(length_ms: int, loudness: float = 40.0) -> bytes:
    """The noise of a microphone."""
    return _samples(np.random.default_rng(1).normal(0, loudness, length_ms * RATE_HZ // 1000))


def _samples(wave: np.ndarray) -> bytes:
    return np.asarray(wave).astype("<i2").tobytes()
