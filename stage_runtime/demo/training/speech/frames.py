"""What the codec knows of a frame of speech: pitch, loudness and spectrum; and the codebook made of them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stage_runtime.demo.code2wav import HOP, RATE_HZ

#: Two and a half periods of the lowest pitch.
_WINDOW: Final = 640
_FFT: Final = 1024
_LOWEST_HZ, _HIGHEST_HZ = 65.0, 260.0
#: How alike a frame and itself one period later are, for the frame to count as voiced.
_VOICED: Final = 0.6
_SILENCE: Final = 1e-4
MELS: Final = 40
_CEPSTRA: Final = 18

Samples = np.ndarray[Any, np.dtype[np.int16]]


def as_floats(samples: Samples) -> Tensor:
    """Samples from -1 to 1, cut to whole frames, without what is silent at the end but for three frames."""
    sound = torch.from_numpy(samples.astype(np.float32) / 32768)
    sound = sound[: len(sound) // HOP * HOP]
    loud = (sound.reshape(-1, HOP).square().mean(1) > _SILENCE**2).nonzero()
    return sound[: (int(loud[-1]) + 4) * HOP] if len(loud) else sound


def mel_bank(bands: int, bins: int, low_hz: float = 60.0) -> Tensor:
    """Triangles (bands, bins) that are even on the mel scale, from ``low_hz`` to half the sample rate."""
    edges = np.linspace(1127 * np.log1p(low_hz / 700), 1127 * np.log1p(RATE_HZ / 2 / 700), bands + 2)
    edges_hz = 700 * np.expm1(edges / 1127)
    bins_hz = np.linspace(0, RATE_HZ / 2, bins)
    up = (bins_hz - edges_hz[:-2, None]) / (edges_hz[1:-1] - edges_hz[:-2])[:, None]
    down = (edges_hz[2:, None] - bins_hz) / (edges_hz[2:] - edges_hz[1:-1])[:, None]
    return torch.from_numpy(np.clip(np.minimum(up, down), 0, None)).float()


_BANK: Final = mel_bank(MELS, _FFT // 2 + 1)
_PLACES: Final = torch.arange(MELS) + 0.5
_COSINES: Final = torch.cos(torch.pi / MELS * torch.arange(_CEPSTRA)[:, None] * _PLACES) * (2 / MELS) ** 0.5


def log_mel(sound: Tensor, hop: int = HOP) -> Tensor:
    """The spectrum of each frame (frames, bands), as the logarithm of the magnitude."""
    padded = functional.pad(sound, ((_WINDOW - hop) // 2, (_WINDOW - hop) // 2))
    frames = padded.unfold(0, _WINDOW, hop) * torch.hann_window(_WINDOW)
    return torch.log(torch.fft.rfft(frames, _FFT).abs() @ _BANK.T + 1e-3)


def pitch(sound: Tensor) -> Tensor:
    """The pitch of each frame in Hz, 0 where it is unvoiced."""
    padded = functional.pad(sound, ((_WINDOW - HOP) // 2, (_WINDOW - HOP) // 2))
    frames = padded.unfold(0, _WINDOW, HOP)
    power = torch.fft.rfft(frames, 2 * _FFT).abs().square()
    likeness = torch.fft.irfft(power)[:, : _FFT // 2]
    # The later part of a frame is what is left to be compared with.
    energy = frames.square()
    total = energy.sum(1, keepdim=True)
    head, tail = total - _later(energy), total - _earlier(energy)
    likeness /= (head * tail).sqrt()[:, : _FFT // 2] + 1e-6
    first, last = int(RATE_HZ / _HIGHEST_HZ), int(RATE_HZ / _LOWEST_HZ)
    before, here, after = likeness[:, first - 1 : last - 1], likeness[:, first:last], likeness[:, first + 1 : last + 1]
    highest = here.max(1, keepdim=True).values
    # The first peak that is nearly the highest: a later one is a multiple of the period.
    peaks = (here > 0.9 * highest) & (before <= here) & (here >= after) & (highest > _VOICED)
    lag = peaks.float().argmax(1, keepdim=True)
    bend = (before - 2 * here + after).clamp_max(-1e-6)
    lags = (first + lag + (0.5 * (before - after) / bend).gather(1, lag))[:, 0]
    pitches = torch.where(peaks.any(1), RATE_HZ / lags, torch.zeros_like(lags))
    pitches[frames.square().mean(1) < (10 * _SILENCE) ** 2] = 0
    return _without_jumps(pitches)


def _later(energy: Tensor) -> Tensor:
    """By lag: the energy of the last so many samples, which have nothing to be compared with."""
    sums = energy.flip(1).cumsum(1)
    return torch.cat([torch.zeros(len(energy), 1), sums[:, :-1]], dim=1)


def _earlier(energy: Tensor) -> Tensor:
    sums = energy.cumsum(1)
    return torch.cat([torch.zeros(len(energy), 1), sums[:, :-1]], dim=1)


def _without_jumps(pitches: Tensor) -> Tensor:
    """The median over three frames: a single odd one goes."""
    padded = functional.pad(pitches[None], (1, 1), mode="replicate")[0]
    return padded.unfold(0, 3, 1).median(1).values


def describe(sound: Tensor) -> tuple[Tensor, Tensor]:
    """Of each frame: what the codebook compares (frames, numbers), and its pitch in Hz."""
    mels, pitches = log_mel(sound), pitch(sound)
    cepstra = mels @ _COSINES.T
    cepstra[:, 0] *= 0.3  # loudness, which would drown the rest
    is_voiced = (pitches > 0).float()
    tone = torch.where(pitches > 0, torch.log(pitches.clamp_min(1) / 100), torch.zeros_like(pitches))
    # Pitch is heard to a percent, and a voiced frame must not become an unvoiced one.
    return torch.cat([cepstra, 12 * tone[:, None], 3 * is_voiced[:, None]], dim=1), pitches
