"""The demo's painter between two steps: what it takes the finished digits to be."""

from __future__ import annotations

import numpy as np
import pytest

from stage_runtime.engines.painter.dit import Canvas, DigitPainter, load_painter, new_canvas, sample
from tests.support.engines import DEMO


@pytest.fixture(scope="module")
def painter() -> DigitPainter:
    return load_painter(DEMO / "painter")


def drawn(painter: DigitPainter, *canvases: Canvas) -> list[list[Canvas]]:
    """Each canvas behind each step of all."""
    steps: list[list[Canvas]] = []

    def keep(now: object) -> bool:
        assert isinstance(now, list)
        steps.append(now)
        return True

    sample(painter, canvases, keep)
    return [list(of_one) for of_one in zip(*steps, strict=True)]


def away(canvas: Canvas, finished: Canvas) -> float:
    return float(np.abs(np.stack(canvas.ink()) - np.stack(finished.ink())).mean())


def test_what_is_expected_comes_nearer_and_is_nearer_than_the_noise_on_the_way(painter: DigitPainter) -> None:
    """1. digits 4 and 2: halfway, the expected digits are nearer to the finished ones than at the first step
    2. they are nearer than the canvas itself, which is still half noise
    3. behind the last step they are what was drawn
    """
    (steps,) = drawn(painter, new_canvas(painter, [4, 2], seed=5))
    first, halfway, last = steps[0], steps[len(steps) // 2], steps[-1]
    assert away(first, last) > away(halfway, last) > 0
    there = ((halfway.pixels + 1) / 2).clamp(0, 1).numpy()
    assert np.abs(there - np.stack(last.ink())).mean() > 2 * away(halfway, last)
    assert last.done
    assert (last.expected == last.pixels).all()


def test_a_canvas_beside_others_expects_its_own_digits(painter: DigitPainter) -> None:
    """Two canvases of other lengths and numbers of steps: each is as it is alone."""
    asked = [([7], 6), ([1, 9], 11)]
    together = drawn(painter, *(new_canvas(painter, digits, seed=3, steps=steps) for digits, steps in asked))
    for (digits, steps), mine in zip(asked, together, strict=True):
        (alone,) = drawn(painter, new_canvas(painter, digits, seed=3, steps=steps))
        for one, other in zip(alone, mine, strict=False):
            assert np.abs(np.stack(one.ink()) - np.stack(other.ink())).max() < 1e-3
