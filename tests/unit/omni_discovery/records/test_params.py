"""What parameters may be, as a record has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omni_discovery.records.params import ParamBounds, flaw_of_params

SIDE = ParamBounds(type="integer", minimum=16, maximum=256, multiple_of=8)
SHARE = ParamBounds(type="number", exclusive_minimum=0, exclusive_maximum=1.5)


@pytest.mark.parametrize(
    ("bounds", "value", "flaw"),
    [
        (SIDE, 16, ""),
        (SIDE, 256, ""),
        (SIDE, 64.0, ""),
        (SIDE, 8, "it is at least 16"),
        (SIDE, 264, "it is at most 256"),
        (SIDE, 10**400, "it is at most 256"),
        (SIDE, 33, "it is a multiple of 8"),
        (SIDE, 64.5, "it is a whole number"),
        (SIDE, float("nan"), "it is a whole number"),
        (SIDE, True, "it is a whole number"),
        (SIDE, "64", "it is a whole number"),
        (SHARE, 1, ""),
        (SHARE, 0, "it is more than 0"),
        (SHARE, 1.5, "it is less than 1.5"),
        (SHARE, False, "it is a number"),
        (ParamBounds(type="boolean"), False, ""),
        (ParamBounds(type="boolean"), 0, "it is true or false"),
        (ParamBounds(type="string", maximum=1), "long", ""),
        (ParamBounds(type="string"), None, "it is a text"),
        (ParamBounds(), {"any": "thing"}, ""),
        (ParamBounds(type="of-later"), 5, ""),
    ],
)
def test_a_value_is_within_its_bounds_or_the_flaw_says_what_it_is(bounds: ParamBounds, value: Any, flaw: str) -> None:
    assert bounds.flaw_of(value) == flaw


def test_the_first_parameter_that_is_not_taken_is_named() -> None:
    taken = {"width": SIDE, "height": SIDE}
    assert flaw_of_params(taken, {"width": 64, "height": None}) == ("", "")
    assert flaw_of_params(taken, {"width": 64, "height": 9}) == ("height", "it is at least 16")
    assert flaw_of_params(taken, {"steps": 3, "width": 9}) == ("steps", "it is not known to this stage")
    # None is the stage's own, also of what it does not know.
    assert flaw_of_params(taken, {"steps": None}) == ("", "")


def test_bounds_are_written_in_the_words_of_json_schema() -> None:
    assert msgspec.json.encode(SIDE) == b'{"type":"integer","minimum":16,"maximum":256,"multipleOf":8}'
    assert msgspec.json.encode(SHARE) == b'{"type":"number","exclusiveMinimum":0,"exclusiveMaximum":1.5}'
    assert msgspec.json.encode(ParamBounds()) == b"{}"
    for each in (SIDE, SHARE):
        assert msgspec.json.decode(msgspec.json.encode(each), type=ParamBounds) == each
