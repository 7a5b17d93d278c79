"""What shared state does when nothing is concurrent: a key, the owner of an id, the pipeline, a flag, a set of hubs.

Each step returns the states that an operation may leave; see ``Model``. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.linearizability.search import Model, Operation

#: A revision that nobody was told: that of a write whose answer was lost.
UNTOLD: Final = -1


@dataclass(frozen=True, slots=True)
class Held:
    """What a key holds. Revisions may be UNTOLD."""

    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class KeyState:
    """One key: what it holds, and a revision that its next write must be above."""

    held: Held | None = None
    above: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """A write on conditions. ``expected``: the key's mod_revision, 0 for no key at all, None for whatever is there.

    ``value`` is None for a delete; ``ends`` is a lease to end, and the key with it if it has that one.
    """

    value: bytes | None = None
    lease_id: int = 0
    expected: int | None = None
    ends: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """``done``: the write took effect. ``held``: the key behind it, where ``tells`` says that this was told."""

    done: bool
    held: Held | None = None
    tells: bool = False
    revision: int = UNTOLD


def _key(state: KeyState, operation: Operation) -> Iterator[KeyState]:
    if operation.name == "read":
        yield from _seen(state, operation.result)
        return
    write, answer = operation.argument, operation.result
    if write.ends:
        # Unknown or answered: it has no other effect than that.
        if state.held is not None and state.held.lease_id == write.ends:
            yield KeyState(None, state.above)
        else:
            yield state
        return
    for before in _expected(state, write):
        after = _written(before, write)
        if answer is None:
            yield after
        elif answer.done:
            yield from _told(after, answer)
    if answer is not None and answer.done and answer.tells and answer.held == state.held and state.held is not None:
        # Of two that write the same at once, one whose answer was lost takes the other's write for its own.
        yield state
    if answer is not None and not answer.done and _may_fail(state, write):
        yield from _seen(state, answer.held) if answer.tells else (state,)


def _expected(state: KeyState, write: Write) -> Iterator[KeyState]:
    """The state, if it is as the write's condition has it; what was untold of it is known then."""
    held = state.held
    if write.expected is None:
        # Only a delete can have nothing to do.
        if write.value is not None or held is not None:
            yield state
    elif write.expected == 0:
        if held is None:
            yield state
    elif held is not None and held.mod_revision == write.expected:
        yield state
    elif held is not None and held.mod_revision == UNTOLD and write.expected > state.above:
        yield KeyState(replace(held, mod_revision=write.expected), write.expected)


def _may_fail(state: KeyState, write: Write) -> bool:
    held = state.held
    if write.expected is None:
        return write.value is None and held is None
    if write.expected == 0:
        return held is not None
    return held is None or held.mod_revision != write.expected


def _written(before: KeyState, write: Write) -> KeyState:
    if write.value is None:
        return KeyState(None, before.above)
    created = UNTOLD if before.held is None else before.held.create_revision
    return KeyState(Held(write.value, created, UNTOLD, write.lease_id), before.above)


def _told(after: KeyState, answer: Answer) -> Iterator[KeyState]:
    if answer.tells:
        yield from _seen(after, answer.held)
    elif answer.revision != UNTOLD and after.held is not None:
        # Of the two revisions only the one of the write was told.
        if answer.revision > after.above:
            created = after.held.create_revision
            yield KeyState(replace(after.held, create_revision=created, mod_revision=answer.revision), answer.revision)
    else:
        yield after


def _seen(state: KeyState, seen: Held | None) -> Iterator[KeyState]:
    """The state, if the key can be ``seen`` there; what was untold of it is known then."""
    held = state.held
    if held is None or seen is None:
        if held is None and seen is None:
            yield state
        return
    is_same = (held.value, held.lease_id) == (seen.value, seen.lease_id)
    is_new = held.mod_revision == UNTOLD and seen.mod_revision > state.above
    fits = is_new or held.mod_revision == seen.mod_revision
    if is_same and fits and held.create_revision in (UNTOLD, seen.create_revision):
        yield KeyState(seen, max(state.above, seen.mod_revision))


#: One key of etcd: ``write`` with a Write and an Answer, ``read`` with the Held that was read, or None.
KEY: Final = Model(KeyState(), _key)


def _claim(state: tuple[str, int], operation: Operation) -> Iterator[tuple[str, int]]:
    owner, epoch = state
    match operation.name:
        case "claim":
            if not owner and operation.argument > epoch:
                yield operation.client, operation.argument
        case "own":
            if (owner, epoch) == (operation.client, operation.argument):
                yield state
        case "end":
            if (owner, epoch) == (operation.client, operation.argument):
                yield "", epoch
            elif not operation.is_known:
                yield state
        case "read":
            if operation.result == (epoch if owner else 0):
                yield state


#: One id of a stage: ``claim`` under an epoch, ``own`` it still, its ``end``, and ``read``: the epoch, 0 for nobody's.
CLAIM: Final = Model(("", 0), _claim)


def _register(state: Any, operation: Operation) -> Iterator[Any]:
    """``first``: written if there is nothing; the result is what is in force then."""
    match operation.name:
        case "first":
            after = operation.argument if state is None else state
            if not operation.is_known or operation.result == after:
                yield after
        case "replace":
            yield operation.argument
        case "read":
            if operation.result == state:
                yield state


#: The pipeline in force, or one flag: ``first``, ``replace`` and ``read``.
REGISTER: Final = Model(None, _register)
FLAG: Final = Model(False, _register)


def _acknowledged(state: bool, operation: Operation) -> Iterator[bool]:
    match operation.name:
        case "acknowledge":
            yield True
        case "pick":
            if not state:
                yield state


#: The drain of one life: once every hub has acknowledged it, none picks that replica.
DRAIN: Final = Model(False, _acknowledged)


def _members(state: frozenset[str], operation: Operation) -> Iterator[frozenset[str]]:
    match operation.name:
        case "add":
            yield state | {operation.argument}
        case "remove":
            yield state - {operation.argument}
        case "read":
            if operation.result == state:
                yield state


#: The hubs that are revoked: ``add``, ``remove``, and ``read`` of them all.
MEMBERS: Final[Model[frozenset[str]]] = Model(frozenset(), _members)
