"""The pieces that one stage hands to another while it works: which there are, and how far the consumer has them. Pure.

A relay belongs to one attempt of the producer. Pieces are kept until that ends, where they were made and by name here,
so that another attempt of the consumer gets all of them again, from the first.
"""

from __future__ import annotations

from omni_discovery.wire import PayloadRef


class PieceRelay:
    """At most ``window`` pieces are on their way to the consumer, and the producer is told what it has taken."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._refs: list[PayloadRef] = []
        self._is_complete = False
        #: How many went to the present attempt of the consumer, and how many of these it has taken.
        self._fed = 0
        self._taken = 0
        self._end_fed = False
        #: How many the producer was told of.
        self.roomed = 0

    def add(self, ref: PayloadRef) -> None:
        """The producer has made another piece."""
        self._refs.append(ref)

    def complete(self) -> None:
        """The producer makes no more."""
        self._is_complete = True

    def begin(self) -> None:
        """Another attempt of the consumer begins: it has nothing yet."""
        self._fed = self._taken = 0
        self._end_fed = False

    def again(self) -> None:
        """What is on its way to the consumer may be lost: it is due once more."""
        self._fed, self._end_fed = self._taken, False

    def due(self) -> list[tuple[int, PayloadRef | None]]:
        """What is to go to the consumer now, by number; None is the end. It counts as sent from here on."""
        end = min(len(self._refs), self._taken + self._window)
        due: list[tuple[int, PayloadRef | None]] = list(enumerate(self._refs[self._fed : end], self._fed))
        self._fed = max(self._fed, end)
        if self._is_complete and self._fed == len(self._refs) and not self._end_fed:
            self._end_fed = True
            due.append((self._fed, None))
        return due

    def take(self, number: int) -> bool:
        """The consumer has all up to and with that one; False if it can't have."""
        if number >= self._fed:
            return False
        self._taken = max(self._taken, number + 1)
        return True

    def room(self, *, is_free: bool) -> int | None:
        """How many of them the producer is to be told that the consumer has, if that is news to it.

        ``is_free``: the consumer needs none of them now, so that nothing is to be held up for it.
        """
        count = len(self._refs) if is_free else self._taken
        if count <= self.roomed:
            return None
        self.roomed = count
        return count
