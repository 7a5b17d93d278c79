"""``check``: is there an order of a history's operations that a model allows and that keeps to the clock?

The search of Wing and Gong: each operation takes effect at one moment between its call and its return. Whoever may come
next is tried in turn; what has been reached once, the same operations done and the same state, is not tried again, as
Lowe proposes. An operation whose outcome is unknown has no return: it takes effect at any moment after its call, or
never. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

State = TypeVar("State", bound=Hashable)

#: More states than a history of this size should ever need: a model whose operations have too many unknown outcomes.
_MOST_STATES: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of one client, in seconds of one clock. ``returned_s`` is None where nobody knows what became of it."""

    client: str
    name: str
    argument: Any
    called_s: float
    returned_s: float | None = None
    result: Any = None

    @property
    def is_known(self) -> bool:
        """Whether it has returned, so that it must have taken effect, with this result."""
        return self.returned_s is not None

    def __str__(self) -> str:
        until = "?" if self.returned_s is None else f"{self.returned_s:.3f}"
        shown = "" if self.returned_s is None else f" -> {self.result}"
        return f"[{self.called_s:.3f}, {until}] {self.client} {self.name} {self.argument}{shown}"


@dataclass(frozen=True, slots=True)
class Model(Generic[State]):
    """What one object does when its operations come one after the other.

    ``step(state, operation)`` returns the states that the operation may leave; none if it can't have had this result.
    For one of unknown outcome these are the states of all results that it may have had.
    """

    initial: State
    step: Callable[[State, Operation], Iterable[State]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``is_linearizable``, or what stands in the way: the longest order that was found, and who can't follow it.

    ``unknown`` are operations of unknown outcome that are not in that order.
    """

    is_linearizable: bool
    tried: int
    order: tuple[Operation, ...] = ()
    blocked: tuple[Operation, ...] = ()
    unknown: tuple[Operation, ...] = ()
    state: Any = None

    def __str__(self) -> str:
        if self.is_linearizable:
            return f"linearizable, {self.tried} states tried"
        last = "\n".join(f"  {each}" for each in self.order[-8:])
        stuck = "\n".join(f"  {each}" for each in self.blocked[:8])
        late = "\n".join(f"  {each}" for each in self.unknown[-8:])
        text = f"no order after {len(self.order)} operations, of which the last are\n{last}\nat {self.state}:\n{stuck}"
        return f"{text}\nof unknown outcome:\n{late}"


class TooManyStatesError(Exception):
    """The history is too large, or has too many unknown outcomes, for this search."""


def check(model: Model[State], history: Sequence[Operation], most_states: int = _MOST_STATES) -> Verdict:
    """Search for an order of the history that the model allows. Raise TooManyStatesError."""
    # Operations that are known come first where several may: the others need not have happened at all.
    operations = sorted(history, key=lambda each: (each.called_s, not each.is_known))
    ends = [math.inf if each.returned_s is None else each.returned_s for each in operations]
    required = sum(1 << number for number, each in enumerate(operations) if each.is_known)
    # By number in ``operations``: those done, as bits, the state they leave, and the order they were done in.
    open_states: list[tuple[int, State, _Chain | None]] = [(0, model.initial, None)]
    seen = {(0, model.initial)}
    best: tuple[int, State, _Chain | None] = open_states[0]
    while open_states:
        done, state, chain = open_states.pop()
        if done & required == required:
            return Verdict(True, len(seen))
        if (done & required).bit_count() > (best[0] & required).bit_count():
            best = (done, state, chain)
        # Pushed last is tried first.
        for number in reversed(_next_ones(operations, ends, done)):
            for after in model.step(state, operations[number]):
                if after == state and not operations[number].is_known:
                    continue
                reached = (done | 1 << number, after)
                if reached not in seen:
                    seen.add(reached)
                    open_states.append((*reached, (number, chain)))
        if len(seen) > most_states:
            raise TooManyStatesError(f"{len(operations)} operations, {len(seen)} states")
    done, state, chain = best
    blocked = [operations[number] for number in _next_ones(operations, ends, done) if operations[number].is_known]
    unknown = [each for number, each in enumerate(operations) if not each.is_known and not done >> number & 1]
    return Verdict(False, len(seen), _in_order(operations, chain), tuple(blocked), tuple(unknown), state)


#: Numbers of operations, the last one first.
_Chain = tuple[int, Any]


def _next_ones(operations: Sequence[Operation], ends: Sequence[float], done: int) -> list[int]:
    """The operations that are not done and began before any other such one had to be over; known ones first."""
    found: list[int] = []
    until_s = math.inf
    # All before the first zero bit are done.
    number = (~done & (done + 1)).bit_length() - 1
    for each in range(number, len(operations)):
        if operations[each].called_s > until_s:
            break
        if not done >> each & 1:
            found.append(each)
            until_s = min(until_s, ends[each])
    return sorted(found, key=lambda each: (ends[each], each))


def _in_order(operations: Sequence[Operation], chain: _Chain | None) -> tuple[Operation, ...]:
    order: list[Operation] = []
    while chain is not None:
        number, chain = chain
        order.append(operations[number])
    return tuple(reversed(order))
