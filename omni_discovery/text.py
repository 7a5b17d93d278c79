"""Texts for tables and log lines: several lines as one, and the names that clients give requests. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Final

#: The prefix that pydantic puts before the message of a custom validator.
_PREFIX: Final = "Value error, "
#: The longest name, in characters, that a client may give its request.
MAX_LABEL: Final = 128
#: The longest text, in characters, that ``shortened`` leaves as it is.
MAX_SHORTENED: Final = 4096
#: What ``str.isprintable`` allows and yet no terminal shows: Unicode's default-ignorable code points that are letters
#: or marks (fillers of Hangul, variation selectors, joiners), and the empty pattern of Braille.
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
#: How many marks a character may bear: more stand in the lines above and below it.
_MOST_MARKS: Final = 2


def one_line(text: str) -> str:
    """Return the text with each run of white space as one space, and what a terminal might obey as underscores."""
    return replace_hidden(" ".join(text.split()), _underscore)


def harmless(text: str) -> str:
    """Return the text as it is, lines and tabs too, but with what a terminal might obey or hide as underscores.

    That is all of C0 and C1, what turns the direction of writing, has no width or is blank, and marks without a
    character that they belong to.
    """
    return replace_hidden(text, _underscore, "\n\t")


def harmless_json(text: str) -> str:
    """Return JSON with such characters escaped, which means the same to a reader of JSON."""
    return replace_hidden(text, _escaped)


def is_shown(text: str) -> bool:
    """Whether a terminal shows each character of the text as what it is: stricter than ``str.isprintable``."""
    return text.isprintable() and (text.isascii() or not any(hidden for _, hidden in _judged(text)))


def replace_hidden(text: str, instead: Callable[[str], str], spared: str = "") -> str:
    """Return the text with ``instead`` of each character that a terminal would not show, but for those ``spared``."""
    if is_shown(text):
        return text
    return "".join(instead(char) if hidden and char not in spared else char for char, hidden in _judged(text))


def _judged(text: str) -> Iterator[tuple[str, bool]]:
    """Each character, and whether it is hidden. Letters that are written right to left are letters."""
    room = 0
    for char in text:
        if char.isascii():
            hidden, room = not char.isprintable(), _MOST_MARKS if char.isalnum() else 0
        elif (kind := unicodedata.category(char)) in ("Mn", "Me"):
            hidden = room == 0 or _INVISIBLE.match(char) is not None
            room = max(0, room - 1)
        else:
            hidden = not char.isprintable() or _INVISIBLE.match(char) is not None
            room = _MOST_MARKS if kind[0] in "LMNS" and not hidden else 0
        yield char, hidden


def _underscore(_char: str) -> str:
    return "_"


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


def shortened(text: str, most: int = MAX_SHORTENED) -> str:
    """Return the text, cut in its middle to at most ``most`` characters where it is longer."""
    if len(text) <= most:
        return text
    kept = most - 3
    return f"{text[: kept - kept // 4]}...{text[len(text) - kept // 4 :]}"


def is_label(text: str) -> bool:
    """Whether a client's name for its request can be logged and sent back: 1 to 128 printable ASCII characters."""
    return 0 < len(text) <= MAX_LABEL and text.isascii() and text.isprintable()
