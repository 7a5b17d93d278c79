"""What the parameters of a stage may be, as its replica's record has it, and the check of a request's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

_Bound = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)] | float

_NAMES: Final = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "a text"}


class ParamBounds(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, rename="camel"):
    """What one parameter may be, in the words of JSON Schema; without a ``type``, anything. Bounds are of numbers."""

    type: Annotated[str, msgspec.Meta(max_length=16)] | None = None
    minimum: _Bound | None = None
    maximum: _Bound | None = None
    exclusive_minimum: _Bound | None = None
    exclusive_maximum: _Bound | None = None
    multiple_of: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None = None

    def flaw_of(self, value: Any) -> str:
        """Why a value is none; empty if it is one."""
        match self.type:
            case "boolean":
                is_right = isinstance(value, bool)
            case "string":
                is_right = isinstance(value, str)
            case "integer":
                is_right = type(value) is int or (isinstance(value, float) and value.is_integer())
            case "number":
                is_right = type(value) in (int, float)
            case _:
                # A later release may know more of them.
                return ""
        if not is_right:
            return f"it is {_NAMES[self.type]}"
        return self._flaw_of_number(value) if type(value) in (int, float) else ""

    def _flaw_of_number(self, value: float) -> str:
        if self.minimum is not None and value < self.minimum:
            return f"it is at least {self.minimum}"
        if self.maximum is not None and value > self.maximum:
            return f"it is at most {self.maximum}"
        if self.exclusive_minimum is not None and value <= self.exclusive_minimum:
            return f"it is more than {self.exclusive_minimum}"
        if self.exclusive_maximum is not None and value >= self.exclusive_maximum:
            return f"it is less than {self.exclusive_maximum}"
        if self.multiple_of is not None and value % self.multiple_of:
            return f"it is a multiple of {self.multiple_of}"
        return ""


def flaw_of_params(taken: Mapping[str, ParamBounds], params: Mapping[str, Any]) -> tuple[str, str]:
    """The first parameter that is not taken, and why; two empty texts if all are. None asks for the stage's own."""
    for name, value in params.items():
        if value is None:
            continue
        if name not in taken:
            return name, "it is not known to this stage"
        if flaw := taken[name].flaw_of(value):
            return name, flaw
    return "", ""
