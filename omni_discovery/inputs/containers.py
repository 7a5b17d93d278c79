"""What a text of JSON holds that costs far more than its bytes, counted before it is decoded: lists, objects, names,
values and numbers at the ends of what a float can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError

#: Lists and objects of one body.
MAX_CONTAINERS: Final = 50_000
#: Names in the objects of one body: some 2 us each, for which the hub's loop waits.
MAX_NAMES: Final = 1 << 16
#: Values of one body: as many token ids as a request may have.
MAX_VALUES: Final = 1 << 19
#: Objects that a model of vLLM's server is made of, such as messages, their parts and calls: some 50 us each, for which
#: the hub's loop waits.
MAX_OBJECTS: Final = 4096
#: Of them those of items, as ``/v1/responses`` has them: some 0.2 ms each, as one of the many kinds that one may be of.
#: What is thought, the call of a tool, and its result are four together.
MAX_ITEM_OBJECTS: Final = 2048
#: Values of a field of which no stage takes more: some 1 us each, to find out that they are too many.
MAX_FEW_VALUES: Final = 4096
#: Values in messages: some 10 us each, as one of the many kinds that a part of a message may be of.
MAX_MESSAGE_VALUES: Final = 1 << 14
#: Numbers like 1e308, with three digits or more in the exponent: msgspec reads those near the ends of what a float can
#: be digit by digit, some 8 us each, where any other takes 0.3 us.
MAX_EXTREMES: Final = 1024
#: What is counted of arguments of calls, outside of strings.
_BOUNDS: Final = (
    (b"[{", MAX_CONTAINERS, "lists and objects"),
    (b":", MAX_NAMES, "names"),
    (b",", MAX_VALUES, "values"),
)
#: What makes every such number look alike, beside what goes between two.
_AS_DIGITS: Final = bytes.maketrans(b"123456789E", b"000000000e")
_NO_NUMBERS: Final = bytes(set(range(256)) - set(b'0123456789eE,:"'))
_EXTREME: Final = b"0e000"
_LONG_STRING: Final = 64


def check_text(text: bytes) -> None:
    """Raise InvalidRequestError if a client's text of JSON may cost too much to be decoded by msgspec."""
    check_containers(text)
    if _has_more(text, b":", MAX_NAMES):
        raise InvalidRequestError(f"more than {MAX_NAMES} names in its objects: send less in one request")
    if has_many_extremes(text):
        raise InvalidRequestError(
            f"more than {MAX_EXTREMES} numbers with exponents of three digits, such as 1e300: send fewer of them"
        )


def has_many_extremes(text: bytes) -> bool:
    """Whether a text of JSON has more than MAX_EXTREMES numbers with exponents of three digits, outside of strings."""
    if len(text) < MAX_EXTREMES * len(_EXTREME):
        return False
    # A few passes in C over the text, whatever is in it; many short strings are the slowest to take out.
    plain = _without_escapes(text)
    has_long_strings = plain.count(b'"') * _LONG_STRING < len(plain)
    signs = (_outside_strings(plain) if has_long_strings else plain).translate(_AS_DIGITS, _NO_NUMBERS)
    return signs.count(_EXTREME) > MAX_EXTREMES and _outside_strings(signs).count(_EXTREME) > MAX_EXTREMES


def decode_any(text: str | bytes) -> Any:
    """Decode JSON of any kind: every number takes about as long as another. Raise as msgspec does."""
    return _any_decoder.decode(text)


def _float_of(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


_any_decoder: Final = msgspec.json.Decoder(float_hook=_float_of)


def check_containers(body: bytes) -> None:
    """Raise InvalidRequestError if a body of JSON has more than MAX_CONTAINERS lists and objects."""
    if _has_more(body, b"[{", MAX_CONTAINERS):
        raise InvalidRequestError(
            f"the body has more than {MAX_CONTAINERS} lists and objects: send less in one request"
        )


def check_values(body: bytes) -> None:
    """Raise InvalidRequestError if a body of JSON has more than MAX_VALUES values."""
    if _has_more(body, b",", MAX_VALUES):
        raise InvalidRequestError(
            f"the body has more than {MAX_VALUES} values, such as token ids: send less in one request"
        )


def check_objects(parts: Iterable[bytes]) -> None:
    """Raise InvalidRequestError if parts of a body of JSON have more than MAX_OBJECTS objects in all."""
    if sum(_number_of(b"{", part) for part in parts if b"{" in part) > MAX_OBJECTS:
        raise InvalidRequestError(
            f"the body has more than {MAX_OBJECTS} objects beside its tools and forms, such as messages, their parts "
            "and calls: send less in one request"
        )


def check_item_objects(items: bytes) -> None:
    """Raise InvalidRequestError if a list of items, as JSON, has more than MAX_ITEM_OBJECTS objects."""
    if _has_more(items, b"{", MAX_ITEM_OBJECTS):
        raise InvalidRequestError(
            f"input: more than {MAX_ITEM_OBJECTS} objects, such as messages, their parts, calls and results: send fewer"
        )


def check_few_values(what: str, value: bytes) -> None:
    """Raise InvalidRequestError, naming the field, if one of few values has more than MAX_FEW_VALUES of them."""
    if _has_more(value, b",", MAX_FEW_VALUES):
        raise InvalidRequestError(f"{what}: more than {MAX_FEW_VALUES} values: give fewer")


def check_message_values(parts: Iterable[bytes]) -> None:
    """Raise InvalidRequestError if parts of a body of JSON that hold messages have too many values in all."""
    if sum(_number_of(b",", part) for part in parts if part.count(b",") > MAX_MESSAGE_VALUES) > MAX_MESSAGE_VALUES:
        raise InvalidRequestError(
            f"the messages have more than {MAX_MESSAGE_VALUES} values, such as texts in lists: send less in one request"
        )


def check_arguments(prompts: Iterable[Any]) -> None:
    """Raise InvalidRequestError if the arguments of earlier calls in prompts may cost too much to be decoded.

    They are texts of JSON, which chat templates want as objects: nothing in them counts as the body's own.
    """
    texts = [text.encode("utf-8", "surrogatepass") for prompt in prompts for text in _arguments_in(prompt)]
    size_bytes = sum(map(len, texts))
    for signs, most, what in _BOUNDS:
        if size_bytes > most and sum(_number_of(signs, text) for text in texts) > most:
            raise InvalidRequestError(f"the arguments of earlier calls have more than {most} {what}: send fewer calls")
    if any(map(has_many_extremes, texts)):
        raise InvalidRequestError(
            f"the arguments of a call have more than {MAX_EXTREMES} numbers with exponents of three digits, such as "
            "1e300: send fewer of them"
        )


def _arguments_in(prompt: Any) -> Iterator[str]:
    waiting = [prompt]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(text := value.get("arguments"), str):
                yield text
            value = list(value.values())
        if isinstance(value, list | tuple):
            waiting += [each for each in value if isinstance(each, Mapping | list | tuple)]


def _has_more(body: bytes, signs: bytes, most: int) -> bool:
    """Whether a body has more of these signs than that, outside of strings."""
    # Most bodies are too short for it; the texts of most others hold few of them, and pictures none.
    return len(body) > most and sum(body.count(sign) for sign in signs) > most and _number_of(signs, body) > most


def _number_of(signs: bytes, body: bytes) -> int:
    """The signs outside of strings. It makes a few passes in C over the body, whatever is in it."""
    others = bytes(set(range(256)) - set(signs) - set(b'"'))
    return len(_outside_strings(_without_escapes(body).translate(None, others)))


def _without_escapes(text: bytes) -> bytes:
    """A text of JSON without what a quote in a string is written with: each quote that is left begins or ends one."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def _outside_strings(text: bytes) -> bytes:
    """What is outside of strings in a text without escapes."""
    # Two quotes next to each other open and close, or close and open: without them the rest is where it was.
    return b"".join(text.replace(b'""', b"").split(b'"')[::2])
