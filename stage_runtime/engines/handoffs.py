"""Joins hand-offs that came in pieces, for engines that work on whole ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omni_discovery.errors import InvalidRequestError


def joined(handed: Mapping[str, Any]) -> Mapping[str, Any]:
    """The hand-off whose pieces are in ``{"pieces": [...]}``; any other hand-off is returned as it is.

    Texts, lists, arrays and tensors of one name are concatenated along their first dimension; of other values the last
    one counts. A piece without a name is skipped for it. Raise InvalidRequestError if shapes or types don't fit.
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
