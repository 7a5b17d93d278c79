"""How long a replica has answered no dispatch at all. Pure."""

from __future__ import annotations

from typing import Final

_NEVER: Final = float("-inf")


class Silence:
    """When one replica answered no dispatch for so long that this is a failure: once for each such time.

    A replica that is busy with one large request is late for all others, so their number says nothing. All times are
    monotonic.
    """

    __slots__ = ("_failed_at_s", "_since_s")

    def __init__(self) -> None:
        #: Since when dispatches lie there without any answer; None: the last that was heard of was an answer.
        self._since_s: float | None = None
        #: When this was a failure last.
        self._failed_at_s = _NEVER

    def end(self) -> None:
        """The replica has answered a dispatch, whichever."""
        self._since_s = None

    def is_failure(self, silence_s: float, now_s: float, limit_s: float) -> bool:
        """A dispatch has had no answer for ``silence_s``: whether it, or all since the last answer, waited too long."""
        sent_at_s, late_s = now_s - silence_s, now_s - limit_s
        since_s = self._since_s = sent_at_s if self._since_s is None else min(self._since_s, sent_at_s)
        if max(since_s, self._failed_at_s) > late_s:
            return False
        self._since_s, self._failed_at_s = None, now_s
        return True
