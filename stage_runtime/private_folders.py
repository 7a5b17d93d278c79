"""Folders of a process that loads an engine: a temporary one of its own, and those where it keeps compiled code.

In the temporary folder that all users share, torch and vLLM use names that others can foresee: of locks, which others
can hold, and of code that is loaded again, which others can write first. The same goes for caches below a home folder
or an ``XDG_CACHE_HOME`` that others can write to, such as ``HOME=/tmp`` in a container.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.processes import OwnedFolder, check_unshared, remove_orphaned

logger = logging.getLogger(__name__)

_PREFIX: Final = "omni-tmp-"
#: As long as the names of vLLM's sockets, which are UUIDs.
_SOCKET_NAME: Final = "-" * 36
#: The folders for compiled code that are by default in the temporary folder or in the home, by their variables.
_MOVED: Final = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
#: Those that are by default in the user's cache, which stay there if others can't write to them.
_IN_CACHE: Final = {"VLLM_CACHE_ROOT": "vllm", "TORCH_EXTENSIONS_DIR": "torch_extensions"}
#: Where FlashInfer has its ``.cache``, whatever XDG_CACHE_HOME says.
_FLASHINFER: Final = "FLASHINFER_WORKSPACE_BASE"
_CACHES: Final = (*_MOVED, *_IN_CACHE, _FLASHINFER)


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
        environment.update(_caches(environment))
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


def _caches(environment: Mapping[str, str]) -> dict[str, str]:
    """What the variables of caches are to be; those that the operator has set, or whose default is safe, are absent."""
    # Where no home is known this is no absolute path, and the libraries write below "./~".
    home = Path(os.path.expanduser("~"))  # noqa: PTH111
    root = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    moved = {variable: root / "omni" / name for variable, name in _MOVED.items()}
    defaults = {variable: root / name for variable, name in _IN_CACHE.items()}
    defaults[_FLASHINFER] = home / ".cache" / "flashinfer"
    settings = {}
    for variable, folder in (moved | defaults).items():
        if environment.get(variable):
            continue
        try:
            _check_cache(folder, make=variable in moved)
        except (ConfigError, OSError) as error:
            text = "cache.not_kept name=%s: %s; set HOME and XDG_CACHE_HOME to folders of your own"
            logger.info(text, folder.name, error)
            settings[variable] = str(Path(tempfile.gettempdir()) / folder.name)
        else:
            if variable in moved:
                settings[variable] = str(folder)
    return settings


def _check_cache(folder: Path, *, make: bool) -> None:
    """Raise ConfigError or OSError if another user could put a file there, or, if it is to be made, this user can't."""
    if not folder.is_absolute():
        raise ConfigError(f"{folder} is no absolute path")
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Of a folder that is still to be made, the one in which that happens.
    present = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    check_unshared(present)
    if make and not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(f"{present} can't be written to")


def _is_unshared(folder: str) -> bool:
    """Whether that is a folder, and one to which this user alone can write."""
    try:
        check_unshared(Path(folder))
    except (ConfigError, OSError):
        return False
    return Path(folder) == Path(tempfile.gettempdir())
