"""A hub's identity, kept over restarts: replicas that know its key accept it again while etcd is unreachable.

Each hub of a namespace on one machine has a folder of its own with its id, its CURVE secret and its saved view, all
readable by their owner only. Where another user could have put them there, they are not read. A running hub holds a
lock on its folder; the kernel releases it however the hub ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from omni_discovery.curve import KeyPair
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import parse_endpoints
from omni_discovery.processes import check_unshared, write_private
from omni_discovery.records import keys

logger = logging.getLogger(__name__)

_MAX_HUBS: Final = 1000


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    hub_id: str
    curve_secret: str


@dataclass(slots=True)
class HubIdentity:
    """A hub's id and keys. ``view`` is the file of its saved view; None if nothing is kept."""

    hub_id: str
    keys: KeyPair
    view: Path | None = None
    #: Descriptor of the folder's lock; -1 without one.
    lock_fd: int = -1

    def close(self) -> None:
        """Release the folder for another hub. Idempotent."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def new_identity(host: str) -> HubIdentity:
    """A new identity that is not kept."""
    return HubIdentity(_new_id(host), KeyPair.generate())


def acquire_identity(state_dir: Path, namespace: str, endpoints: str | Sequence[str], host: str) -> HubIdentity:
    """The first kept identity of this namespace and these endpoints that no running hub uses, else a new one.

    If the folder can't be used, or others could write there, a warning is logged and the identity is not kept.
    """
    registry = ",".join(sorted(parse_endpoints(endpoints)))
    name = hashlib.blake2b(f"{host}\n{registry}".encode(), digest_size=6).hexdigest()
    try:
        return _acquire_free(state_dir / f"{namespace}-{name}", host)
    except (OSError, ConfigError) as error:
        text = "hub.state_unusable folder=%s reason=%s: nothing is kept over a restart; %s"
        logger.warning(text, state_dir, error, "set XDG_STATE_HOME to a folder of this user's own")
        return new_identity(host)


def _acquire_free(folder: Path, host: str) -> HubIdentity:
    for number in itertools.count():
        own = folder / f"hub-{number}"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_unshared(own)
        lock_fd = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _read_or_make(own, host, lock_fd)
        except BlockingIOError:
            os.close(lock_fd)
            if number >= _MAX_HUBS:
                raise OSError(f"{_MAX_HUBS} hubs hold {folder}") from None
            continue
        except OSError:
            os.close(lock_fd)
            raise
    raise AssertionError("unreachable")


def _read_or_make(folder: Path, host: str, lock_fd: int) -> HubIdentity:
    file = folder / "identity.json"
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
        pair = KeyPair.from_secret(kept.curve_secret)
        if not isinstance(keys.parse_key("default", keys.hub_key("default", kept.hub_id)), keys.HubKey):
            raise ConfigError(f"{kept.hub_id!r} is no hub id")
        return HubIdentity(kept.hub_id, pair, folder / "view", lock_fd)
    except FileNotFoundError:
        pass
    except (msgspec.DecodeError, ConfigError, OSError) as error:
        logger.warning("hub.identity_ignored file=%s reason=%s", file, error)
    made = HubIdentity(_new_id(host), KeyPair.generate(), folder / "view", lock_fd)
    write_private(file, msgspec.json.encode(_Kept(hub_id=made.hub_id, curve_secret=made.keys.secret)))
    return made


def _new_id(host: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", host)[:40].strip(".-_") or "hub"
    return f"{name}-{secrets.token_hex(4)}"
