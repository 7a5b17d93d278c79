"""KeyRing: the keys that open a door, and the names by which logs and metrics call them. Pure.

Only SHA-256 hashes of keys are kept. No slow hash is needed: see omni_discovery/records/api_key.py.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from omni_discovery.errors import ConfigError
from omni_discovery.records.api_key import digest_of
from omni_discovery.records.keys import is_key_name

_COMMENT: Final = "#"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: its name, and the SHA-256 of what clients send."""

    name: str
    digest: bytes


def read_key(name: str, text: str, source: str) -> ApiKey:
    """The key of a text. Raise ConfigError, which never shows it, if no client could send it; ``source`` is named."""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{source}: a key is one or more printable ASCII characters without spaces")
    return ApiKey(name, digest_of(text))


def read_key_file(text: str, source: str, number_of_file: int = 1) -> tuple[ApiKey, ...]:
    """The keys of a file: one on each line, as ``key`` or ``name:key``; ``#`` begins a comment.

    A key without a name is called after its line, and from the second file on after the file, too.
    Raise ConfigError, which names the line, for what is none, and for a file without any.
    """
    found: list[ApiKey] = []
    place = f"file-{number_of_file}-" if number_of_file > 1 else ""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if not words or words.startswith(_COMMENT):
            continue
        name, colon, key = words.partition(":")
        if not colon:
            name, key = f"{place}line-{number}", words
        elif not is_key_name(name):
            raise ConfigError(
                f"{source}, line {number}: what stands before ':' is no name; right would be 'name:key', the name of"
                " letters, digits, '.', '_' and '-'"
            )
        found.append(read_key(name, key.strip(), f"{source}, line {number}"))
    if not found:
        raise ConfigError(f"{source} holds no key, so nobody could use the API: write one on each line, or 'name:key'")
    return tuple(found)


def bearer_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The key in ``Authorization: Bearer KEY``; empty without one, and for several such headers."""
    found = [value for name, value in headers if name.lower() == b"authorization"]
    if len(found) != 1:
        return ""
    scheme, _, key = found[0].decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class KeyRing:
    """The keys that open one door. ``replace`` may be called from any thread.

    With ``from_etcd``, keys of etcd open it, too, as soon as they are known.
    """

    def __init__(self, fixed: Sequence[ApiKey] = (), *, from_etcd: bool = False) -> None:
        self._fixed = tuple(fixed)
        #: Of etcd: swapped whole, so that a reader's list never moves. None: not known yet.
        self._of_etcd: tuple[ApiKey, ...] | None = None if from_etcd else ()

    def __repr__(self) -> str:
        return f"KeyRing({[key.name for key in self._keys]}, awaits_etcd={self.awaits_etcd})"

    @property
    def awaits_etcd(self) -> bool:
        """Whether the keys of etcd are not known yet."""
        return self._of_etcd is None

    def replace(self, digests: Mapping[str, bytes]) -> None:
        """These are the keys of etcd now, by name."""
        self._of_etcd = tuple(ApiKey(name, digest) for name, digest in digests.items())

    def find(self, key: str) -> ApiKey | None:
        """The key that opens this door by this text; None for any other text. It takes as long whichever key it is."""
        digest, found = digest_of(key), None
        for each in self._keys:
            if hmac.compare_digest(each.digest, digest):
                found = each
        return found if key else None

    @property
    def _keys(self) -> tuple[ApiKey, ...]:
        return self._fixed + (self._of_etcd or ())
