"""Hand-offs that came in pieces to an engine that works on whole ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omni_discovery.errors import InvalidRequestError


def joined(handed: Mapping[str, Any]) -> Mapping[str, Any]:
    """The hand-off that ``{"pieces": [...]}`` makes up; any other as it is.

    Texts, lists, arrays and tensors stand one behind the other, along their first dimension; of all else the last
    counts. What not all pieces have is of those that have it. Raise InvalidRequestError where parts don't fit.
    """
    pieces = handed.get("pieces")
    if set(handed) != {"pieces"} or not isinstance(pieces, list) or not all(isinstance(e, Mapping) for e in pieces):
        return handed
    names = dict.fromkeys(name for piece in pieces for name in piece)
    return {name: _in_a_row([piece[name] for piece in pieces if name in piece], name) for name in names}


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
