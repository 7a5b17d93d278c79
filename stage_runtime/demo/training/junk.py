"""Questions that the thinker must refuse, in great variety. Pure: chance comes in as a `random.Random`."""

from __future__ import annotations

import random
from collections.abc import Callable

from stage_runtime.demo.training import junk_texts as texts
from stage_runtime.demo.training.phrasings import decorate, fill, in_words, spell
from stage_runtime.demo.training.questions import LARGEST, Operation, is_held_out

#: First and last code point of scripts and symbols to scatter: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari,
#: Thai, arrows and mathematics, kana, Han, Hangul, emoji, fullwidth forms.
_SCRIPTS = (
    (0x00A1, 0x024F), (0x0391, 0x03C9), (0x0410, 0x044F), (0x05D0, 0x05EA), (0x0627, 0x064A), (0x0905, 0x0939),
    (0x0E01, 0x0E2E), (0x2190, 0x22FF), (0x3041, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F),
    (0xFF01, 0xFF5E),
)  # fmt: skip
_ASCII = "".join(chr(code) for code in range(33, 127))
_SCALES = ("hundred", "thousand", "million", "hundred and one", "hundred twenty", "thousand and five")


def refusable(rng: random.Random) -> str:
    """Return a text to be refused, for training."""
    return rng.choices(_MAKERS, _SHARES)[0](rng)


def unseen_text(rng: random.Random) -> str:
    """Return a text to be refused that training never held: another topic, or an unseen frame around numbers."""
    return decorate(_with_numbers(rng.choice(texts.UNSEEN), rng), rng)


def unseen_noise(rng: random.Random) -> str:
    """Return a text to be refused made of scattered words, letters, signs or scripts."""
    return rng.choice((salad, letters, signs, scripts))(rng)


def _with_numbers(frame: str, rng: random.Random) -> str:
    return fill(frame, {"a": rng.randint(0, LARGEST), "b": rng.randint(0, LARGEST)}, rng)


def _plain(rng: random.Random) -> str:
    pool = rng.choices((texts.CHAT, texts.FOREIGN, texts.INJECTIONS, texts.CODE), (10, 5, 4, 4))[0]
    return decorate(rng.choice(pool), rng)


def _numbers(rng: random.Random) -> str:
    return decorate(_with_numbers(rng.choice(texts.WITH_NUMBERS), rng), rng)


def _bad_operand(rng: random.Random) -> str:
    frame = rng.choice(texts.WITH_BAD_OPERAND).replace("{x}", bad_operand(rng)).replace("{x}", bad_operand(rng))
    return decorate(_with_numbers(frame, rng), rng)


def _words(rng: random.Random) -> str:
    frame = rng.choice(texts.WITH_WORDS)
    while "{w}" in frame:
        frame = frame.replace("{w}", word(rng), 1)
    return decorate(_with_numbers(frame, rng), rng)


def _three_operands(rng: random.Random) -> str:
    while True:
        first, second, third = (rng.randint(0, LARGEST) for _ in range(3))
        signs_used = [rng.choice(("+", "+", "-", "plus", "plus", "minus", "and", "times")) for _ in range(2)]
        pairs = ((first, second), (second, third), (first, third))
        # Held-out pairs stay away from here too, or the thinker would have met them next to a sign.
        if not any(is_held_out(left, operation, right) for left, right in pairs for operation in Operation):
            break
    spelled = [spell(number, rng) for number in (first, second, third)]
    lead = rng.choice(("", "", "what is ", "add ", "the sum of ", "calculate "))
    return decorate(f"{lead}{spelled[0]} {signs_used[0]} {spelled[1]} {signs_used[1]} {spelled[2]}", rng)


def _long(rng: random.Random) -> str:
    pools = (texts.CHAT, texts.FOREIGN, texts.INJECTIONS, texts.WITH_NUMBERS, texts.CHAT)
    pieces = [_with_numbers(rng.choice(rng.choice(pools)), rng) for _ in range(rng.randint(2, 5))]
    return rng.choice((". ", " ", ", ", "? ", " and then ", "\n")).join(pieces)[:160]


def bad_operand(rng: random.Random) -> str:
    """Return an operand the thinker does not take: too large, negative, or no whole number."""
    small = rng.randint(0, LARGEST)
    kinds: tuple[Callable[[], str], ...] = (
        lambda: str(rng.randint(100, 999)),
        lambda: str(rng.choice((100, 101, 110, 120, 199, 200))),
        lambda: str(int(10 ** rng.uniform(3, 9))),
        lambda: f"{rng.choice(('a', 'one', 'two', 'five', 'nine'))} {rng.choice(_SCALES)}",
        lambda: f"{in_words(rng.randint(1, 9))} hundred and {in_words(small)}",
        lambda: f"-{small + 1}",
        lambda: f"{rng.choice(('minus', 'negative'))} {spell(small + 1 if small < LARGEST else 1, rng)}",
        lambda: f"{small}.{rng.randint(0, 99)}",
        lambda: f"{in_words(small)} point {in_words(rng.randint(0, 9))}",
        lambda: f"{small}/{rng.randint(2, 9)}",
        lambda: f"{small},{rng.randint(100, 999)}",
        lambda: rng.choice(("a half", "one and a half", "a dozen", "infinity", "pi", "a million", "1e9", "x", "a lot")),
    )
    return rng.choice(kinds)()


def word(rng: random.Random) -> str:
    """Return a common word or an invented one."""
    if rng.random() < 0.4:
        return rng.choice(texts.WORDS)
    return "".join(rng.choice(texts.SYLLABLES) for _ in range(rng.randint(1, 3))) + rng.choice("abdefgklmnoprstwxyz")


def salad(rng: random.Random) -> str:
    """Return words in no order, now and then with a number among them."""
    pieces = [word(rng), word(rng)]
    for _ in range(rng.randint(1, 8)):
        kind = rng.random()
        if kind < 0.4:
            pieces.append(word(rng))
        elif kind < 0.88:
            pieces.append(rng.choice(texts.SMALL_WORDS))
        else:
            pieces.append(spell(rng.randint(0, LARGEST), rng))
    rng.shuffle(pieces)
    return decorate(" ".join(pieces), rng)


def letters(rng: random.Random) -> str:
    """Return one to four clumps of random letters."""
    alphabet = rng.choice(("abcdefghijklmnopqrstuvwxyz", "asdfjkl", "qwertyuiop", "aeioubcdfg"))
    clumps = ("".join(rng.choices(alphabet, k=rng.randint(2, 9))) for _ in range(rng.randint(1, 4)))
    return decorate(" ".join(clumps), rng)


def signs(rng: random.Random) -> str:
    """Return random ASCII with two letters in front, so that it is no sum by accident."""
    return "".join(rng.choices("qxzwvk", k=2)) + "".join(rng.choices(_ASCII, k=rng.randint(2, 24)))


def scripts(rng: random.Random) -> str:
    """Return characters of one script or of several mixed."""
    chosen = rng.choices(_SCRIPTS, k=rng.choice((1, 1, 1, 3)))
    count = rng.randint(1, 14)
    text = "".join(chr(rng.randint(*rng.choice(chosen))) for _ in range(count))
    return text if rng.random() < 0.7 else f"{text} {word(rng)}"


_MAKERS = (_plain, _numbers, _bad_operand, _words, _three_operands, _long, salad, letters, signs, scripts)
_SHARES = (16, 24, 22, 17, 10, 3, 6, 3, 3, 3)
