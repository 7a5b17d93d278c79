"""Memory lent to the objects that ``get`` returned, so that it can be taken back early."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final, Protocol

#: So many may be remembered that are gone already, before they are looked for.
_GONE_AT_MOST: Final = 64


class Loan(Protocol):
    """Memory that an object lies in."""

    def let_go(self) -> None:
        """Use it for something else from now on. Idempotent."""


class Lent:
    """Which object lies in which memory, for as long as anything of it lives. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Not a WeakValueDictionary: that takes as long for one of these as all else that a small ``get`` does.
        self._loans: dict[int, weakref.ref[Any]] = {}
        self._look_at = _GONE_AT_MOST

    def note(self, obj: Any, loan: Loan) -> None:
        """Remember the memory of an object."""
        with self._lock:
            self._loans[id(obj)] = weakref.ref(loan)
            if len(self._loans) > self._look_at:
                self._loans = {key: each for key, each in self._loans.items() if each() is not None}
                self._look_at = 2 * len(self._loans) + _GONE_AT_MOST

    def release(self, obj: Any) -> None:
        """Let the memory of an object go. An object that lies in none is fine."""
        with self._lock:
            found = self._loans.pop(id(obj), None)
        loan = None if found is None else found()
        if loan is not None:
            loan.let_go()

    def __len__(self) -> int:
        with self._lock:
            return sum(each() is not None for each in self._loans.values())
