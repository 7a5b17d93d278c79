"""The companion that picture engines know: what the picture is led away from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest

#: The role of a negative prompt.
NEGATIVE: Final = "negative"


def negative_of(request: StageRequest) -> Mapping[int, Mapping[str, Any]] | None:
    """The hand-offs of the companion ``negative`` by stage, None without one.

    Raise InvalidRequestError for a companion of any other role.
    """
    unknown = next((role for role in request.companions if role != NEGATIVE), None)
    if unknown is not None:
        raise InvalidRequestError(f"companion {unknown!r}: this stage has use for {NEGATIVE!r} only")
    return request.companions.get(NEGATIVE)
