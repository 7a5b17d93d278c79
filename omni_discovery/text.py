"""Texts for tables and log lines: several lines as one, and the names that clients give requests. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
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
    if not text.isprintable():
        return False
    kinds = {} if text.isascii() else _kinds(text)
    return _HIDDEN not in (_judged(text, kinds) if _have_marks(kinds) else kinds.values())


def replace_hidden(text: str, instead: Callable[[str], str], spared: str = "") -> str:
    """Return the text with ``instead`` of each character that a terminal would not show, but for those ``spared``."""
    if text.isascii() and text.isprintable():
        return text
    kinds = _kinds(text)
    if _have_marks(kinds):
        judged = zip(text, _judged(text, kinds), strict=True)
        return "".join(instead(char) if kind == _HIDDEN and char not in spared else char for char, kind in judged)
    hidden = [char for char, kind in kinds.items() if kind == _HIDDEN and char not in spared]
    return text.translate({ord(char): instead(char) for char in hidden}) if hidden else text


# What follows runs in C but for each different character once: the text may be anybody's, and a lease waits.

#: What a character is: not shown; shown, and bears no marks; shown, and bears some; a mark; a mark that is never shown.
_HIDDEN, _BARE, _BEARS, _MARK, _NO_MARK = "#.am-"
#: Marks that nothing bears, and the third on what bears them: more stand in the lines above and below.
_LOOSE: Final = re.compile(r"(?<=[#.])[m-]|(?<=[#.][m-])[m-]|(?<=[m-][m-])[m-]|-")


#: So many characters are remembered with their kinds: of a language, and more.
_MOST_KINDS: Final = 1 << 16


class _Kinds(dict[str, str]):
    """The kind of each character that was asked for."""

    def __missing__(self, char: str) -> str:
        if len(self) >= _MOST_KINDS:
            self.clear()
        kind = self[char] = _kind(char)
        return kind


_kind_of: Final = _Kinds()


def _kinds(text: str) -> dict[str, str]:
    return {char: _kind_of[char] for char in set(text)}


def _have_marks(kinds: Mapping[str, str]) -> bool:
    return _MARK in kinds.values() or _NO_MARK in kinds.values()


def _judged(text: str, kinds: Mapping[str, str]) -> str:
    """The kind of each character where it stands."""
    each = text.translate({ord(char): kind for char, kind in kinds.items()})
    return _LOOSE.sub(_HIDDEN, f"{_BARE}{each}")[1:]


def _kind(char: str) -> str:
    """Letters that are written right to left are letters."""
    kind = unicodedata.category(char)
    if kind in ("Mn", "Me"):
        return _MARK if _INVISIBLE.match(char) is None else _NO_MARK
    if not char.isprintable() or _INVISIBLE.match(char) is not None:
        return _HIDDEN
    bears = char.isalnum() if char.isascii() else kind[0] in "LMNS"
    return _BEARS if bears else _BARE


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
