"""Texts for tables and log lines: several lines as one, and the names that clients give requests. Pure."""

from __future__ import annotations

from typing import Final

#: The prefix that pydantic puts before the message of a custom validator.
_PREFIX: Final = "Value error, "
#: The longest name, in characters, that a client may give its request.
MAX_LABEL: Final = 128


def one_line(text: str) -> str:
    """Return the text with each run of white space as one space, and what a terminal might obey as underscores."""
    return "".join(char if char.isprintable() else "_" for char in " ".join(text.split()))


def essence(error: BaseException) -> str:
    """Return an exception's message on one line; of pydantic's validation errors only the places and messages."""
    list_errors = getattr(error, "errors", None)
    if not callable(list_errors):
        return one_line(str(error))
    parts = []
    for wrong in list_errors():
        place = ".".join(str(step) for step in wrong.get("loc", ()))
        message = one_line(str(wrong.get("msg", ""))).removeprefix(_PREFIX)
        parts.append(f"{place}: {message}" if place else message)
    return "; ".join(parts) or one_line(str(error))


def is_label(text: str) -> bool:
    """Whether a client's name for its request can be logged and sent back: 1 to 128 printable ASCII characters."""
    return 0 < len(text) <= MAX_LABEL and text.isascii() and text.isprintable()
