"""The file by which other commands of this user on this machine find the embedded etcd of a hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from omni_discovery.errors import ConfigError
from omni_discovery.processes import is_private
from omni_discovery.records.keys import check_namespace

_SUFFIX: Final = ".etcd.json"


class EmbeddedEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One embedded etcd: its endpoint as ``host:port`` and the process that owns it."""

    endpoint: str
    pid: int


def write_endpoint(folder: Path, namespace: str, endpoint: str) -> Path:
    """Write the endpoint of this process's embedded etcd; return the file.

    Raise ConfigError if other users can write to ``folder``.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise ConfigError(f"others can write to {folder}: remove it, or set XDG_RUNTIME_DIR to a folder of your own")
    file = _file(folder, namespace)
    half_written = file.with_suffix(f".{os.getpid()}")
    half_written.write_bytes(msgspec.json.encode(EmbeddedEndpoint(endpoint=endpoint, pid=os.getpid())))
    half_written.chmod(0o600)
    half_written.replace(file)
    return file


def read_embedded(folder: Path, namespace: str) -> EmbeddedEndpoint | None:
    """The running embedded etcd of this user for a namespace; None if there is none."""
    return _read(_file(folder, namespace)) if is_private(folder) else None


def embedded_namespaces(folder: Path) -> list[str]:
    """The namespaces for which an embedded etcd of this user runs, sorted."""
    files = folder.glob(f"*{_SUFFIX}") if is_private(folder) else ()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if _read(file) is not None)


def embedded_among(folder: Path, namespace: str, endpoints: str) -> str:
    """``endpoints`` if that is the endpoint of this user's embedded etcd, else empty."""
    found = read_embedded(folder, namespace)
    return endpoints if found is not None and found.endpoint == endpoints else ""


def remove_endpoint(folder: Path, namespace: str, pid: int | None = None) -> None:
    """Delete the file if this process wrote it, or process ``pid``, which was killed. Idempotent."""
    file = _file(folder, namespace)
    try:
        if msgspec.json.decode(file.read_bytes(), type=EmbeddedEndpoint).pid == (pid or os.getpid()):
            file.unlink()
    except (OSError, msgspec.DecodeError):
        return


def _read(file: Path) -> EmbeddedEndpoint | None:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=EmbeddedEndpoint)
    except (OSError, msgspec.DecodeError):
        return None
    return found if Path(f"/proc/{found.pid}").exists() else None


def _file(folder: Path, namespace: str) -> Path:
    return folder / f"{check_namespace(namespace)}{_SUFFIX}"
