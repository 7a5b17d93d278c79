"""How many lists, objects and values a body of JSON holds, counted before it is decoded: each costs far more than its
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from omni_discovery.errors import InvalidRequestError

#: Lists and objects of one body.
MAX_CONTAINERS: Final = 50_000
#: Values of one body: as many token ids as a request may have.
MAX_VALUES: Final = 1 << 19
#: Objects that a model of vLLM's server is made of, such as messages, their parts and calls: some 50 us each, for which
#: the hub's loop waits.
MAX_OBJECTS: Final = 4096


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


def _has_more(body: bytes, signs: bytes, most: int) -> bool:
    """Whether a body has more of these signs than that, outside of strings."""
    # The texts of most bodies hold few of them, and pictures none.
    return sum(body.count(sign) for sign in signs) > most and _number_of(signs, body) > most


def _number_of(signs: bytes, body: bytes) -> int:
    """The signs outside of strings. It makes a few passes in C over the body, whatever is in it."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes next to each other open and close, or close and open: without them the rest is where it was.
    others = bytes(set(range(256)) - set(signs) - set(b'"'))
    kept = unescaped.translate(None, others).replace(b'""', b"")
    return sum(map(len, kept.split(b'"')[::2]))
