"""What the talker says to an answer of the thinker, in words, and the answers that it is trained with.

Pure: chance comes in as a ``random.Random``. Sums that are held out from the thinker are held out from the talker too.
"""

from __future__ import annotations

import random
import re
from typing import Final

from stage_runtime.demo.training.questions import (
    LARGEST,
    Operation,
    ThinkerAnswer,
    answer_draw,
    answer_sum,
    is_held_out,
)

_ONES: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
#: Every word that is ever said.
WORDS: Final = (*_ONES, *_TENS, "the", "answer", "is", "here")
_SUM: Final = re.compile(r"\d+ [-+] \d+ = (\d\d?)")
_DRAW: Final = re.compile(r"Here is (\d\d?)")
_SHARE_OF_DRAWS: Final = 0.15


def number_words(number: int) -> tuple[str, ...]:
    """A number from 0 to 99 in words."""
    if number < len(_ONES):
        return (_ONES[number],)
    tens, ones = divmod(number, 10)
    return (_TENS[tens - 2], *((_ONES[ones],) if ones else ()))


def spoken(answer: str) -> tuple[str, ...]:
    """The words for an answer: to "12 + 30 = 42", "the answer is forty two". Raise ValueError where none are said."""
    if found := _SUM.fullmatch(answer):
        return ("the", "answer", "is", *number_words(int(found[1])))
    if found := _DRAW.fullmatch(answer):
        return ("here", "is", *number_words(int(found[1])))
    raise ValueError(f"nothing is said to {answer!r}")


def all_spoken() -> list[tuple[str, ...]]:
    """Every sentence that is ever said: 200."""
    numbers = range(LARGEST + 1)
    return [spoken(f"0 + 0 = {number}") for number in numbers] + [spoken(f"Here is {number}") for number in numbers]


def held_out_sums() -> list[ThinkerAnswer]:
    """Every right sum and difference whose operands no training shows, in either order."""
    return [
        answer_sum(first, operation, second)
        for operation in Operation
        for first in range(LARGEST + 1)
        for second in range(LARGEST + 1)
        if answer_sum(first, operation, second).digits and is_held_out(first, operation, second)
    ]


def any_answer(rng: random.Random) -> ThinkerAnswer:
    """An answer to learn from. Most of the sums are wrong: who learns from them learns to read the result."""
    if rng.random() < _SHARE_OF_DRAWS:
        return answer_draw(rng.randint(0, LARGEST))
    first, second, result = (rng.randint(0, LARGEST) for _ in range(3))
    operation = rng.choice(list(Operation))
    if is_held_out(first, operation, second):
        return any_answer(rng)
    return ThinkerAnswer(f"{first} {operation.value} {second} = {result}", str(result))
