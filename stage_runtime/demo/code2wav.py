"""The vocoder of the speaking demo: the tokens of the talker become sound, block by block.

Each token is a frame of 20 ms. A small network over neighbouring frames tells pitch and spectrum; sines at multiples of
the pitch and shaped noise are the sound. Every block is computed in the same shapes whatever pieces the tokens come in,
and the noise is a table, so that the samples are a function of the tokens alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

RATE_HZ: Final = 16000
#: Samples of a frame.
HOP: Final = 320
#: Frames that the network sees before and after the one that it describes.
BEFORE: Final = 4
AFTER: Final = 2
#: Frames that are computed together.
BLOCK: Final = 5
BANDS: Final = 48
_CHANNELS: Final = 128
#: Enough for voices of 70 Hz up to 4.5 kHz; what is above is noise.
_HARMONICS: Final = 64
_LOWEST_HZ, _HIGHEST_HZ = 60.0, 280.0
_NOISE_FRAMES: Final = 64
_NOISE_SEED: Final = 5


class Code2Wav(nn.Module):
    """The network and what it drives. The code behind the last one of the codebook stands for silence."""

    noise: Tensor
    window: Tensor
    bin_places: Tensor

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.silence = codes
        self.embedding = nn.Embedding(codes + 1, 64)
        self.layers = nn.Sequential(
            *(nn.Conv1d(64, _CHANNELS, 3), nn.GELU()),
            *(nn.Conv1d(_CHANNELS, _CHANNELS, 3), nn.GELU()),
            *(nn.Conv1d(_CHANNELS, _CHANNELS, 3), nn.GELU()),
            nn.Conv1d(_CHANNELS, 1 + 2 * BANDS, 1),
        )
        turns = torch.rand((_NOISE_FRAMES, HOP + 1), generator=torch.Generator().manual_seed(_NOISE_SEED))
        self.register_buffer("noise", torch.polar(torch.ones_like(turns), 2 * torch.pi * turns), persistent=False)
        self.register_buffer("window", torch.hann_window(2 * HOP).sqrt(), persistent=False)
        bins_hz = torch.arange(HOP + 1) * (RATE_HZ / 2 / HOP)
        self.register_buffer("bin_places", _band_place(bins_hz), persistent=False)

    def describe(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of codes (batch, frames) with their neighbours: pitch in Hz (batch, frames), log spectra of tone and noise.

        The result has ``BEFORE`` + ``AFTER`` frames less than the codes.
        """
        made = self.layers(self.embedding(codes).transpose(1, 2)).transpose(1, 2)
        pitches = _LOWEST_HZ * (_HIGHEST_HZ / _LOWEST_HZ) ** torch.sigmoid(made[..., 0])
        return pitches, made[..., 1 : 1 + BANDS] - 5, made[..., 1 + BANDS :] - 5

    def tone(self, pitches: Tensor, spectra: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
        """The voiced part between the frames (batch, samples), and the phase behind it, in turns (batch, 1).

        ``pitches`` and ``spectra`` begin with the frame before the first one that sounds.
        """
        numbers = torch.arange(1, _HARMONICS + 1)
        places_hz = pitches[..., None] * numbers
        loud = _at(spectra, _band_place(places_hz)).exp() * (places_hz < RATE_HZ / 2)
        share = torch.arange(1, HOP + 1) / HOP
        moves = pitches[:, :-1, None] * (1 - share) + pitches[:, 1:, None] * share
        turns = phase + (moves.flatten(1).double() / RATE_HZ).cumsum(1)
        # (batch, frames, hop, harmonics), and between two frames the loudness moves from one to the other.
        waves = torch.sin(2 * torch.pi * (turns % 1).to(pitches.dtype).view(moves.shape)[..., None] * numbers)
        ends = waves @ torch.stack([loud[:, :-1], loud[:, 1:]], dim=-1)
        return (ends[..., 0] * (1 - share) + ends[..., 1] * share).flatten(1), turns[:, -1:] % 1

    def hiss(self, spectra: Tensor, first: int) -> Tensor:
        """The noise of each frame (batch, frames, two hops); ``first`` is the number of the first frame."""
        frames = spectra.shape[1]
        chosen = self.noise[torch.arange(first, first + frames) % _NOISE_FRAMES]
        loud = _at(spectra, self.bin_places.expand(*spectra.shape[:2], -1)).exp()
        made: Tensor = torch.fft.irfft(loud * chosen, 2 * HOP) * self.window * HOP**0.5
        return made


def _band_place(hz: Tensor) -> Tensor:
    """Where frequencies lie between the bands, which are even on the mel scale: 0 to ``BANDS`` - 1."""
    top = torch.log1p(torch.tensor(RATE_HZ / 2 / 700))
    return (torch.log1p(hz / 700) / top * (BANDS - 1)).clamp(0, BANDS - 1)


def _at(spectra: Tensor, places: Tensor) -> Tensor:
    low = places.floor().clamp_max(BANDS - 2)
    share = places - low
    index = low.long()
    return spectra.gather(-1, index) * (1 - share) + spectra.gather(-1, index + 1) * share


def overlapped(frames: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Frames of two hops (batch, frames, 2 * hop) laid over each other by one hop, and the tail of the last."""
    heads, tails = frames[..., :HOP], frames[..., HOP:]
    return (heads + torch.cat([tail[:, None], tails[:, :-1]], dim=1)).flatten(1), tails[:, -1]


class SpeechStream:
    """The sound of one sentence, block by block, as its codes come."""

    def __init__(self, model: Code2Wav) -> None:
        self._model = model
        #: The codes so far, behind those of the silence before them.
        self._codes = [model.silence] * (BEFORE + 1)
        self._made = 0
        self._phase = torch.zeros(1, 1, dtype=torch.float64)
        self._tail = torch.zeros(1, HOP)

    def add(self, codes: Sequence[int]) -> Iterator[Tensor]:
        """More codes; the blocks that they complete, each a row of samples from -1 to 1."""
        self._codes += codes
        while self._made + BLOCK + AFTER <= len(self._codes) - BEFORE - 1:
            yield self._block()

    def end(self) -> Iterator[Tensor]:
        """No more codes: the blocks that are left, the last one ending in silence."""
        left = len(self._codes) - BEFORE - 1 - self._made
        yield from self.add([self._model.silence] * (-left % BLOCK + AFTER))

    def _block(self) -> Tensor:
        window = self._codes[self._made : self._made + BEFORE + 1 + BLOCK + AFTER]
        pitches, tone, noise = self._model.describe(torch.tensor([window]))
        voiced, self._phase = self._model.tone(pitches, tone, self._phase)
        hiss, self._tail = overlapped(self._model.hiss(noise[:, 1:], self._made), self._tail)
        self._made += BLOCK
        return (voiced + hiss)[0].clamp(-1, 1)


class CodePiece(msgspec.Struct):
    """A piece of what the talker hands over."""

    token_ids: list[int]


class Sentence(msgspec.Struct):
    """The input of the vocoder."""

    pieces: AsyncIterator[CodePiece]


class Vocoder:
    """``engine: torch``: the target of the demo's last stage."""

    def __init__(self, model: str) -> None:
        folder = Path(model)
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=VocoderConfig)
        self._first = config.first_token
        self.model = Code2Wav(config.codes)
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        self.model.eval()
        # A block is too small for a second thread to be of use.
        torch.set_num_threads(1)

    async def __call__(self, sentence: Sentence) -> AsyncIterator[Tensor]:
        """Blocks of sound. Tokens that are no codes, such as the talker's end, are passed over."""
        speech = SpeechStream(self.model)
        async for piece in sentence.pieces:
            codes = [token - self._first for token in piece.token_ids]
            for block in speech.add([code for code in codes if 0 <= code < self.model.silence]):
                yield block
        for block in speech.end():
            yield block


class VocoderConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``config.json``: how many codes there are, and the talker's token that is the first of them."""

    codes: int
    first_token: int
