"""The thinker's questions and their answers: sums, differences and numbers to draw, from 0 to 99.

Pure: chance comes in as a `random.Random`. Some pairs of operands are held out: no training question holds them in any
phrasing or order, so answering them shows that the thinker computes and does not recall.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from stage_runtime.demo.training import phrasings

LARGEST = 99
REFUSAL = "I can only do sums from 0 to 99."
HELD_OUT_SEED = 20240
HELD_OUT_SHARE = 0.1
#: How far from the limit training likes to go; 0 is the last pair that has an answer.
_NEAR_LIMIT = (-11, -10, -5, -3, -2, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 5, 10, 11)


class Operation(Enum):
    """The two things the thinker can compute; the value is the sign it writes."""

    ADD = "+"
    SUBTRACT = "-"


@dataclass(frozen=True, slots=True)
class ThinkerAnswer:
    """The thinker's answer, and the digits that it hands to the painter ("" for no picture)."""

    text: str
    digits: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question as a user would type it, with the one right answer."""

    text: str
    answer: ThinkerAnswer


REFUSED = ThinkerAnswer(REFUSAL, "")


def answer_sum(first: int, operation: Operation, second: int) -> ThinkerAnswer:
    """Return the answer to `first operation second`: a refusal where an operand or the result is not in 0..99."""
    result = first + second if operation is Operation.ADD else first - second
    if not all(0 <= number <= LARGEST for number in (first, second, result)):
        return REFUSED
    return ThinkerAnswer(f"{first} {operation.value} {second} = {result}", str(result))


def answer_draw(number: int) -> ThinkerAnswer:
    """Return the answer to "draw this number": a refusal outside 0..99."""
    return ThinkerAnswer(f"Here is {number}", str(number)) if 0 <= number <= LARGEST else REFUSED


def held_out_pairs(operation: Operation) -> frozenset[tuple[int, int]]:
    """Return the pairs (smaller, larger) that training never shows for this operation, in either order."""
    pairs = [(low, high) for low in range(LARGEST + 1) for high in range(low, LARGEST + 1)]
    rng = random.Random(f"{HELD_OUT_SEED}{operation.value}")
    return frozenset(rng.sample(pairs, round(HELD_OUT_SHARE * len(pairs))))


_HELD_OUT = {operation: held_out_pairs(operation) for operation in Operation}


def is_held_out(first: int, operation: Operation, second: int) -> bool:
    """Whether training never shows these two operands, in this or the other order."""
    return (min(first, second), max(first, second)) in _HELD_OUT[operation]


def ask_sum(first: int, operation: Operation, second: int, rng: random.Random) -> Question:
    """Ask `first operation second` in one of the many phrasings."""
    if operation is Operation.ADD:
        forms = phrasings.ADD
    elif first >= second and rng.random() < 0.2:
        return _ask_difference(first, second, rng)
    else:
        forms = phrasings.SUBTRACT
    text = forms.render(rng, {"a": first, "b": second})
    return Question(text, answer_sum(first, operation, second))


def _ask_difference(larger: int, smaller: int, rng: random.Random) -> Question:
    # "The difference between 3 and 9" has no sign in plain English: the larger comes first in the answer.
    one, other = rng.sample([larger, smaller], 2)
    text = phrasings.DIFFERENCE.render(rng, {"a": one, "b": other})
    return Question(text, answer_sum(larger, Operation.SUBTRACT, smaller))


def ask_draw(number: int, rng: random.Random) -> Question:
    """Ask for a picture of a number in one of the many phrasings."""
    return Question(phrasings.DRAW.render(rng, {"n": number}), answer_draw(number))


def random_pair(operation: Operation, rng: random.Random) -> tuple[int, int]:
    """Return operands of a training question: mostly answerable, never held out, often close to the limits."""
    while True:
        first, second = _any_pair(operation, rng)
        if not is_held_out(first, operation, second):
            return first, second


def _any_pair(operation: Operation, rng: random.Random) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.25:
        first = rng.randint(0, LARGEST)
        # Right at the limit one unit decides between an answer and a refusal.
        limit = LARGEST - first if operation is Operation.ADD else first
        return first, min(LARGEST, max(0, limit + rng.choice(_NEAR_LIMIT)))
    if kind < 0.32:
        return rng.randint(0, 12), rng.randint(0, 12)
    first, second = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    if kind < 0.9 and answer_sum(first, operation, second) == REFUSED:
        # Mirror an unanswerable pair into an answerable one, evenly spread over those.
        return (LARGEST - first, LARGEST - second) if operation is Operation.ADD else (second, first)
    return first, second


def training_question(rng: random.Random, refusable: Callable[[random.Random], str]) -> Question:
    """Draw one training question; `refusable` makes the text of one that must be refused."""
    kind = rng.random()
    if kind < 0.34:
        first, second = random_pair(Operation.ADD, rng)
        return ask_sum(first, Operation.ADD, second, rng)
    if kind < 0.68:
        first, second = random_pair(Operation.SUBTRACT, rng)
        return ask_sum(first, Operation.SUBTRACT, second, rng)
    if kind < 0.75:
        return ask_draw(rng.randint(0, LARGEST), rng)
    return Question(refusable(rng), REFUSED)


def held_out_questions(operation: Operation, rng: random.Random) -> list[Question]:
    """Ask every held-out pair once in each order, each time in a phrasing of its own."""
    return [
        ask_sum(first, operation, second, rng)
        for low, high in sorted(_HELD_OUT[operation])
        for first, second in ([(low, high), (high, low)] if low != high else [(low, high)])
    ]
