"""Who keeps failing and is left out for a while. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final

_IN_A_ROW: Final = 3
_REMEMBERED: Final = 20
_ENOUGH: Final = 10
_ALL: Final = (1 << _REMEMBERED) - 1


class Standing(Enum):
    """Whether a replica is spared."""

    FINE = "fine"
    EJECTED = "ejected"
    #: Its time is over: one request at a time shows whether it works again.
    PROBED = "probed"


class Health:
    """The last outcomes of one replica."""

    __slots__ = ("_ended_s", "_failures", "_in_a_row", "_seen", "ejections", "probe", "standing", "until_s")

    def __init__(self) -> None:
        self.standing = Standing.FINE
        #: When the ejection ends.
        self.until_s = 0.0
        #: Ejections lately, each twice as long as the one before.
        self.ejections = 0
        #: The request that tries a replica whose ejection is over.
        self.probe: str | None = None
        #: The last outcomes as bits, the newest lowest, set where one failed.
        self._failures = 0
        self._seen = 0
        self._in_a_row = 0
        self._ended_s = 0.0

    @property
    def blocked(self) -> bool:
        """Whether no request may go there now, panic aside."""
        return self.standing is Standing.EJECTED or (self.standing is Standing.PROBED and self.probe is not None)

    def succeeded(self) -> None:
        """A request was served."""
        self._in_a_row = 0
        self._failures = (self._failures << 1) & _ALL
        if self._seen < _REMEMBERED:
            self._seen += 1

    def failed(self) -> bool:
        """A request failed by the replica's fault; return whether it should be ejected."""
        self._in_a_row += 1
        self._failures = (self._failures << 1 | 1) & _ALL
        if self._seen < _REMEMBERED:
            self._seen += 1
        if self.standing is Standing.PROBED or self._in_a_row >= _IN_A_ROW:
            return True
        return self._seen >= _ENOUGH and 2 * self._failures.bit_count() > self._seen

    def eject(self, now_s: float, min_s: float, max_s: float) -> None:
        """Leave it out, for twice as long as the last time unless that is long past."""
        if self.standing is Standing.FINE and now_s - self._ended_s > max_s:
            self.ejections = 0
        self.until_s = now_s + min(max_s, min_s * 2.0 ** min(self.ejections, 64))
        self.ejections += 1
        self.standing, self.probe = Standing.EJECTED, None

    def try_again(self) -> None:
        """The time is over."""
        self.standing, self.probe = Standing.PROBED, None

    def recovered(self, now_s: float) -> None:
        """The probe was served: a clean sheet, but for the number of ejections."""
        self.standing, self.probe = Standing.FINE, None
        self._failures = self._seen = self._in_a_row = 0
        self._ended_s = now_s


def most_ejected(registered: int) -> int:
    """How many of so many may be left out at one time."""
    return max(1, registered // 10)
