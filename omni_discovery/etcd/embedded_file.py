"""The file by which other commands of this user on this machine find the embedded etcd of a hub.

It lies in a private folder and is reached by that folder's descriptor, so nobody can put another one in its place.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from omni_discovery.errors import ConfigError
from omni_discovery.processes import open_private, process_mark
from omni_discovery.records.keys import check_namespace

_SUFFIX: Final = ".etcd.json"
_MOST_BYTES: Final = 4096
_SOCKET: Final = "unix://"


class EmbeddedEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One embedded etcd: its endpoint as parse_endpoints returns it, and the process that owns it.

    ``process`` is what no other process has, see ``process_mark``; empty where that is not known.
    """

    endpoint: str
    pid: int
    process: str = ""


def write_endpoint(folder: Path, namespace: str, endpoint: str) -> Path:
    """Write the endpoint of this process's embedded etcd; return the file.

    Raise ConfigError if ``folder`` is not private.
    """
    name = _name(namespace)
    half_written = f"{name}.{os.getpid()}"
    with _opened(folder, make=True) as place:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(half_written, dir_fd=place)
        file = os.open(half_written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
        with os.fdopen(file, "wb") as half:
            pid = os.getpid()
            written = EmbeddedEndpoint(endpoint=endpoint, pid=pid, process=process_mark(pid))
            half.write(msgspec.json.encode(written))
        os.rename(half_written, name, src_dir_fd=place, dst_dir_fd=place)
    return folder / name


def read_embedded(folder: Path, namespace: str) -> EmbeddedEndpoint | None:
    """The running embedded etcd of this user for a namespace; None if there is none."""
    name = _name(namespace)
    with _opened_if_private(folder) as place:
        return None if place is None else _read_running(place, name)


def embedded_namespaces(folder: Path) -> list[str]:
    """The namespaces for which an embedded etcd of this user runs, sorted."""
    with _opened_if_private(folder) as place:
        if place is None:
            return []
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(_SUFFIX)]
        return sorted(name.removesuffix(_SUFFIX) for name in names if _read_running(place, name) is not None)


def embedded_among(folder: Path, namespace: str, endpoints: str) -> str:
    """``endpoints`` if that is the endpoint of this user's embedded etcd, else empty."""
    found = read_embedded(folder, namespace)
    return endpoints if found is not None and found.endpoint == endpoints else ""


def remove_endpoint(folder: Path, namespace: str, pid: int | None = None) -> None:
    """Delete the file if this process wrote it, or process ``pid``, which was killed. Idempotent."""
    name = _name(namespace)
    with _opened_if_private(folder) as place:
        found = None if place is None else _read(place, name)
        if found is not None and found.pid == (pid or os.getpid()):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=place)


def _read_running(place: int, name: str) -> EmbeddedEndpoint | None:
    found = _read(place, name)
    return found if found is not None and _is_running(found) else None


def _is_running(found: EmbeddedEndpoint) -> bool:
    """Whether it is still there. Once it has ended, others may have its process id, and a socket of its name."""
    own, its = process_mark(os.getpid()).split("/"), found.process.split("/")
    if found.process and own[:2] == its[:2]:
        return process_mark(found.pid) == found.process
    if not found.process:
        # It is of an earlier release.
        place = Path(f"/proc/{found.pid}")
    elif own[0] == its[0] and found.endpoint.startswith(_SOCKET):
        # Of another container, whose processes have other ids here.
        place = Path(found.endpoint.removeprefix(_SOCKET)).parent
    else:
        return False
    try:
        return place.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _read(place: int, name: str) -> EmbeddedEndpoint | None:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            return msgspec.json.decode(opened.read(_MOST_BYTES), type=EmbeddedEndpoint)
    except (OSError, msgspec.DecodeError):
        return None


@contextmanager
def _opened(folder: Path, *, make: bool = False) -> Iterator[int]:
    place = open_private(folder, make=make)
    try:
        yield place
    finally:
        os.close(place)


@contextmanager
def _opened_if_private(folder: Path) -> Iterator[int | None]:
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(_opened(folder))
        except (OSError, ConfigError):
            yield None
            return
        yield place


def _name(namespace: str) -> str:
    return f"{check_namespace(namespace)}{_SUFFIX}"
