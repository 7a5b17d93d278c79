"""Away with what dead processes left in shared memory.

Anybody of the same user may sweep: each connector does as it starts, and at most once in ``SWEEP_EVERY_S`` after that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from typing import Final

from stage_runtime.connectors.layout import HEADER_BYTES, NAME_PREFIX, Header, owner_in_name
from stage_runtime.connectors.shm_owner import Owner

logger = logging.getLogger(__name__)

SWEEP_EVERY_S: Final = 60.0


def sweep(directory: Path) -> int:
    """Unlink what processes of this machine left that are dead by now; say how many files that were."""
    swept = 0
    for path in directory.glob(f"{NAME_PREFIX}*"):
        owner = _owner_of(path)
        if owner is not None and owner.is_dead():
            # Another user's, or swept by another process in this moment.
            with contextlib.suppress(OSError):
                _remove(path)
                swept += 1
    if swept:
        logger.info("shm.swept files=%d", swept)
    return swept


def _remove(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        path.unlink()
        # Readers keep files open that they look at no more; those must hold no memory.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _owner_of(path: Path) -> Owner | None:
    named = owner_in_name(path.name)
    if named is not None:
        return named
    try:
        with path.open("rb") as file:
            header = Header.parse(file.read(HEADER_BYTES))
    except OSError:
        return None
    return None if header is None else header.owner
