"""What a client sends is nested at most so deep as every encoder behind can take."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from hub.request.nesting import MAX_NESTING, check_nesting
from omni_discovery.errors import InvalidRequestError


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value} if kind is dict else kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_values_may_be_nested_up_to_the_limit(kind: type) -> None:
    check_nesting("the input", nested(MAX_NESTING, kind))
    with pytest.raises(InvalidRequestError, match="the input: lists and objects are nested more than 64 deep"):
        check_nesting("the input", nested(MAX_NESTING + 1, kind))


@pytest.mark.parametrize("value", [None, 7, "[[[[", {}, {"prompt": "x", "ids": list(range(100_000))}, [[], {}, ()]])
def test_flat_values_of_any_size_are_fine(value: Any) -> None:
    check_nesting("the input", value)


def test_a_deep_value_among_flat_ones_is_found_and_one_that_holds_itself_ends() -> None:
    with pytest.raises(InvalidRequestError):
        check_nesting("the input", {"a": 1, "b": [1, 2, {"c": nested(100_000, dict)}]})
    endless: list[Any] = [1]
    endless.append(endless)
    with pytest.raises(InvalidRequestError):
        check_nesting("the input", endless)


def test_types_that_only_act_like_lists_and_maps_count_too() -> None:
    class Own(list[Any]):
        """A list of a type of its own."""

    check_nesting("the input", nested(MAX_NESTING, Own))
    with pytest.raises(InvalidRequestError):
        check_nesting("the input", nested(MAX_NESTING + 1, Own))


def test_the_values_of_any_mapping_are_gone_through() -> None:
    check_nesting("the input", MappingProxyType({"x": nested(MAX_NESTING - 1)}))
    with pytest.raises(InvalidRequestError):
        check_nesting("the input", MappingProxyType({"x": nested(MAX_NESTING)}))
    with pytest.raises(InvalidRequestError):
        check_nesting("the input", [MappingProxyType({"x": nested(MAX_NESTING)})])
