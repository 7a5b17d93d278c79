"""Folders of a process that loads an engine: a temporary one of its own, and those where it keeps compiled code.

In the temporary folder that all users share, torch and vLLM use names that others can foresee: of locks, which others
can hold, and of code that is loaded again, which others can write first.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.processes import OwnedFolder, check_unshared, remove_orphaned

logger = logging.getLogger(__name__)

_PREFIX: Final = "omni-tmp-"
#: As long as the names of vLLM's sockets, which are UUIDs.
_SOCKET_NAME: Final = "-" * 36
#: The folders for compiled code by the variables that name them.
_CACHES: Final = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}


@contextmanager
def private_folders(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Have what this process loads use folders that no other user can write to; what the operator has set stays.

    ``environment`` is this process's own; it is as before afterwards. Raise ConfigError if no folder can be made, or
    another OmniError if that may pass: a start is tried again.
    """
    former = dict(environment)
    tempfile.tempdir = None
    folder = None if _is_unshared(environment.get("TMPDIR", "")) else _make_folder()
    try:
        if folder is not None:
            environment["TMPDIR"] = tempfile.tempdir = str(folder.path)
        for variable, name in _CACHES.items():
            if not environment.get(variable):
                environment[variable] = str(_kept_folder(environment, name))
        yield
    finally:
        for variable in ("TMPDIR", *_CACHES):
            environment.pop(variable, None)
            if variable in former:
                environment[variable] = former[variable]
        tempfile.tempdir = None
        if folder is not None:
            folder.remove()


def remove_left_folders() -> bool:
    """Remove the temporary folders of processes of this user that were killed. False: call it again some time."""
    return remove_orphaned(_PREFIX)


def _make_folder() -> OwnedFolder:
    try:
        return OwnedFolder(_PREFIX, _SOCKET_NAME)
    except ConfigError as error:
        raise ConfigError(f"no temporary folder for this process; set TMPDIR to one of your own: {error}") from error
    except OSError as error:
        raise OmniError(f"no temporary folder for this process now: {error}") from error


def _kept_folder(environment: MutableMapping[str, str], name: str) -> Path:
    """A folder in the user's cache, as other users can't write to it; else one that goes with this process."""
    root = Path(environment.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = root / "omni" / name
    try:
        if not root.is_absolute():
            raise ConfigError(f"{root} is no absolute path")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_unshared(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder} can't be written to")
    except (ConfigError, OSError, RuntimeError) as error:
        logger.info("cache.not_kept name=%s: %s; set XDG_CACHE_HOME to a folder of your own", name, error)
        return Path(tempfile.gettempdir()) / name
    return folder


def _is_unshared(folder: str) -> bool:
    """Whether that is a folder, and one to which this user alone can write."""
    try:
        check_unshared(Path(folder))
    except (ConfigError, OSError):
        return False
    return Path(folder) == Path(tempfile.gettempdir())
