"""What others say over several lines, in one: for tables, and for reasons that stand in a line of ours. Pure."""

from __future__ import annotations

from typing import Final

#: How pydantic begins what a validator of its user's raised.
_PREFIX: Final = "Value error, "


def one_line(text: str) -> str:
    """The text with each stretch of white space as one space."""
    return " ".join(text.split())


def essence(error: BaseException) -> str:
    """What an exception says, on one line. Of pydantic's validation errors: what is wrong with what, and no more."""
    told = getattr(error, "errors", None)
    if not callable(told):
        return one_line(str(error))
    parts = []
    for each in told():
        place = ".".join(str(step) for step in each.get("loc", ()))
        message = one_line(str(each.get("msg", ""))).removeprefix(_PREFIX)
        parts.append(f"{place}: {message}" if place else message)
    return "; ".join(parts) or one_line(str(error))
