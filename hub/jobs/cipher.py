"""The encryption of a job's files: AES-256-GCM, with a key for each file that is made of the operator's. Pure.

A file is ``OMJ1``, 16 random bytes, and segments of 1 MiB, each with its tag. The key of the file comes from the
operator's key, the random bytes and the file's place (HKDF with SHA-256), so that no file passes for another. The
nonce of a segment is its number and whether it is the last, so that none can be left out, added or moved.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hub.jobs.errors import JobFileError
from omni_discovery.errors import ConfigError

SALT_BYTES: Final = 16
KEY_BYTES: Final = 32
_MAGIC: Final = b"OMJ1"
_HEAD_BYTES: Final = len(_MAGIC) + SALT_BYTES
_SEGMENT_BYTES: Final = 1 << 20
_TAG_BYTES: Final = 16
_COMMENT: Final = "#"
_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_RIGHT: Final = "64 hexadecimal digits (openssl rand -hex 32)"


@dataclass(frozen=True, slots=True)
class JobKey:
    """A key of the operator. ``name`` is made of it, the same on every hub."""

    name: str
    secret: bytes = field(repr=False)


class JobKeys:
    """The operator's keys. The first encrypts, each decrypts what it has encrypted."""

    def __init__(self, keys: tuple[JobKey, ...]) -> None:
        self.first = keys[0]
        self._by_name = {key.name: key for key in keys}

    def has(self, name: str) -> bool:
        """Whether there is a key with this name."""
        return name in self._by_name

    def of(self, name: str) -> JobKey:
        """The key with this name. Raise JobFileError."""
        found = self._by_name.get(name)
        if found is None:
            raise JobFileError(f"the file is encrypted with key {name}, which this hub does not have: --job-key-file")
        return found


def job_key_of(secret: bytes) -> JobKey:
    """The key of 32 random bytes."""
    return JobKey(hashlib.sha256(b"omni-job-key\0" + secret).hexdigest()[:16], secret)


def read_job_keys(text: str, source: str) -> JobKeys:
    """The keys of a file, one on each line; ``#`` begins a comment. Raise ConfigError, which never shows a key."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition(_COMMENT)[0].strip()
        if not word:
            continue
        if not _KEY.fullmatch(word):
            raise ConfigError(f"{source}, line {number}: a key of jobs is {_RIGHT}")
        keys.append(job_key_of(bytes.fromhex(word)))
    if not keys:
        raise ConfigError(f"{source} holds no key: write one, {_RIGHT}")
    if len({key.name for key in keys}) < len(keys):
        raise ConfigError(f"{source}: one key is there twice")
    return JobKeys(tuple(keys))


def seal(key: JobKey, place: str, salt: bytes, content: bytes) -> Iterator[bytes]:
    """The encrypted file of a content, in pieces. ``salt`` is 16 random bytes, never the same twice."""
    cipher = _cipher(key, place, salt)
    yield _MAGIC + salt
    count = _segments(len(content))
    for number in range(count):
        segment = content[number * _SEGMENT_BYTES : (number + 1) * _SEGMENT_BYTES]
        yield cipher.encrypt(_nonce(number, number == count - 1), segment, None)


def content_bytes(file_bytes: int) -> int:
    """The length of the content of an encrypted file. Raise JobFileError for one that is too short to be any."""
    body = file_bytes - _HEAD_BYTES
    content = body - _TAG_BYTES * -(-body // (_SEGMENT_BYTES + _TAG_BYTES))
    if body < _TAG_BYTES or content < 0:
        raise JobFileError("the file is cut short")
    return content


def unseal(key: JobKey, place: str, file_bytes: int, read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The content of an encrypted file, in pieces. ``read`` gives its next bytes. Raise JobFileError."""
    count = _segments(content_bytes(file_bytes))
    head = read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or head[: len(_MAGIC)] != _MAGIC:
        raise JobFileError("the file is none of a job's")
    cipher = _cipher(key, place, head[len(_MAGIC) :])
    for number in range(count):
        try:
            yield cipher.decrypt(_nonce(number, number == count - 1), read(_SEGMENT_BYTES + _TAG_BYTES), None)
        except (InvalidTag, ValueError) as error:
            raise JobFileError("the file was changed, or moved from another place") from error


def _segments(content: int) -> int:
    return max(1, -(-content // _SEGMENT_BYTES))


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _cipher(key: JobKey, place: str, salt: bytes) -> AESGCM:
    derived = HKDF(SHA256(), KEY_BYTES, salt, b"omni-discovery job\0" + place.encode())
    return AESGCM(derived.derive(key.secret))
