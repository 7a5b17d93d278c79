"""Methods of vLLM's and vLLM-Omni's servers that are wrapped in place, each once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

_MARK: Final = "omni_wraps"


def wrapped_once(found: Any, wrap: Callable[[Any], Callable[..., Any]]) -> Any:
    """A function as ``wrap`` makes it of the given one, by the same name; one that is wrapped already is returned."""
    if hasattr(found, _MARK):
        return found
    made: Any = wraps(found)(wrap(found))
    made.omni_wraps = True
    return made
