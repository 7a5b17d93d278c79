"""What a hub and one replica process have agreed on: lives, the session, and the credits of it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from omni_discovery import wire


class Session:
    """Up when the present life has welcomed us on every socket, for the present number."""

    def __init__(self, sockets: Collection[str], epoch: int) -> None:
        self._sockets = frozenset(sockets)
        self._epoch = epoch
        self.up = False
        #: Counts the sessions with this process: credits of an earlier one are void.
        self.number = 1
        #: Whether the replica runs only what it has granted credits for.
        self.gated = False
        #: The lives of this process that have welcomed us: work that was sent to an earlier one goes on.
        self.epochs: set[int] = set()
        self._welcomed: set[str] = set()
        #: Credits that came before the session was up.
        self._early_credits = 0
        #: How many of them were given up for each Recall that came before.
        self._early_returns: list[int] = []
        #: Whether it is known that nothing sent before will be answered without a new session.
        self._is_lost = True

    def welcomed_on(self, socket: str) -> bool:
        """Whether that socket's Hello was answered."""
        return socket in self._welcomed

    def welcome(self, socket: str, message: wire.Welcome) -> bool:
        """The replica has answered a Hello; True if that makes the session."""
        # A replica that grants no credits names no session; the answer to an earlier Hello may come late.
        if message.epoch != self._epoch or message.session not in (0, self.number):
            return False
        self.gated = message.session == self.number
        self._welcomed.add(socket)
        if self.up or self._welcomed != self._sockets:
            return False
        self.up, self._is_lost = True, False
        self.epochs.add(message.epoch)
        return True

    def is_forgotten(self, message: wire.Welcome) -> bool:
        """Whether a replica that lends us slots says that it knows of no session: it has given us up."""
        return self.up and self.gated and message.epoch == self._epoch and message.session == 0

    def begin(self, epoch: int) -> None:
        """Both sockets have to be greeted anew: what was granted on one may have been lost with the other."""
        self._epoch = epoch
        self.number += 1
        self._early_credits = 0
        self._early_returns.clear()
        self._welcomed.clear()

    def end(self, *, lost: bool) -> bool:
        """The session ends; ``lost``: with answers that were on their way. Return whether that is news."""
        # After a change of epoch, work goes on without a session: the loss of the connection is news then, too.
        if not self.up and (self._is_lost or not lost):
            return False
        self.up, self._is_lost = False, lost
        return True

    def is_of_this(self, message: wire.Grant | wire.Recall) -> bool:
        """Whether credits belong to the present session."""
        return (message.epoch, message.session) == (self._epoch, self.number)

    def grant(self, credits_: int) -> int:
        """Credits have come; return those that may be used now."""
        if self.up:
            return credits_
        self._early_credits += credits_
        return 0

    def take_early_credits(self) -> int:
        """What was granted before the session was up."""
        early, self._early_credits = self._early_credits, 0
        return early

    def recall(self, credits_: int) -> bool:
        """Credits are wanted back; False before the session is up: then of those that came some are given up here."""
        if self.up:
            return True
        given_up = min(credits_, self._early_credits)
        self._early_credits -= given_up
        self._early_returns.append(given_up)
        return False

    def take_early_returns(self) -> list[int]:
        """How each Recall that came before the session was up is to be answered."""
        early, self._early_returns = self._early_returns, []
        return early
