"""Tells which words are spoken. It learns from espeak-ng's speech alone, in many voices, never from the demo's models.

Numbers stand in its lessons in sentences of the demo and in rows without sense, so that it hears each word by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stage_runtime.demo.training.speech.espeak import DEMO_VOICE, Voice, speak_all
from stage_runtime.demo.training.speech.frames import MELS, as_floats, log_mel
from stage_runtime.demo.training.speech.sentences import WORDS, all_spoken, any_answer, spoken

_SEED: Final = 53
_SENTENCES: Final = 2500
_ROUNDS: Final = 16
_BATCH: Final = 32
#: Every 10 ms.
_HOP: Final = 160
_CHANNELS: Final = 128
_LANGUAGES: Final = ("en-us", "en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029")
_VARIANTS: Final = ("", "", *(f"+m{n}" for n in range(1, 8)), *(f"+f{n}" for n in range(1, 5)))


class Recogniser(nn.Module):
    """Convolutions over 0.8 seconds of speech, and a word or none for every 40 ms (CTC)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((MELS, 2, 1), (_CHANNELS, 2, 1), (_CHANNELS, 1, 1), (_CHANNELS, 1, 2), (_CHANNELS, 1, 1))
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv1d(size, _CHANNELS, 5, stride=stride, padding=2 * apart, dilation=apart),
                    nn.BatchNorm1d(_CHANNELS),
                    nn.ReLU(),
                    nn.Dropout(0.1),
                )
                for size, stride, apart in sizes
            ),
            nn.Conv1d(_CHANNELS, len(WORDS) + 1, 1),
        )

    def forward(self, mels: Tensor) -> Tensor:
        """Of spectra (batch, frames, bands): how likely each word is, 0 being none (batch, frames / 4, words + 1)."""
        return functional.log_softmax(self.layers(mels.transpose(1, 2)).transpose(1, 2), dim=-1)

    @torch.no_grad()
    def sentence(self, sound: Tensor, sentences: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """The sentence that a sound, with samples from -1 to 1, most likely is."""
        likely = self(_heard(sound)[None]).transpose(0, 1).expand(-1, len(sentences), -1)
        targets = [_targets(words) for words in sentences]
        lengths = torch.tensor([len(each) for each in targets])
        frames = torch.full((len(targets),), len(likely))
        losses = functional.ctc_loss(likely, torch.cat(targets), frames, lengths, reduction="none")
        return sentences[int(losses.argmin())]


def _targets(words: Sequence[str]) -> Tensor:
    return torch.tensor([WORDS.index(word) + 1 for word in words])


def _heard(sound: Tensor) -> Tensor:
    mels = log_mel(functional.pad(sound, (_HOP * 10, _HOP * 10)), _HOP)
    return mels - mels.mean()


def _any_voice(rng: random.Random) -> Voice:
    if rng.random() < 0.25:
        return DEMO_VOICE
    return Voice(rng.choice(_LANGUAGES) + rng.choice(_VARIANTS), rng.randint(140, 190), rng.randint(30, 70))


def _any_words(rng: random.Random) -> tuple[str, ...]:
    if rng.random() < 0.5:
        return spoken(any_answer(rng).text)
    return tuple(rng.choices(WORDS, k=rng.randint(3, 6)))


def lessons() -> tuple[list[tuple[str, ...]], list[Tensor]]:
    """The words of each sentence to learn from, and its sound."""
    rng = random.Random(_SEED)
    said = [_any_words(rng) for _ in range(_SENTENCES)]
    return said, [as_floats(sound) for sound in speak_all(said, [_any_voice(rng) for _ in said])]


def train_recogniser() -> Recogniser:
    """Have espeak-ng speak, and learn from that. A few minutes on one core."""
    said, sounds = lessons()
    torch.manual_seed(_SEED)
    model = Recogniser()
    heard = [_heard(sound) for sound in sounds]
    targets = [_targets(words) for words in said]
    steps = _ROUNDS * (len(heard) // _BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    rng = np.random.default_rng(_SEED)
    for number in range(_ROUNDS):
        order = rng.permutation(len(heard))[: len(heard) // _BATCH * _BATCH].reshape(-1, _BATCH)
        losses: list[float] = []
        for row in order:
            losses.append(_learn(model, optimizer, [heard[i] for i in row], [targets[i] for i in row]))
            schedule.step()
        print(f"recogniser: round {number + 1}/{_ROUNDS} loss {sum(losses) / len(losses):.4f}", flush=True)
    return model.eval()


def _learn(model: Recogniser, optimizer: torch.optim.Optimizer, heard: list[Tensor], targets: list[Tensor]) -> float:
    lengths = torch.tensor([len(each) for each in heard])
    mels = nn.utils.rnn.pad_sequence(heard, batch_first=True, padding_value=-6.0)
    # Other rooms and microphones, so that it holds on to no detail of the voices.
    mels = mels + 0.3 * torch.randn(len(mels), 1, MELS) + 0.2 * torch.randn_like(mels)
    likely = model(mels)
    loss = functional.ctc_loss(
        likely.transpose(0, 1), torch.cat(targets), (lengths + 3) // 4, torch.tensor([len(each) for each in targets])
    )
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def load_or_train(file: Path | None) -> Recogniser:
    """The recogniser kept in a file of tensors, trained and kept there if it is missing; without a file, trained."""
    from safetensors.torch import load_file, save_file

    if file is not None and file.exists():
        model = Recogniser()
        model.load_state_dict(load_file(file))
        return model.eval()
    model = train_recogniser()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), file)
    return model


def share_right(model: Recogniser, said: Sequence[tuple[str, ...]], sounds: Sequence[Tensor]) -> float:
    """The share of sounds that were taken for the right one of all sentences that the demo says."""
    known = all_spoken()
    right = sum(model.sentence(sound, known) == words for words, sound in zip(said, sounds, strict=True))
    return right / len(said)
