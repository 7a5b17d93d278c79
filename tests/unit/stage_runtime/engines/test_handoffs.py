"""Hand-offs that came in pieces, as the whole that they make up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.handoffs import joined


def test_pieces_stand_one_behind_the_other_and_of_single_values_the_last_counts() -> None:
    pieces: list[dict[str, Any]] = [
        {"text": "to ", "ids": [1, 2], "rows": np.ones((2, 3)), "rate_hz": 8000},
        {"text": "be", "ids": [3], "rows": np.zeros((1, 3)), "rate_hz": 16000, "late": "yes"},
    ]
    whole = dict(joined({"pieces": pieces}))
    assert whole.pop("rows").tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert whole == {"text": "to be", "ids": [1, 2, 3], "rate_hz": 16000, "late": "yes"}


@pytest.mark.parametrize("handed", [{}, {"text": "x"}, {"pieces": 3}, {"pieces": [1]}, {"pieces": [], "text": "x"}])
def test_what_did_not_come_in_pieces_stays_as_it_is(handed: dict[str, Any]) -> None:
    assert joined(handed) is handed


def test_parts_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="rows"):
        joined({"pieces": [{"rows": np.ones((2, 3))}, {"rows": np.ones((2, 4))}]})


@pytest.mark.attack("Z59")
def test_pieces_with_many_names_are_joined_in_one_go() -> None:
    """Each name was looked for in each piece: 30 000 names and as many empty pieces took half a minute."""

    class Piece(dict[str, Any]):
        lookups = 0

        def __contains__(self, name: object) -> bool:
            Piece.lookups += 1
            return super().__contains__(name)

    pieces = [Piece({str(number): number for number in range(1000)}), *(Piece() for _ in range(1000))]
    assert joined({"pieces": pieces}) == {str(number): number for number in range(1000)}
    assert Piece.lookups <= 2000
