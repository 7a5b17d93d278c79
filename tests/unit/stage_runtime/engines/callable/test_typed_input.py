"""What a callable's input says of the parameters that it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.errors import InvalidRequestError
from omni_discovery.records.params import ParamBounds, flaw_of_params
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.callable.typed_input import TypedInput


class Scene(msgspec.Struct):
    """Some of each kind."""

    prompt: str = ""
    width: Annotated[int, msgspec.Meta(ge=16, le=256, multiple_of=8)] = 64
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    loop: bool = False
    way: Literal["up", "down"] = "up"
    noise: torch.Tensor | None = None
    either: int | str = 0
    frames: list[int] = []


def test_numbers_have_their_bounds_and_what_is_more_than_one_kind_has_none() -> None:
    assert TypedInput(Scene, "cpu").params == {
        "seed": ParamBounds(),
        "prompt": ParamBounds(type="string"),
        "width": ParamBounds(type="integer", minimum=16, maximum=256, multiple_of=8),
        "share": ParamBounds(type="number", exclusive_minimum=0, exclusive_maximum=1),
        "loop": ParamBounds(type="boolean"),
        "way": ParamBounds(),
        "noise": ParamBounds(),
        "either": ParamBounds(),
        "frames": ParamBounds(),
    }


_VALUES = st.none() | st.booleans() | st.integers(-300, 300) | st.floats(-2, 300) | st.text(max_size=3) | st.just([1])


@given(st.dictionaries(st.sampled_from([*Scene.__struct_fields__, "seed", "other"]), _VALUES, max_size=3))
def test_what_is_refused_beforehand_the_stage_would_refuse_and_for_bounds_the_other_way_round(
    params: dict[str, Any],
) -> None:
    taken = TypedInput(Scene, "cpu")
    name, _ = flaw_of_params(taken.params, params)
    request = StageRequest("k", "k", params=params)
    if name:
        with pytest.raises(InvalidRequestError):
            taken.read(request)
    elif set(params) <= {"width", "share", "loop", "prompt"}:
        taken.read(request)
