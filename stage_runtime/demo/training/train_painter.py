"""Train the painter: `python -m stage_runtime.demo.training.train_painter`. About ten minutes on one core."""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from stage_runtime.demo.training.digits import load_real_digits
from stage_runtime.demo.training.steps import TrainingSteps
from stage_runtime.demo.training.thinker_tokenizer import DIGITS, PAINT, build_tokenizer
from stage_runtime.engines.painter.dit import ANY_DIGIT, WEIGHTS_FILE, DigitPainter, PainterConfig

PAINTER_FOLDER = Path(__file__).parents[1] / "painter"
SEED = 5
BATCH = 256
LEARNING_RATE = 1.5e-3
#: How often the label is hidden in training, so that guidance has something to steer away from.
HIDE_LABEL_SHARE = 0.12
AVERAGE_DECAY = 0.999


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, stretch and shift each image a little; images are (batch, 8, 8) in -1..1, paper at -1."""
    count = len(images)
    spread = torch.rand(5, count, generator=generator) * 2 - 1
    angle, wide, high = spread[0] * math.radians(8), 1 + 0.07 * spread[1], 1 + 0.07 * spread[2]
    shift_x, shift_y = 0.10 * spread[3], 0.06 * spread[4]
    top = torch.stack([wide * angle.cos(), -angle.sin(), shift_x], dim=-1)
    bottom = torch.stack([angle.sin(), high * angle.cos(), shift_y], dim=-1)
    grid = functional.affine_grid(torch.stack([top, bottom], dim=1), [count, 1, 8, 8], align_corners=False)
    moved = functional.grid_sample(images.unsqueeze(1) + 1, grid, mode="bicubic", align_corners=False).squeeze(1) - 1
    return moved.clamp(-1, 1)


def flow_loss(model: DigitPainter, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Return the mean squared error of the predicted velocity at random times on straight paths from noise."""
    noise = torch.randn(images.shape, generator=generator)
    time_on_path = torch.sigmoid(torch.randn(len(images), generator=generator))
    hidden = torch.rand(len(images), generator=generator) < HIDE_LABEL_SHARE
    shown = torch.where(hidden, torch.full_like(labels, ANY_DIGIT), labels)
    weight = time_on_path.view(-1, 1, 1)
    predicted = model((1 - weight) * noise + weight * images, time_on_path, shown)
    return functional.mse_loss(predicted, images - noise)


def train(config: PainterConfig, steps: int) -> DigitPainter:
    """Return a trained painter: the running average of the weights."""
    digits = load_real_digits()
    images = torch.from_numpy(digits.train_images) * 2 - 1
    labels = torch.from_numpy(digits.train_labels)
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = DigitPainter(config)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05)
    with TrainingSteps(steps, every=100) as shown:
        for step in range(1, steps + 1):
            chosen = torch.randint(len(images), (BATCH,), generator=generator)
            loss = flow_loss(model, augment(images[chosen], generator), labels[chosen], generator)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            # A short memory at first: the average must not drag the untrained weights along.
            _follow(average, model, min(AVERAGE_DECAY, step / (step + 10)))
            shown.done(step, loss=loss.item())
    return average


@torch.no_grad()
def _follow(average: DigitPainter, model: DigitPainter, decay: float) -> None:
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)


def save(model: DigitPainter, folder: Path) -> None:
    """Write config and weights, the weights in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save(folder)
    weights = {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).chmod(0o644)


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=PAINTER_FOLDER)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    token_id = build_tokenizer().get_vocab()
    config = PainterConfig(paint_token_id=token_id[PAINT], digit_token_ids=tuple(token_id[token] for token in DIGITS))
    save(train(config, arguments.steps), arguments.out)


if __name__ == "__main__":
    main()
