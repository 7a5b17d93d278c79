"""TextPace: how often the text of an answer with calls goes on to a parser that reads all of it anew. Pure."""

from __future__ import annotations

from typing import Final

#: So much text goes on as it comes, character by character if need be.
_FREE_CHARACTERS: Final = 4096
#: From there on a piece is at least this part of the text before it, so that all readings together cost so many times
#: the text, whatever its length; or it has waited so long.
_PART: Final = 32
_LONGEST_WAIT_S: Final = 1.0
#: vLLM's parsers that find each of several calls in one piece. Others, such as llama3_json and deepseek_v3, tell of one
#: call a piece and lose the rest: to them, pieces go on as they come.
_READ_SEVERAL: Final = frozenset({"hermes"})


def may_pace(parser: str | None) -> bool:
    """Whether a parser of calls, by its name in vLLM, may get an answer in larger pieces than it came in."""
    return parser in _READ_SEVERAL


class TextPace:
    """The pace of one answer. Moments are monotonic seconds."""

    def __init__(self) -> None:
        #: Characters that have gone on, and that wait; and when the last ones went.
        self._passed = self._waiting = 0
        self._passed_at_s = float("-inf")

    def is_due(self, characters: int, now_s: float) -> bool:
        """Whether what waits is to go on now, with so many more characters. It counts as gone then."""
        self._waiting += characters
        is_short = self._passed + self._waiting <= _FREE_CHARACTERS
        if not is_short and self._waiting * _PART < self._passed and now_s - self._passed_at_s < _LONGEST_WAIT_S:
            return False
        self._passed, self._waiting, self._passed_at_s = self._passed + self._waiting, 0, now_s
        return True
