"""A drain: what it waits for, and until when."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

_NEVER: Final = float("inf")
#: How long a registry may say nothing of the hubs: the hubs of one that is away are told by refusals.
_UNHEARD_TIMEOUT_S: Final = 1.5


class Verdict(StrEnum):
    """What a draining replica does now."""

    WAIT = "wait"
    #: Nothing is in flight, and nothing more will come.
    DONE = "done"
    #: The drain's bound has passed while something is in flight.
    GIVE_UP = "give-up"


class Drain:
    """Pure; moments are monotonic seconds.

    A drain is done when nothing is in flight and every hub has said that it picks this replica no more. A hub that
    says nothing is waited for at most ``ack_timeout_s`` from the begin, and not even that where the registry does not
    say who they are; work in flight for as long as those who asked
    for the drain have patience.
    """

    def __init__(self, ack_timeout_s: float) -> None:
        self._ack_timeout_s = ack_timeout_s
        #: When the first was asked for; None before.
        self._began_s: float | None = None
        #: When what still runs is failed. Never, while it was the operator who asked by the control key.
        self._until_s = _NEVER
        #: Whether every live hub has applied that this replica is draining. May be set from any thread.
        self.is_acknowledged = False

    @property
    def is_bounded(self) -> bool:
        """Whether somebody has asked who will not wait for ever."""
        return self._until_s < _NEVER

    def ask(self, now_s: float, patience_s: float) -> None:
        """Drain, and fail in ``patience_s`` what runs by then. The least patient of all who asked counts."""
        if self._began_s is None:
            self._began_s = now_s
        self._until_s = min(self._until_s, now_s + patience_s)

    def verdict(self, now_s: float, in_flight: int, *, knows_hubs: bool = True) -> Verdict:
        """What is to be done, once a drain was asked for. ``knows_hubs``: the registry has said whom to wait for."""
        if in_flight:
            return Verdict.GIVE_UP if now_s >= self._until_s else Verdict.WAIT
        began_s = now_s if self._began_s is None else self._began_s
        timeout_s = self._ack_timeout_s if knows_hubs else min(_UNHEARD_TIMEOUT_S, self._ack_timeout_s)
        is_over = now_s >= min(self._until_s, began_s + timeout_s)
        return Verdict.DONE if self.is_acknowledged or is_over else Verdict.WAIT
