"""The painter: a small diffusion transformer that draws handwritten digits by flow matching.

The network learns the velocity that carries noise (time 0) to a picture (time 1). Drawing follows that velocity in
a few Euler steps. `advance` is one such step for any mix of canvases, each with its own time, number of steps and
guidance, so a serving engine can let requests join and leave between two steps; `sample` drives it to the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

NUM_DIGITS = 10
#: The label that stands for "no particular digit": what classifier-free guidance leads away from by default.
ANY_DIGIT = NUM_DIGITS
MAX_ANSWER_DIGITS = 2
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_SAFETENSORS_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_PAPER_RGB = np.array((252, 250, 244), dtype=np.float32)
_INK_RGB = np.array((24, 32, 74), dtype=np.float32)

Ink = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PainterConfig:
    """Shape of the network, the sampling defaults, and the thinker's tokens that the painter obeys."""

    #: The thinker's token after which the answer's digits follow.
    paint_token_id: int
    #: The thinker's ten digit tokens; the position is the digit.
    digit_token_ids: tuple[int, ...]
    image_size: int = 8
    patch_size: int = 2
    hidden_size: int = 96
    depth: int = 4
    heads: int = 3
    steps: int = 32
    guidance: float = 1.25

    def __post_init__(self) -> None:
        """Raise ValueError where the numbers do not fit each other."""
        if len(set(self.digit_token_ids)) != NUM_DIGITS or self.paint_token_id in self.digit_token_ids:
            raise ValueError("digit_token_ids must be ten different ids, none of them paint_token_id")
        if self.image_size % self.patch_size or self.hidden_size % (2 * self.heads):
            raise ValueError("patch_size must divide image_size, and twice heads must divide hidden_size")
        check_sampling(self.steps, self.guidance)

    @classmethod
    def load(cls, folder: Path) -> PainterConfig:
        """Read `config.json` of a painter folder; keys this version does not know are ignored."""
        fields: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "digit_token_ids": tuple(known["digit_token_ids"])})

    def save(self, folder: Path) -> None:
        """Write `config.json` into a painter folder."""
        fields = {"model_type": "digit_painter", **asdict(self)}
        (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def check_sampling(steps: int, guidance: float) -> None:
    """Raise ValueError unless steps is 1..1000 and guidance a finite number from 0 to 20."""
    if not 1 <= steps <= 1000:
        raise ValueError(f"steps must be from 1 to 1000, not {steps}")
    if not (math.isfinite(guidance) and 0.0 <= guidance <= 20.0):
        raise ValueError(f"guidance must be from 0 to 20, not {guidance}")


def digits_from_tokens(token_ids: Tensor, config: PainterConfig) -> list[int]:
    """Read the answer's digits out of the thinker's 1-D output token ids.

    Empty when the thinker's answer has no picture. Raises ValueError for a picture that cannot be drawn.
    """
    if token_ids.dim() != 1:
        raise ValueError(f"token ids must be one-dimensional, not of shape {tuple(token_ids.shape)}")
    ids = [int(token_id) for token_id in token_ids.tolist()]
    if config.paint_token_id not in ids:
        return []
    digit_of = {token_id: digit for digit, token_id in enumerate(config.digit_token_ids)}
    after_paint = ids[ids.index(config.paint_token_id) + 1 :]
    if config.paint_token_id in after_paint:
        raise ValueError("more than one paint token")
    digits = [digit_of[token_id] for token_id in takewhile(digit_of.__contains__, after_paint)]
    if not 1 <= len(digits) <= MAX_ANSWER_DIGITS:
        raise ValueError(f"1 to {MAX_ANSWER_DIGITS} digit tokens must follow the paint token, not {len(digits)}")
    if any(token_id in digit_of for token_id in after_paint[len(digits) :]):
        raise ValueError("digit tokens after the end of the answer")
    return digits


class _Block(nn.Module):
    """Attention and MLP, both shifted, scaled and gated by the condition (adaLN-zero)."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(hidden_size, 6 * hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        # Gates start at zero: every block begins as the identity, which keeps early training calm.
        for zeroed in self.modulation.parameters():
            nn.init.zeros_(zeroed)

    def forward(self, patches: Tensor, condition: Tensor) -> Tensor:
        """Refine patches (batch, count, hidden) under condition (batch, hidden)."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        patches = patches + gate_a * self._attend(_norm(patches) * (1 + scale_a) + shift_a)
        hidden = self.up(_norm(patches) * (1 + scale_m) + shift_m)
        refined: Tensor = patches + gate_m * self.down(functional.gelu(hidden))
        return refined

    def _attend(self, patches: Tensor) -> Tensor:
        batch, count, hidden = patches.shape
        qkv: Tensor = self.qkv(patches).view(batch, count, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, count, hidden))
        return out


class DigitPainter(nn.Module):
    """Predicts the velocity from noise towards a handwritten digit."""

    def __init__(self, config: PainterConfig) -> None:
        """Make the network of this shape, untrained."""
        super().__init__()
        self.config = config
        size, patch = config.hidden_size, config.patch_size
        self.embed = nn.Linear(patch * patch, size)
        self.place = nn.Parameter(torch.randn((config.image_size // patch) ** 2, size) * 0.02)
        self.label = nn.Embedding(NUM_DIGITS + 1, size)
        self.time = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.blocks = nn.ModuleList(_Block(size, config.heads) for _ in range(config.depth))
        self.last_modulation = nn.Linear(size, 2 * size)
        self.read_out = nn.Linear(size, patch * patch)
        for zeroed in (*self.last_modulation.parameters(), *self.read_out.parameters()):
            nn.init.zeros_(zeroed)

    def forward(self, pixels: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """Return the velocity at pixels, both (batch, 8, 8), for times in 0..1 and digit labels, both (batch,)."""
        size, patch = self.config.image_size, self.config.patch_size
        grid = size // patch
        patches = pixels.view(-1, grid, patch, grid, patch).transpose(2, 3).reshape(-1, grid * grid, patch * patch)
        condition = functional.silu(self.time(_time_features(time, self.config.hidden_size)) + self.label(labels))
        hidden: Tensor = self.embed(patches) + self.place
        for block in self.blocks:
            hidden = block(hidden, condition)
        shift, scale = self.last_modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        velocity: Tensor = self.read_out(_norm(hidden) * (1 + scale) + shift)
        return velocity.view(-1, grid, grid, patch, patch).transpose(2, 3).reshape(-1, size, size)


def _norm(hidden: Tensor) -> Tensor:
    return functional.layer_norm(hidden, hidden.shape[-1:])


def _time_features(time: Tensor, size: int) -> Tensor:
    octaves = torch.arange(size // 2, device=time.device, dtype=time.dtype) * (math.log(1000.0) / (size // 2))
    angles = time.unsqueeze(-1) * octaves.exp()
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@dataclass(frozen=True, slots=True)
class Canvas:
    """One picture under way: all its digits, after `step` of `steps` steps. Never changed, only replaced."""

    #: The digits to draw, shape (count,).
    labels: Tensor
    #: What guidance leads away from, digit by digit: a digit or ANY_DIGIT; shape (count,).
    avoided: Tensor
    #: Noise at step 0, the finished digits at the last step; shape (count, 8, 8), ink at +1, paper at -1.
    pixels: Tensor
    #: What the model took the finished digits to be at the last step, in the same way.
    expected: Tensor
    step: int
    steps: int
    guidance: float

    @property
    def done(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.steps

    def ink(self) -> list[Ink]:
        """Return one 8x8 array per digit, 0.0 paper to 1.0 ink, as the model now takes the finished digits to be.

        After the last step that is what was drawn.
        """
        inked = ((self.expected.detach() + 1) / 2).clamp(0, 1).to("cpu", torch.float32).numpy()
        return [np.asarray(digit) for digit in inked]


def load_painter(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float64) -> DigitPainter:
    """Load a painter folder (`config.json`, `model.safetensors`), ready to draw.

    The default precision is double on purpose: matrix products round differently in batches of different sizes, and
    only far below one grey level does a picture depend on its own seed and digits alone.
    """
    model = DigitPainter(PainterConfig.load(folder))
    model.load_state_dict(_read_safetensors(folder / WEIGHTS_FILE))
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    # Read by hand, so that the painter needs no package but torch, numpy and Pillow.
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    if len(raw) < start + max(entry["data_offsets"][1] for entry in header.values()):
        raise ValueError(f"{path} is cut short")
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        flat = torch.frombuffer(bytearray(raw[begin:end]), dtype=_SAFETENSORS_DTYPES[entry["dtype"]])
        tensors[name] = flat.view(entry["shape"])
    return tensors


def new_canvas(
    model: DigitPainter,
    digits: Sequence[int],
    seed: int,
    steps: int | None = None,
    guidance: float | None = None,
    avoided: Sequence[int] = (),
) -> Canvas:
    """Start a picture of these digits from the noise of this seed; steps and guidance default to the config's.

    Guidance leads away from the digits of ``avoided``, place by place. Where it names none, or the very digit that is
    drawn there, it leads away from the mean of all digits.
    """
    config = model.config
    steps = config.steps if steps is None else steps
    guidance = config.guidance if guidance is None else guidance
    check_sampling(steps, guidance)
    if not digits or any(not 0 <= digit < NUM_DIGITS for digit in (*digits, *avoided)):
        raise ValueError(f"digits must be one or more numbers from 0 to 9, not {list(digits)} and {list(avoided)}")
    # Drawn on the CPU in single precision whatever the model runs on: a seed means the same noise everywhere.
    shape = (len(digits), config.image_size, config.image_size)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pairs = zip_longest(digits, avoided[: len(digits)])
    away = [ANY_DIGIT if other is None or other == digit else other for digit, other in pairs]
    labels, from_ = (torch.tensor(values, device=model.place.device) for values in (list(digits), away))
    pixels = noise.to(model.place)
    return Canvas(labels, from_, pixels, pixels, step=0, steps=steps, guidance=guidance)


@torch.no_grad()
def advance(model: DigitPainter, canvases: Sequence[Canvas]) -> list[Canvas]:
    """Carry every canvas one step on, all in one batch; finished canvases come back as they are."""
    going = [canvas for canvas in canvases if not canvas.done]
    if not going:
        return list(canvases)
    counts = [len(canvas.labels) for canvas in going]

    def per_digit(values: list[float]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(counts)).to(model.place)

    pixels = torch.cat([canvas.pixels for canvas in going])
    labels = torch.cat([canvas.labels for canvas in going])
    time = per_digit([canvas.step / canvas.steps for canvas in going])
    guidance = per_digit([canvas.guidance for canvas in going]).view(-1, 1, 1)
    length = per_digit([1 / canvas.steps for canvas in going]).view(-1, 1, 1)
    both_labels = torch.cat([labels, *(canvas.avoided for canvas in going)])
    guided, unguided = model(pixels.repeat(2, 1, 1), time.repeat(2), both_labels).chunk(2)
    velocity = unguided + guidance * (guided - unguided)
    moved = (pixels + length * velocity).split(counts)
    # Where it leads if it stays the same for the rest of the way. Of the last step that is `moved`, but for rounding.
    ends = (pixels + (1 - time.view(-1, 1, 1)) * velocity).split(counts)
    steps = iter(zip(moved, ends, strict=True))
    return [canvas if canvas.done else _stepped(canvas, *next(steps)) for canvas in canvases]


def _stepped(canvas: Canvas, moved: Tensor, end: Tensor) -> Canvas:
    step = canvas.step + 1
    return replace(canvas, pixels=moved, expected=moved if step == canvas.steps else end, step=step)


def sample(
    model: DigitPainter, canvases: Sequence[Canvas], on_step: Callable[[Sequence[Canvas]], bool] | None = None
) -> list[Canvas]:
    """Draw until every canvas is done, or until `on_step`, called after each step, returns False."""
    current = list(canvases)
    while any(not canvas.done for canvas in current):
        current = advance(model, current)
        if on_step is not None and not on_step(current):
            break
    return current


def compose_image(digits: Sequence[Ink], height_px: int = 128) -> Image.Image:
    """Set 8x8 digits (0.0 paper to 1.0 ink) side by side as dark ink on white paper, `height_px` tall."""
    tiles = [_smooth(digit, height_px) for digit in digits]
    pitch_px = height_px * 3 // 4
    ink = np.zeros((height_px, height_px + pitch_px * (len(tiles) - 1)), dtype=np.float32)
    for index, tile in enumerate(tiles):
        window = ink[:, index * pitch_px : index * pitch_px + height_px]
        # Neighbours overlap a little, as in handwriting: the darker ink wins.
        np.maximum(window, tile, out=window)
    rgb = _PAPER_RGB + ink[..., None] * (_INK_RGB - _PAPER_RGB)
    return Image.fromarray(rgb.round().astype(np.uint8))


def _smooth(digit: Ink, size_px: int) -> Ink:
    # A cubic enlargement of 8x8 is a fog; a soft threshold on it gives the edge of a pen. The frame of paper comes
    # first, so that strokes at the border end round.
    framed = np.pad(np.asarray(digit, dtype=np.float32), 1)
    large = np.asarray(Image.fromarray(framed).resize((size_px, size_px), Image.Resampling.BICUBIC), dtype=np.float32)
    edge: Ink = (1 / (1 + np.exp(-(large - 0.5) * 16))).astype(np.float32)
    return edge
