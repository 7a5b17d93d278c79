"""Memory lent to the objects that ``get`` returned, so that it can be taken back early."""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Loan(Protocol):
    """Memory that an object lies in."""

    def let_go(self) -> None:
        """Use it for something else from now on. Idempotent."""


class Lent:
    """Which object lies in which memory, for as long as anything of it lives. Used by any thread."""

    def __init__(self) -> None:
        self._loans: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def note(self, obj: Any, loan: Loan) -> None:
        """Remember the memory of an object."""
        self._loans[id(obj)] = loan

    def release(self, obj: Any) -> None:
        """Let the memory of an object go. An object that lies in none is fine."""
        loan = self._loans.pop(id(obj), None)
        if loan is not None:
            loan.let_go()

    def __len__(self) -> int:
        return len(self._loans)
