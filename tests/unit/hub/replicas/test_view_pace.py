"""Views of the registry leave the loop time for everything else."""

from __future__ import annotations

import pytest

from hub.replicas.view_pace import ViewPace


@pytest.mark.attack("A24")
def test_what_took_long_leaves_four_times_as_long_for_others_within_a_bound() -> None:
    pace = ViewPace()
    assert pace.delay_s(0.0) == 0.0
    pace.applied(10.0, 10.01)
    assert pace.delay_s(10.01) == pytest.approx(0.04)
    assert pace.delay_s(10.03) == pytest.approx(0.02)
    assert pace.delay_s(11.0) == 0.0
    pace.applied(20.0, 20.1)
    assert pace.delay_s(20.1) == pytest.approx(0.25)


@pytest.mark.attack("E8")
def test_however_long_a_view_takes_others_have_as_long() -> None:
    pace = ViewPace()
    pace.applied(20.0, 25.0)
    assert pace.delay_s(25.0) == 5.0
