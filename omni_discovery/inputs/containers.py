"""How many lists and objects a body of JSON holds, counted before it is decoded: each costs far more than its bytes."""

from __future__ import annotations

from typing import Final

from omni_discovery.errors import InvalidRequestError

#: Lists and objects of one body.
MAX_CONTAINERS: Final = 50_000

_OPENING: Final = b"[{"
_OTHERS: Final = bytes(set(range(256)) - set(_OPENING) - set(b'"'))


def check_containers(body: bytes) -> None:
    """Raise InvalidRequestError if a body of JSON has more than MAX_CONTAINERS lists and objects."""
    # The texts of most bodies hold few brackets, and pictures none.
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return
    if _containers_in(body) > MAX_CONTAINERS:
        raise InvalidRequestError(
            f"the body has more than {MAX_CONTAINERS} lists and objects: send less in one request"
        )


def _containers_in(body: bytes) -> int:
    """The opening brackets outside of strings. It makes a few passes in C over the body, whatever is in it."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes next to each other open and close, or close and open: without them the rest is where it was.
    kept = unescaped.translate(None, _OTHERS).replace(b'""', b"")
    return sum(map(len, kept.split(b'"')[::2]))
