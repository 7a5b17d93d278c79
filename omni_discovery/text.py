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


def harmless(text: str) -> str:
    """Return the text as it is, lines and tabs too, but with what a terminal might obey or hide as underscores.

    That is all of C0 and C1, and what turns the direction of writing or has no width.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "_" for char in text)


def harmless_json(text: str) -> str:
    """Return JSON with such characters escaped, which means the same to a reader of JSON."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


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
