"""Behind which steps unfinished pictures are shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.wire import MAX_PARTIAL_IMAGES
from stage_runtime.engines.pictures.partial_images import steps_shown


def test_unfinished_pictures_are_spread_evenly() -> None:
    assert steps_shown(32, 3) == (8, 16, 24)
    assert steps_shown(32, 1) == (16,)
    assert steps_shown(32, 0) == ()


def test_few_steps_have_fewer_pictures_and_a_single_step_has_none() -> None:
    assert steps_shown(3, 3) == (1, 2)
    assert steps_shown(1, 3) == ()


@given(st.integers(1, 1000), st.integers(0, MAX_PARTIAL_IMAGES))
def test_all_come_in_order_behind_a_step_and_before_the_last(steps: int, count: int) -> None:
    shown = steps_shown(steps, count)
    assert list(shown) == sorted(set(shown))
    assert all(0 < each < steps for each in shown)
    assert len(shown) == min(count, steps - 1)
