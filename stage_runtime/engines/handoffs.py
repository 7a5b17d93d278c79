"""Joins hand-offs that came in pieces, for engines that work on whole ones."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from omni_discovery.errors import InvalidRequestError

#: No model makes hidden states as large as this, whose square a norm can still take.
_LARGEST: Final = 1e9


def are_sound(numbers: Any) -> bool:
    """Whether a tensor of floats holds nothing but numbers that a model can have made.

    One that is none goes through all of a model's layers, and can stay behind where others' requests read it.
    """
    if not numbers.numel():
        return True
    least, most = numbers.aminmax()
    # Of what is no number, no comparison is true.
    return float(least) >= -_LARGEST and float(most) <= _LARGEST


def check_sound(numbers: Any, name: str) -> None:
    """Raise InvalidRequestError for a tensor of floats that holds anything else."""
    if not are_sound(numbers):
        raise InvalidRequestError(f"{name} holds what is no number, or larger than {_LARGEST:g}")


def joined(handed: Mapping[str, Any]) -> Mapping[str, Any]:
    """The hand-off whose pieces are in ``{"pieces": [...]}``; any other hand-off is returned as it is.

    Texts, lists, arrays and tensors of one name are concatenated along their first dimension; of other values the last
    one counts. A piece without a name is skipped for it. Raise InvalidRequestError if shapes or types don't fit.
    """
    pieces = handed.get("pieces")
    if set(handed) != {"pieces"} or not isinstance(pieces, list) or not all(isinstance(e, Mapping) for e in pieces):
        return handed
    parts: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, part in piece.items():
            parts.setdefault(name, []).append(part)
    return {name: _in_a_row(each, name) for name, each in parts.items()}


def _in_a_row(parts: Sequence[Any], name: str) -> Any:
    torch = sys.modules.get("torch")
    try:
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
        if all(isinstance(part, list | tuple) for part in parts):
            return [each for part in parts for each in part]
        if all(isinstance(part, np.ndarray) and part.ndim for part in parts):
            return np.concatenate(parts)
        if torch is not None and all(isinstance(part, torch.Tensor) and part.ndim for part in parts):
            return torch.cat(list(parts))
    except (ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"the {name} of the hand-off's pieces don't fit together: {error}") from error
    return parts[-1]


def count_listed(value: Any, enough: int) -> int:
    """How many values lists and mappings in one another have; not counted further once more than ``enough``."""
    held, count = [value] if isinstance(value, _HOLDERS) else [], 0
    while held and count <= enough:
        count += sum(map(len, held))
        if count <= enough:
            values = (each.values() if isinstance(each, Mapping) else each for each in held)
            held = [each for each in itertools.chain.from_iterable(values) if isinstance(each, _HOLDERS)]
    return count


_HOLDERS: Final = (list, tuple, Mapping)
