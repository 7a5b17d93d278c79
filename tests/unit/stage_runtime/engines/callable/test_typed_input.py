"""What a callable's input says of the parameters that it takes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery.errors import InvalidRequestError
from omni_discovery.records.params import ParamBounds, flaw_of_params
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.callable.typed_input import TypedInput


class Deep(msgspec.Struct):
    """Numbers on several levels."""

    frames: list[int] = []
    noise: torch.Tensor | None = None
    layers: list[torch.Tensor] = []
    named: dict[str, torch.Tensor] = {}


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


@pytest.mark.attack("Z64")
@pytest.mark.parametrize(
    ("handed", "said"),
    [
        (
            {"frames": torch.zeros(1).expand(1 << 34)},
            "frames: 17179869184 numbers; a list of this stage takes up to 1048576",
        ),
        ({"frames": np.broadcast_to(np.zeros(1, np.int8), (1 << 20, 9))}, "frames: 9437184 numbers"),
        ({"noise": [[0.5] * 1024] * 1025}, "noise: its lists are longer than 1048576 values"),
        ({"noise": [0.5] * ((1 << 20) + 1)}, "noise: its lists are longer"),
        ({"layers": [[0.5] * 1024] * 1025}, "layers: its lists are longer"),
        ({"named": {"a": [0.5] * (1 << 20)}}, "named: its lists are longer"),
    ],
)
def test_neither_gigabytes_become_numbers_of_python_nor_millions_of_these_a_tensor(
    handed: dict[str, Any], said: str
) -> None:
    typed = TypedInput(Deep, "cpu")
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        typed.read(StageRequest("r", "r", payloads={0: handed}))
    read = typed.read(StageRequest("r", "r", payloads={0: {"frames": torch.arange(3), "noise": [[0.5, 1.0]]}}))
    assert (read.frames, read.noise.tolist()) == ([0, 1, 2], [[0.5, 1.0]])
