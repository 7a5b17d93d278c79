"""The search judged by histories of which it is known whether they could have happened."""

from __future__ import annotations

from itertools import permutations, product
from random import Random
from typing import Any

import pytest

from tests.linearizability.models import CLAIM, DRAIN, FLAG, KEY, MEMBERS, REGISTER, Answer, Held, Write
from tests.linearizability.search import Model, Operation, TooManyStatesError, check


def op(
    client: str, name: str, argument: Any, called_s: float, returned_s: float | None, result: Any = None
) -> Operation:
    return Operation(client, name, argument, called_s, returned_s, result)


GOOD = {
    "reads beside a write see either": (
        REGISTER,
        [
            op("a", "replace", "x", 0, 1),
            op("b", "replace", "y", 2, 6),
            op("c", "read", None, 3, 4, "y"),
            op("d", "read", None, 3, 5, "x"),
        ],
    ),
    "a write without an answer takes effect late": (
        REGISTER,
        [
            op("a", "replace", "x", 0, 1),
            op("b", "replace", "y", 2, None),
            op("c", "read", None, 3, 4, "x"),
            op("c", "read", None, 8, 9, "y"),
        ],
    ),
    "a write without an answer never takes effect": (
        REGISTER,
        [op("a", "replace", "x", 0, 1), op("b", "replace", "y", 2, None), op("c", "read", None, 30, 40, "x")],
    ),
    "an id changes hands once its lease may have ended": (
        CLAIM,
        [
            op("a", "claim", 5, 0, 1),
            op("a", "own", 5, 2, 2),
            op("a", "end", 5, 4, None),
            op("b", "claim", 9, 3, 6),
            op("b", "own", 9, 7, 7),
        ],
    ),
    "a key is written again by who saw it, though the answer to the write was lost": (
        KEY,
        [
            op("a", "write", Write(b"x", expected=0), 0, None),
            op("b", "read", None, 1, 2, Held(b"x", 7, 7)),
            op("b", "write", Write(b"y", expected=7), 3, 4, Answer(True, Held(b"y", 7, 8), True)),
        ],
    ),
    "two that write the same at once": (
        KEY,
        [
            op("a", "write", Write(b"x", expected=0), 0, 9, Answer(True, Held(b"x", 7, 7), True)),
            op("b", "write", Write(b"x", expected=0), 1, 2, Answer(True, Held(b"x", 7, 7), True)),
        ],
    ),
    "a revoked hub is seen by those who ask later": (
        MEMBERS,
        [op("a", "add", "h", 0, 2), op("b", "read", None, 1, 3, frozenset()), op("b", "read", None, 3, 4, {"h"})],
    ),
    "a pick just before the last acknowledgement": (
        DRAIN,
        [op("r", "acknowledge", None, 0, 5), op("h", "pick", True, 4, 4)],
    ),
}

WRONG = {
    "a stale read": (
        REGISTER,
        [op("a", "replace", "x", 0, 1), op("a", "replace", "y", 2, 3), op("b", "read", None, 4, 5, "x")],
    ),
    "reads that go back": (
        REGISTER,
        [
            op("a", "replace", "x", 0, 1),
            op("b", "replace", "y", 2, None),
            op("c", "read", None, 3, 4, "y"),
            op("d", "read", None, 5, 6, "x"),
        ],
    ),
    "a value that nobody wrote": (REGISTER, [op("a", "first", "x", 0, 1, "x"), op("b", "read", None, 2, 3, "z")]),
    "two that were the first": (
        REGISTER,
        [op("a", "first", "x", 0, 2, "x"), op("b", "first", "y", 1, 3, "y")],
    ),
    "a lost update": (
        KEY,
        [
            op("a", "write", Write(b"0", expected=0), 0, 1, Answer(True, Held(b"0", 5, 5), True)),
            op("a", "write", Write(b"1", expected=5), 2, 4, Answer(True, Held(b"1", 5, 6), True)),
            op("b", "write", Write(b"2", expected=5), 3, 5, Answer(True, Held(b"2", 5, 7), True)),
        ],
    ),
    "a write that is said to have failed, and was read": (
        KEY,
        [
            op("a", "write", Write(b"0", expected=0), 0, 1, Answer(True, Held(b"0", 5, 5), True)),
            op("b", "write", Write(b"1", expected=5), 2, 7, Answer(False, Held(b"2", 5, 7), True)),
            op("c", "read", None, 3, 4, Held(b"1", 5, 6)),
            op("c", "write", Write(b"2", expected=6), 5, 6, Answer(True, Held(b"2", 5, 7), True)),
        ],
    ),
    "a key that is there behind the end of its lease": (
        KEY,
        [
            op("a", "write", Write(b"0", 3, expected=0), 0, 1, Answer(True, Held(b"0", 5, 5, 3), True)),
            op("a", "write", Write(ends=3), 2, 3, Answer(True)),
            op("b", "read", None, 4, 5, Held(b"0", 5, 5, 3)),
        ],
    ),
    "two owners of one id": (
        CLAIM,
        [
            op("a", "claim", 5, 0, 1),
            op("a", "end", 5, 9, None),
            op("b", "claim", 6, 2, 3),
        ],
    ),
    "an owner that was followed": (
        CLAIM,
        [
            op("a", "claim", 5, 0, 1),
            op("a", "end", 5, 2, None),
            op("b", "claim", 6, 3, 4),
            op("a", "own", 5, 5, 5),
        ],
    ),
    "an epoch that goes back": (
        CLAIM,
        [op("a", "claim", 5, 0, 1), op("a", "end", 5, 2, 3), op("b", "claim", 4, 4, 5)],
    ),
    "an owner that nobody reads any more": (
        CLAIM,
        [op("a", "claim", 5, 0, 1), op("a", "end", 5, 8, None), op("b", "read", None, 2, 3, 0)],
    ),
    "a cordon that was answered, and is not there": (
        FLAG,
        [op("a", "replace", True, 0, 1), op("b", "read", None, 2, 3, False)],
    ),
    "a pick behind the acknowledgement of a drain": (
        DRAIN,
        [op("r", "acknowledge", None, 0, 3), op("h", "pick", True, 4, 4)],
    ),
    "a revoked hub that is let in by one read and not by the next": (
        MEMBERS,
        [
            op("a", "add", "h", 0, 10),
            op("b", "read", None, 1, 2, frozenset({"h"})),
            op("c", "read", None, 3, 4, frozenset()),
        ],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_could_have_happened_is_found_to(name: str) -> None:
    model, history = GOOD[name]
    verdict = check(model, history)
    assert verdict.is_linearizable, str(verdict)


@pytest.mark.parametrize("name", WRONG)
def test_what_could_not_have_happened_is_found_out(name: str) -> None:
    model, history = WRONG[name]
    verdict = check(model, history)
    assert not verdict.is_linearizable
    assert verdict.blocked, "the report names who stands in the way"


def linearizable_by_force(model: Model[Any], history: list[Operation]) -> bool:
    """Every order of every choice of the unknown ones, one by one."""
    known = [each for each in history if each.is_known]
    unknown = [each for each in history if not each.is_known]
    for chosen in product((False, True), repeat=len(unknown)):
        taken = known + [each for each, is_in in zip(unknown, chosen, strict=True) if is_in]
        for order in permutations(taken):
            keeps_time = all(
                not (later.returned_s is not None and later.returned_s < earlier.called_s)
                for place, earlier in enumerate(order)
                for later in order[place + 1 :]
            )
            states = {model.initial}
            for each in order if keeps_time else ():
                states = {after for state in states for after in model.step(state, each)}
            if keeps_time and states:
                return True
    return False


def drawn(chance: Random) -> list[Operation]:
    """A few operations on a register at random, right or wrong."""
    history = []
    for number in range(chance.randint(2, 5)):
        called_s = chance.randint(0, 8)
        name = chance.choice(("replace", "read", "first"))
        is_known = name == "read" or chance.random() < 0.7
        value = chance.choice("xy")
        result = chance.choice(("x", "y", None)) if name != "replace" else None
        returned_s = called_s + chance.randint(0, 4) if is_known else None
        history.append(op(f"c{number}", name, value, called_s, returned_s, result))
    return history


def test_the_search_says_what_trying_every_order_says() -> None:
    chance = Random(7)
    verdicts = set()
    for _ in range(1500):
        history = drawn(chance)
        verdict = check(REGISTER, history).is_linearizable
        assert verdict == linearizable_by_force(REGISTER, history), "\n".join(map(str, history))
        verdicts.add(verdict)
    assert verdicts == {True, False}


def test_a_search_without_end_is_given_up_aloud() -> None:
    writes = [op(f"c{number}", "replace", number, 0, None) for number in range(16)]
    with pytest.raises(TooManyStatesError):
        check(REGISTER, [*writes, op("r", "read", None, 1, 2, "other")], most_states=1000)


def test_a_long_history_of_few_at_once_is_searched_in_no_time() -> None:
    history = []
    for number in range(3000):
        history.append(op(f"c{number % 4}", "replace", number, number, number + 2.5))
        history.append(op("r", "read", None, number + 2.6, number + 2.8, number))
    verdict = check(REGISTER, history)
    assert verdict.is_linearizable
    assert verdict.tried < 10 * len(history)
