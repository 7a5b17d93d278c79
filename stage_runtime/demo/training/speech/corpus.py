"""Every sentence that the talker says, spoken by espeak-ng and described frame by frame."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stage_runtime.demo.training.speech.espeak import speak_all
from stage_runtime.demo.training.speech.frames import as_floats, describe
from stage_runtime.demo.training.speech.sentences import all_spoken


@dataclass(frozen=True, slots=True)
class Spoken:
    """A sentence, its sound, and of each frame what the codebook compares and the pitch in Hz."""

    words: tuple[str, ...]
    sound: Tensor
    described: Tensor
    pitches: Tensor


def speak_corpus() -> list[Spoken]:
    """The sentences, the same on every call. Raise ConfigError without espeak-ng."""
    said = all_spoken()
    sounds = [as_floats(samples) for samples in speak_all(said)]
    return [Spoken(words, sound, *describe(sound)) for words, sound in zip(said, sounds, strict=True)]
