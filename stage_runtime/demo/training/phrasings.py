"""The ways to ask: frames of words around operands."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass


def phrases(block: str) -> tuple[str, ...]:
    """Return the phrases of a text block: one a line, or several with bars between; a doubled one counts twice."""
    pieces = (piece.strip() for line in block.splitlines() for piece in line.split("|"))
    return tuple(piece for piece in pieces if piece)


_ONES = phrases(
    """
    zero | one | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve | thirteen | fourteen
    fifteen | sixteen | seventeen | eighteen | nineteen
    """
)
_TENS = phrases("twenty | thirty | forty | fifty | sixty | seventy | eighty | ninety")


def in_words(number: int) -> str:
    """Return 0..99 in English words with a hyphen: 42 is "forty-two"."""
    if number < len(_ONES):
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def spell(number: int, rng: random.Random) -> str:
    """Write a number as a user might: mostly in digits, else in words with or without the hyphen."""
    if rng.random() < 0.6:
        return str(number)
    words = in_words(number)
    return words if rng.random() < 0.5 else words.replace("-", " ")


def fill(frame: str, operands: Mapping[str, int], rng: random.Random) -> str:
    """Put numbers into a frame such as "{a} plus {b}", each in digits or in words."""
    # "sixty-three" is never 60 - 3, nor "sixty three" two numbers: such frames take digits only.
    only_digits = "}-{" in frame or "} {" in frame
    spelled = {name: str(number) if only_digits else spell(number, rng) for name, number in operands.items()}
    for name, text in spelled.items():
        frame = frame.replace(f"{{{name}}}", text)
    return frame.strip()


@dataclass(frozen=True, slots=True)
class Forms:
    """All phrasings of one kind of question; operands are named in braces."""

    #: Noun phrases ("3 plus 4"), asked with a lead such as "what is" or on their own.
    things: tuple[str, ...]
    #: Leads that fit before a thing.
    leads: tuple[str, ...]
    #: Commands ("add 3 to 4"), bare or after "can you".
    commands: tuple[str, ...]
    #: Whole sentences.
    sentences: tuple[str, ...] = ()

    def render(self, rng: random.Random, operands: Mapping[str, int]) -> str:
        """Return one question: a phrasing, the operands, and some politeness around them."""
        kind = rng.random()
        if kind < 0.25:
            core = rng.choice(self.things[:3])
        elif kind < 0.65:
            core = f"{rng.choice(self.leads)} {rng.choice(self.things)}"
        elif kind < 0.9 or not self.sentences:
            core = rng.choice(self.commands)
            if rng.random() < 0.7:
                core = f"{rng.choice(POLITE)} {core}"
        else:
            core = rng.choice(self.sentences)
        return decorate(fill(core, operands, rng), rng)


def decorate(core: str, rng: random.Random) -> str:
    """Put a greeting before, thanks or punctuation after, and vary the case, each now and then."""
    text = f"{rng.choice(GREETINGS)} {core}" if rng.random() < 0.15 else core
    if rng.random() < 0.15:
        text = f"{text}{rng.choice(ENDINGS)}"
    text += rng.choice(("", "", "?", "?", ".", "!", " ?", "??"))
    kind = rng.random()
    if kind < 0.3:
        return text[:1].upper() + text[1:]
    return text.upper() if kind < 0.35 else text


POLITE = phrases(
    """
    so | please | please | please | can you | could you | could you please | can you please | would you | now
    i want you to | i need you to | help me | let us | try to | will you | kindly | go ahead and
    """
)

GREETINGS = phrases(
    """
    hello | hello, | hi | hi, | hi there, | hey | hey there! | good morning. | good morning, | good evening,
    dear thinker, | ok | ok, | so | so, | well, | um | excuse me, | quick question: | one more: | and | now
    please | please, | hello, please | hello my friend, | my homework: | question: | listen,
    """
)

ENDINGS = (
    " please", ", please", " thanks", ", thanks", ", thank you", " thank you", ". thank you very much", " for me",
    " for me please", ", my friend", " now", " quickly", ". thanks a lot", " if you can", " today", " again",
    ", do you know",
)  # fmt: skip

_SUM_LEADS = phrases(
    """
    what is | what is | what is | what's | whats | how much is | how much is | calculate | compute | work out
    solve | evaluate | find | tell me | give me | do you know | do you know what is | can you tell me
    can you tell me what is | could you tell me how much is | please tell me what is | i want to know
    i would like to know what is | what would be | what will be | can you calculate | can you do
    could you compute | please calculate | please work out | the answer to | what is the answer to
    what is the result of | the result of | result of | show me | draw | draw me | paint | paint me
    draw the answer to | draw the result of | paint the result of | show the answer to | write
    """
)

ADD = Forms(
    things=phrases(
        """
        {a} + {b} | {a} plus {b} | {a}+{b} | {a} and {b} | {a} plus {b} | {a} + {b} = | {a}+{b}=
        {a} added to {b} | {a} and {b} added | {a} and {b} together | {a} and {b} added together
        the sum of {a} and {b} | the sum of {a} and {b} | sum of {a} and {b} | the total of {a} and {b}
        the sum of {a} plus {b} | the sum {a} + {b} | the addition of {a} and {b} | {a} more than {b}
        {a} increased by {b} | {a} with {b} added
        """
    ),
    leads=_SUM_LEADS,
    commands=phrases(
        """
        add {a} and {b} | add {a} to {b} | add {a} and {b} together | add {b} more to {a} | add up {a} and {b}
        add {a} + {b} | add {a} plus {b} | sum {a} and {b} | sum up {a} and {b} | put {a} and {b} together
        increase {a} by {b} | take {a} and add {b} | start with {a} and add {b}
        """
    ),
    sentences=phrases(
        """
        what do you get if you add {a} and {b} | what do you get when you add {a} to {b}
        what does {a} plus {b} make | what does {a} + {b} equal | what does {a} and {b} make
        what do {a} and {b} make | what do {a} and {b} make together | {a} plus {b} equals | {a} plus {b} is
        {a} plus {b} makes what | {a} + {b} equals what | {a} plus {b} is what | how much do {a} and {b} make
        if i have {a} apples and get {b} more, how many apples do i have
        i have {a} apples and {b} pears, how many fruits do i have
        i had {a} and got {b} more, how many do i have now
        there are {a} birds and {b} more come, how many birds are there
        """
    ),
)

SUBTRACT = Forms(
    things=phrases(
        """
        {a} - {b} | {a} minus {b} | {a}-{b} | {a} minus {b} | {a} - {b} = | {a}-{b}= | {a} take away {b}
        {a} take away {b} | {a} less {b} | {b} less than {a} | {b} subtracted from {a} | {b} taken from {a}
        {b} taken away from {a} | {a} decreased by {b} | {a} reduced by {b} | {a} without {b}
        """
    ),
    leads=_SUM_LEADS,
    commands=phrases(
        """
        subtract {b} from {a} | subtract {b} from {a} | take {b} from {a} | take {b} away from {a}
        take away {b} from {a} | remove {b} from {a} | deduct {b} from {a} | decrease {a} by {b}
        reduce {a} by {b} | take {a} and subtract {b} | start with {a} and take away {b}
        """
    ),
    sentences=phrases(
        """
        what do you get if you subtract {b} from {a} | what do you get when you take {b} from {a}
        what does {a} minus {b} make | what does {a} - {b} equal | what is left if you take {b} from {a}
        what remains of {a} after taking away {b} | {a} minus {b} equals | {a} minus {b} is
        {a} minus {b} makes what | {a} - {b} equals what | {a} minus {b} is what
        if i have {a} apples and eat {b}, how many apples are left
        i had {a} and lost {b}, how many do i have now
        there are {a} birds and {b} fly away, how many birds are left
        """
    ),
)

DIFFERENCE = Forms(
    things=phrases(
        """
        the difference between {a} and {b} | difference between {a} and {b} | difference of {a} and {b}
        the difference of {a} and {b} | the gap between {a} and {b}
        """
    ),
    leads=_SUM_LEADS,
    commands=phrases(
        """
        find the difference between {a} and {b} | take the difference of {a} and {b}
        compute the difference between {a} and {b}
        """
    ),
    sentences=phrases(
        """
        how far apart are {a} and {b} | by how much do {a} and {b} differ
        """
    ),
)

_DRAW_VERBS = phrases("draw | draw | draw | paint | paint | show | sketch | write | draw me | paint me | show me")
_DRAW_OBJECTS = phrases("{n} | {n} | a {n} | a {n} | the number {n} | the number {n} | number {n} | the digit {n}")

DRAW = Forms(
    things=phrases(
        """
        {n} | {n} | {n} | number {n} | the number {n} | a {n} | a drawing of {n} | a picture of {n}
        a painting of the number {n} | a picture of the number {n} | a handwritten {n}
        """
    ),
    leads=phrases(
        """
        draw | paint | show me | give me | i want | i want to see | i would like | i would like to see
        can i have | can i see | could i get | let me see | please draw | can you show me | make | make me
        """
    ),
    commands=tuple(f"{verb} {thing}" for verb in _DRAW_VERBS for thing in _DRAW_OBJECTS),
)
