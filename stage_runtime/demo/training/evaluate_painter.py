"""How well the painter draws: is it legible, does it vary, does it copy, is it quick."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stage_runtime.demo.training.digits import (
    Images,
    RealDigits,
    class_distances,
    load_real_digits,
    nearest_distances,
    read,
    train_reader,
)
from stage_runtime.engines.painter.dit import DigitPainter, compose_image, load_painter, new_canvas, sample

SEEDS_PER_NUMBER = 4
TIMED_PICTURES = 10


@dataclass(frozen=True, slots=True)
class PainterScore:
    """The painter's figures; distances are L2 over 8x8 pixels from 0.0 paper to 1.0 ink."""

    pictures: int
    #: Share of pictures of which the classifier reads every digit right, and of digits read right.
    pictures_read: float
    digits_read: float
    #: The same classifier on real digits it never saw.
    real_digits_read: float
    #: Share of pairs of seeds of one number that give different pixels.
    seeds_differ: float
    #: Medians: drawn digit to nearest training digit; between two real training digits of one class; their ratio.
    nearest_median: float
    class_median: float
    nearest_ratio: float
    #: The ratio for real test digits in place of drawn ones.
    real_ratio: float
    #: Median distance between two drawn digits of one class, as a share of class_median.
    spread_ratio: float
    two_digit_picture_s: float


def score_painter(folder: Path) -> PainterScore:
    """Draw every number from 0 to 99 with several seeds and measure the pictures."""
    model, real = load_painter(folder), load_real_digits()
    numbers = [number for number in range(100) for _ in range(SEEDS_PER_NUMBER)]
    pictures = draw_numbers(model, numbers, first_seed=5000)
    wanted = np.array([int(digit) for number in numbers for digit in str(number)])
    drawn = np.concatenate(pictures)
    reader = train_reader(real)
    right = read(reader, drawn) == wanted
    ends = np.cumsum([len(picture) for picture in pictures])
    nearest, of_class, real_nearest = _medians(drawn, real)
    return PainterScore(
        pictures=len(pictures),
        pictures_read=float(np.mean([part.all() for part in np.split(right, ends[:-1])])),
        digits_read=float(right.mean()),
        real_digits_read=float(np.mean(read(reader, real.test_images) == real.test_labels)),
        seeds_differ=_share_different(pictures),
        nearest_median=nearest,
        class_median=of_class,
        nearest_ratio=nearest / of_class,
        real_ratio=real_nearest / of_class,
        spread_ratio=float(np.median(class_distances(drawn, wanted))) / of_class,
        two_digit_picture_s=_seconds_per_picture(model),
    )


def draw_numbers(model: DigitPainter, numbers: list[int], first_seed: int) -> list[Images]:
    """Draw each number with a seed of its own; return one (digits, 8, 8) array per number."""
    canvases = [
        new_canvas(model, [int(digit) for digit in str(number)], first_seed + index)
        for index, number in enumerate(numbers)
    ]
    return [np.stack(canvas.ink()) for canvas in sample(model, canvases)]


def contact_sheet(folder: Path) -> Image.Image:
    """Return forty numbers drawn by the painter on one sheet."""
    numbers = [*range(10), *range(10, 100, 3)]
    pictures = [compose_image(list(picture)) for picture in draw_numbers(load_painter(folder), numbers, first_seed=1)]
    wide, high = max(picture.width for picture in pictures), pictures[0].height
    sheet = Image.new("RGB", (wide * 8, high * 5), pictures[0].getpixel((0, 0)))
    for index, picture in enumerate(pictures):
        row, column = divmod(index, 8)
        sheet.paste(picture, (column * wide + (wide - picture.width) // 2, row * high))
    return sheet


def _medians(drawn: Images, real: RealDigits) -> tuple[float, float, float]:
    of_class = class_distances(real.train_images, real.train_labels)
    return (
        float(np.median(nearest_distances(drawn, real.train_images))),
        float(np.median(of_class)),
        float(np.median(nearest_distances(real.test_images, real.train_images))),
    )


def _share_different(pictures: list[Images]) -> float:
    different: list[bool] = []
    for start in range(0, len(pictures), SEEDS_PER_NUMBER):
        shown: list[NDArray[np.uint8]] = [
            np.asarray(compose_image(list(picture))) for picture in pictures[start : start + SEEDS_PER_NUMBER]
        ]
        different += [not np.array_equal(a, b) for i, a in enumerate(shown) for b in shown[i + 1 :]]
    return float(np.mean(different))


def _seconds_per_picture(model: DigitPainter) -> float:
    started_s = time.perf_counter()
    for seed in range(TIMED_PICTURES):
        compose_image(sample(model, [new_canvas(model, [4, 2], seed)])[0].ink())
    return (time.perf_counter() - started_s) / TIMED_PICTURES
