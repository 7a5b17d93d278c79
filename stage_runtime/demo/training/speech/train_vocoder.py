"""Make the codebook and train the vocoder for it: `python -m stage_runtime.demo.training.speech.train_vocoder`."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from stage_runtime.demo.code2wav import AFTER, BEFORE, HOP, Code2Wav, overlapped
from stage_runtime.demo.training.speech.codec import CODEBOOK, CODES, encode_corpus, make_codebook
from stage_runtime.demo.training.speech.corpus import speak_corpus
from stage_runtime.demo.training.steps import TrainingSteps
from stage_runtime.demo.training.thinker_tokenizer import VOCAB_SIZE

VOCODER_FOLDER: Final = Path(__file__).parents[2] / "vocoder"
_SEED: Final = 43
_BATCH: Final = 8
#: Frames of a training example.
_FRAMES: Final = 32
_TRANSFORMS: Final = (256, 512, 1024)


def spectral_loss(made: Tensor, real: Tensor) -> Tensor:
    """How far the spectra of two sounds (batch, samples) are apart, over several lengths of window."""
    loss = torch.zeros(())
    for size in _TRANSFORMS:
        window = torch.hann_window(size)
        of_made, of_real = (
            torch.stft(each, size, size // 4, window=window, return_complex=True).abs() for each in (made, real)
        )
        logs = functional.l1_loss(torch.log(of_made + 1e-2), torch.log(of_real + 1e-2))
        loss = loss + logs + 0.1 * functional.l1_loss(of_made, of_real)
    return loss


def sound_of(model: Code2Wav, codes: Tensor, pitches: Tensor) -> tuple[Tensor, Tensor]:
    """The sound of codes at the given pitches (0: the model's own), and how far its pitch is from those given."""
    told, tone, noise = model.describe(codes)
    is_voiced = pitches > 0
    # The spectrum is learnt at the right pitch: a wrong one would move all its peaks.
    used = torch.where(is_voiced, pitches, told.detach())
    voiced, _ = model.tone(used, tone, torch.zeros(len(codes), 1, dtype=torch.float64))
    hiss, _ = overlapped(model.hiss(noise[:, 1:], 1), torch.zeros(len(codes), HOP))
    apart = ((told.log() - pitches.clamp_min(1).log()).abs() * is_voiced).sum() / is_voiced.sum().clamp_min(1)
    return voiced + hiss, apart


def train(model: Code2Wav, sounds: list[Tensor], codes: list[Tensor], pitches: list[Tensor], steps: int) -> None:
    """Train in place, on pieces drawn from the sentences."""
    rng = random.Random(_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    with TrainingSteps(steps, every=50) as shown:
        for step in range(1, steps + 1):
            picked = [_piece(rng, sounds, codes, pitches, model.silence) for _ in range(_BATCH)]
            sound, known, tones = (torch.stack(part) for part in zip(*picked, strict=True))
            made, apart = sound_of(model, known, tones)
            loss = spectral_loss(made, sound)
            torch.autograd.backward(loss + 10 * apart)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            shown.done(step, loss=loss.item(), pitch=apart.item())


def _piece(
    rng: random.Random, sounds: list[Tensor], codes: list[Tensor], pitches: list[Tensor], silence: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, the codes with their neighbours, and pitches with the frame before, of a piece of a sentence.

    Between two frames' middles lies what sounds: half a frame later than the frames themselves.
    """
    number = rng.randrange(len(sounds))
    around = functional.pad(codes[number], (BEFORE + 1, AFTER + _FRAMES), value=silence)
    first = rng.randrange(len(codes[number]) - _FRAMES // 2)
    sound = functional.pad(sounds[number], (HOP, HOP * _FRAMES))
    tones = functional.pad(pitches[number], (1, _FRAMES))
    begin = first * HOP + HOP // 2
    return (
        sound[begin : begin + _FRAMES * HOP],
        around[first : first + _FRAMES + 1 + BEFORE + AFTER],
        tones[first : first + _FRAMES + 1],
    )


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=VOCODER_FOLDER)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    spoken = speak_corpus()
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_codebook(spoken, arguments.out / CODEBOOK.name)
    codes = encode_corpus(spoken, arguments.out / CODEBOOK.name)
    model = Code2Wav(CODES)
    train(model, [each.sound for each in spoken], codes, [each.pitches for each in spoken], arguments.steps)
    save_file(model.state_dict(), arguments.out / "model.safetensors")
    (arguments.out / "config.json").write_text(json.dumps({"codes": CODES, "first_token": VOCAB_SIZE}, indent=2) + "\n")


if __name__ == "__main__":
    main()
