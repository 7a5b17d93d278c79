"""Locks on devices, so that two supervisors of one user don't use the same device."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from omni_discovery.errors import ConfigError
from omni_discovery.processes import make_private

logger = logging.getLogger(__name__)

#: How long a device may be held before it counts as in use: its supervisor may be about to mark it as leaving.
_GRACE_S: Final = 2.0
_RETRY_S: Final = 0.25


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor that holds a device. ``is_leaving``: it drains, and the device will be free soon."""

    pid: int
    namespace: str
    stage_id: int
    is_leaving: bool = False

    @property
    def description(self) -> str:
        """The process with its stage and namespace, for people."""
        return f"process {self.pid}, which runs stage {self.stage_id} of namespace {self.namespace!r}"


class DeviceLocks:
    """One lock file for each device of one supervisor, in a folder of this user's.

    The kernel releases the locks however the supervisor ends. Stages of one namespace may share a device, as their
    deploy document says; the same stage twice, or stages of two namespaces, may not.
    """

    def __init__(self, folder: Path, devices: tuple[str, ...], holder: Holder) -> None:
        self._folder = folder / "devices"
        self._devices = tuple(dict.fromkeys(devices))
        self._holder = holder
        self._held: list[int] = []

    def acquire(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        on_wait: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Lock all devices; wait for a holder that drains, and tell ``on_wait`` for whom.

        Raise ConfigError naming the holder of a device in use.
        """
        if not self._devices:
            return
        try:
            make_private(self._folder)
        except OSError as error:
            raise ConfigError(f"no place for lock files: {error}; set XDG_RUNTIME_DIR to a folder of yours") from error
        until_s, is_logged = clock() + _GRACE_S, False
        while (held := self._try_acquire()) is not None:
            device, other = held
            who = "another supervisor" if other is None else other.description
            if other is not None and other.is_leaving:
                until_s = clock() + _GRACE_S
            elif clock() >= until_s:
                raise ConfigError(f"device {device} is in use by {who}; stop that, or give this stage other devices")
            if not is_logged:
                is_logged = True
                logger.info("devices.waiting device=%s: in use by %s", device, who)
                on_wait(f"device {device} is in use by {who}")
            sleep(_RETRY_S)

    def mark_leaving(self) -> None:
        """Write into the lock files that the devices will be free soon."""
        self._holder = msgspec.structs.replace(self._holder, is_leaving=True)
        for descriptor in self._held:
            self._write(descriptor)

    def close(self) -> None:
        """Release the locks. Idempotent."""
        while self._held:
            os.close(self._held.pop())

    def _try_acquire(self) -> tuple[str, Holder | None] | None:
        """Lock all devices and return None, or none of them and return a device in use with its holder, if known."""
        guard = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # One supervisor at a time: two could otherwise both find a device free.
            if not _locked(guard):
                return self._devices[0], None
            for device in self._devices:
                for path in self._files_of(device):
                    is_held, other = _read_holder(path)
                    if is_held and (other is None or self._conflicts(other)):
                        return device, other
            self._held += [self._lock(device) for device in self._devices]
            return None
        finally:
            os.close(guard)

    def _files_of(self, device: str) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.name.startswith(f"{_plain(device)}@")]

    def _conflicts(self, other: Holder) -> bool:
        return other.namespace != self._holder.namespace or other.stage_id == self._holder.stage_id

    def _lock(self, device: str) -> int:
        path = self._folder / f"{_plain(device)}@{self._holder.namespace}@{self._holder.stage_id}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _locked(descriptor)
        self._write(descriptor)
        return descriptor

    def _write(self, descriptor: int) -> None:
        content = msgspec.json.encode(self._holder)
        # On a full disk the file doesn't name the holder; the lock holds all the same.
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))


def _read_holder(path: Path) -> tuple[bool, Holder | None]:
    """Whether a lock file is locked, and by which holder, if known. A file that is not locked is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False, None
    try:
        if _locked(descriptor):
            path.unlink(missing_ok=True)
            return False, None
        return True, msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except msgspec.DecodeError:
        # It is just being written.
        return True, None
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _plain(device: str) -> str:
    return device.replace("/", "_")
