"""Resumption: any hub makes a streamed answer again, and sends what its client has not had of it. Pure.

A token names nothing that is kept anywhere. It is 128 random bits, from which the seed of the answer is made, and a
digest of them with the client's key and its request: only the same client with the same request may show it, and gets
the answer to that request, whoever else has seen the token. Behind it stands the place that the client has reached: of
each part of the answer how many bytes, and a digest of them. Where what is made again differs from that, nothing of it
is sent.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from hub.api.errors import RetryConflictError
from omni_discovery.errors import InvalidRequestError

HEADER: Final = "x-omni-resume"
#: What a client sends that has no token yet.
NEW: Final = "new"

NONCE_BYTES: Final = 16
#: For digests of a request that is bound to no token.
NO_NONCE: Final = b""
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}")
#: Of the bytes of a part. It tells a client's own mistakes and another answer apart, and guards nothing.
_PART_DIGEST_BYTES: Final = 8
#: Parts that a place may name at most: 64 answers with a few each.
_MOST_PARTS: Final = 256
#: Parts of one choice at most. The routes have five kinds: text, sound and its expiry, a picture, the end.
_PARTS_OF_CHOICE: Final = 5
_PART: Final = re.compile(r"([0-9]{1,3}[a-z])([0-9]{1,13})-([A-Za-z0-9_-]{11})")
#: Seeds are below two to the power of this, as those that clients may give.
SEED_BITS: Final = 62


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks for what: the digest of the client's key, which is empty where none is asked for, and its request."""

    key_digest: bytes
    path: str
    body: bytes

    def digest(self, nonce: bytes) -> bytes:
        """What binds a token to this client and request."""
        found = blake2b(digest_size=NONCE_BYTES, key=nonce, person=b"omni-resume")
        for part in (self.key_digest, self.path.encode(), self.body):
            found.update(len(part).to_bytes(8, "little"))
            found.update(part)
        return found.digest()


def nonce_of(key_digest: bytes, idempotency_key: str) -> bytes:
    """The random bits of a token, made of a client's own key for its request."""
    found = blake2b(digest_size=NONCE_BYTES, person=b"omni-idem")
    found.update(len(key_digest).to_bytes(8, "little") + key_digest + idempotency_key.encode())
    return found.digest()


def seed_of_nonce(nonce: bytes) -> int:
    """The seed of the answer: for deterministic stages, whatever hub runs them."""
    digest = blake2b(nonce, digest_size=8, person=b"omni-seed").digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


@dataclass(frozen=True, slots=True)
class Had:
    """What a client has of one part of an answer."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Place:
    """The token of an answer, and what its client has of it, by part: the choice's number and the kind of bytes."""

    nonce: bytes
    token: str
    had: Mapping[str, Had]


def place_of_new(nonce: bytes, asker: Asker) -> Place:
    """The beginning of a new answer."""
    return Place(nonce, _encode(nonce + asker.digest(nonce)), {})


def parse_place(text: str, asker: Asker) -> Place:
    """Read what a client shows. Raise InvalidRequestError, RetryConflictError if it is another's or of another body."""
    token, _, parts = text.partition(".")
    found = [_PART.fullmatch(part) for part in parts.split(",", _MOST_PARTS)] if parts else []
    if not _TOKEN.fullmatch(token):
        raise InvalidRequestError(f"{HEADER}: this is no token: send back the 'resume' of the last event as it is")
    raw = base64.urlsafe_b64decode(f"{token}=")
    nonce, had = raw[:NONCE_BYTES], dict[str, Had]()
    for part in found:
        if part is None or part[1] in had:
            raise InvalidRequestError(f"{HEADER}: the place is none: send back the 'resume' of the last event as it is")
        had[part[1]] = Had(int(part[2]), part[3])
    if raw[NONCE_BYTES:] != asker.digest(nonce):
        raise RetryConflictError(
            "resume_mismatch", f"{HEADER}: this token is of another request, or of another key's: nothing is resumed"
        )
    return Place(nonce, token, had)


class Progress:
    """What the client of a streamed answer has had of it; and of what is made again, what it has not had.

    ``most_choices`` of the answer. Raise InvalidRequestError for a place with more parts than those can have: every
    event names all of them.
    """

    def __init__(self, place: Place, most_choices: int = _MOST_PARTS) -> None:
        if len(place.had) > most_choices * _PARTS_OF_CHOICE:
            raise InvalidRequestError(f"{HEADER}: the place has more parts than the answer to this request has")
        self._place = place
        self._parts = {name: _AnswerPart(had) for name, had in place.had.items()}

    @property
    def token(self) -> str:
        """The token of the answer."""
        return self._place.token

    @property
    def is_resumed(self) -> bool:
        """Whether the client has something of the answer already."""
        return bool(self._place.had)

    @property
    def shown(self) -> str:
        """The place that the client has reached with what was passed so far, for it to send back."""
        parts = ",".join(f"{name}{part.shown}" for name, part in self._parts.items())
        return f"{self._place.token}.{parts}" if parts else self._place.token

    def was_begun(self, choice: int) -> bool:
        """Whether the client has had anything of a choice before."""
        return any(name[:-1] == str(choice) for name in self._place.had)

    def pass_on(self, choice: int, kind: str, data: bytes) -> bytes:
        """The next bytes of a part, of which the client gets those that are returned.

        Raise RetryConflictError where they differ from what it has.
        """
        part = self._parts.setdefault(f"{choice}{kind}", _AnswerPart())
        return part.pass_on(data)

    def pass_text(self, choice: int, kind: str, text: str) -> str:
        """The same for a text. Raise RetryConflictError."""
        try:
            return self.pass_on(choice, kind, text.encode()).decode()
        except UnicodeDecodeError:
            # No event of ours ends within a character.
            raise _differs() from None

    def pass_whole(self, choice: int, kind: str, data: bytes) -> bool:
        """Pass on what can only be sent as one; return whether the client gets it. Raise RetryConflictError."""
        fresh = self.pass_on(choice, kind, data)
        if fresh and len(fresh) < len(data):
            raise _differs()
        return bool(fresh)

    def check_end(self) -> None:
        """Raise RetryConflictError if the answer has ended before all that the client has had."""
        if any(part.missing_bytes for part in self._parts.values()):
            raise _differs()


class _AnswerPart:
    """The bytes of one part of an answer, of which the client has had the first ones."""

    def __init__(self, had: Had | None = None) -> None:
        self._had = had
        self._digest = blake2b(digest_size=_PART_DIGEST_BYTES)
        self._passed_bytes = 0
        #: ``shown``, until more is passed on: each event names all parts, most of which are as they were.
        self._shown = ""

    @property
    def shown(self) -> str:
        """How much the client has, and the digest of that."""
        self._shown = self._shown or f"{self.size_bytes}-{self.digest}"
        return self._shown

    @property
    def size_bytes(self) -> int:
        """How much of it the client has."""
        return self._passed_bytes if self._had is None else max(self._passed_bytes, self._had.size_bytes)

    @property
    def digest(self) -> str:
        """The digest of what the client has."""
        return self._had.digest if self._had is not None and self.missing_bytes else _encode(self._digest.digest())

    @property
    def missing_bytes(self) -> int:
        """How much of what the client had has not been made again."""
        return 0 if self._had is None else max(0, self._had.size_bytes - self._passed_bytes)

    def pass_on(self, data: bytes) -> bytes:
        """See Progress."""
        self._shown = ""
        missing_bytes = self.missing_bytes
        known, fresh = data[:missing_bytes], data[missing_bytes:]
        self._digest.update(known)
        self._passed_bytes += len(known)
        if self._had is not None and not self.missing_bytes:
            if _encode(self._digest.digest()) != self._had.digest:
                raise _differs()
            self._had = None
        self._digest.update(fresh)
        self._passed_bytes += len(fresh)
        return fresh


def _differs() -> RetryConflictError:
    return RetryConflictError(
        "resume_differs", "made again, the answer is another than the one that was begun: ask for it from its beginning"
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
