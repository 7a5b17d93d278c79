"""A replica's process on this host: a signal goes to the one that its record means, or to none.

A process id is used again, and other namespaces and containers have replicas on the same host. So a record says of its
process what no other one has, and the process is held by a descriptor before that is compared.
"""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from omni_discovery.errors import OmniError
from omni_discovery.processes import process_mark
from omni_discovery.records.schema import ReplicaInfo

#: The first word of a replica's command, and of the process that replicas are forked from, which they keep; and what is
#: before the name of its namespace.
_REPLICA: Final = b"--replica"
_ZYGOTE: Final = b"--zygote"
_NAMESPACE: Final = b"--namespace"


class UnsureProcessError(OmniError):
    """The operator may act: this process may not be signalled, or is not surely the replica's; the message says why."""


@dataclass(frozen=True, slots=True)
class HeldProcess:
    """A process that surely is the replica's. What takes its process id after its end gets no signal."""

    #: Closed by ``hold_process``.
    pidfd: int

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; whether the process was still there."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def hold_process(info: ReplicaInfo, namespace: str) -> Iterator[HeldProcess]:
    """The process of a record in this namespace, to send signals to. Raise UnsureProcessError."""
    pidfd = _open(info)
    try:
        _check(info, namespace, pidfd)
        yield HeldProcess(pidfd)
    finally:
        os.close(pidfd)


def doubt_about(info: ReplicaInfo, namespace: str) -> str:
    """Why the process of a record in this namespace gets no signal; empty if it may."""
    try:
        with hold_process(info, namespace):
            return ""
    except UnsureProcessError as error:
        return str(error)


def _open(info: ReplicaInfo) -> int:
    if info.host != platform.node():
        raise UnsureProcessError(f"it runs on host {info.host or '(not told)'}, and this is {platform.node()}")
    if not info.process:
        raise UnsureProcessError("its record does not say which process it is: an older release wrote it")
    if info.pid <= 1:
        raise UnsureProcessError(f"no replica is process {info.pid}")
    try:
        return os.pidfd_open(info.pid)
    except ProcessLookupError:
        raise UnsureProcessError(f"there is no process {info.pid}") from None
    except OSError as error:
        raise UnsureProcessError(f"process {info.pid} can't be held: {error}") from error


def _check(info: ReplicaInfo, namespace: str, pidfd: int) -> None:
    if process_mark(info.pid) != info.process:
        raise UnsureProcessError(
            f"process {info.pid} here is another one: the replica has ended, or runs in another container or machine"
        )
    try:
        words = _words_of(info.pid)
        is_another = _ZYGOTE in words and not _is_forked(info.pid, words)
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        raise UnsureProcessError(f"process {info.pid} has just ended") from None
    except OSError as error:
        raise UnsureProcessError(f"this user may not signal process {info.pid}: {error}") from error
    # Whoever writes records could name any process of this host, and replicas of others' namespaces.
    if not _is_replica(words, namespace.encode()):
        raise UnsureProcessError(f"process {info.pid} is no replica of namespace {namespace!r}")
    if is_another:
        raise UnsureProcessError(f"process {info.pid} is what replicas are forked from, or a part of one")


def _words_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _is_forked(pid: int, words: Sequence[bytes]) -> bool:
    """Whether this is a replica that was forked: it leads a session, and its parent is called as it is."""
    # The name in parentheses may hold spaces; the fields after it do not.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    parent, session = int(fields[1]), int(fields[3])
    return session == pid and _words_of(parent) == words


def _is_replica(words: Sequence[bytes], namespace: bytes) -> bool:
    """Whether these are the words of a process that runs a replica, or was forked to, in this namespace."""
    is_one = b"stage_runtime" in words and not {_REPLICA, _ZYGOTE}.isdisjoint(words)
    return is_one and (_NAMESPACE, namespace) in pairwise(words)
