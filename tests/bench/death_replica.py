"""Replicas to kill: each a process that is there in milliseconds, forked from one that has the imports behind it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from itertools import count
from multiprocessing.connection import Connection
from typing import Final

from omni_discovery.curve import KeyPair
from omni_discovery.records.schema import ReplicaInfo
from tests.bench.data_plane_ours import EchoReplica, info_of

_CAPACITY: Final = 8
_FORKING: Final = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tests.bench.data_plane_ours"])
_numbers: Final = count()


def _serve(pipe: Connection, keys: KeyPair, hub_key: str, held_bytes: int) -> None:
    held = bytearray(held_bytes)
    # Touched, or the kernel would have nothing to free.
    held[::4096] = b"x" * len(range(0, held_bytes, 4096))
    replica = EchoReplica(keys, hub_key, _CAPACITY)
    pipe.send(replica.ports())
    with contextlib.suppress(EOFError):
        pipe.recv()


class MortalReplica:
    """One replica process, with CURVE, that holds so much memory."""

    def __init__(self, hub_key: str, held_bytes: int = 0) -> None:
        keys = KeyPair.generate()
        self._pipe, theirs = _FORKING.Pipe()
        self._process = _FORKING.Process(target=_serve, args=(theirs, keys, hub_key, held_bytes), daemon=True)
        self._process.start()
        theirs.close()
        self._info: ReplicaInfo | None = None
        self._keys = keys

    @property
    def info(self) -> ReplicaInfo:
        """Its record. Waits for the process at the first call."""
        if self._info is None:
            if not self._pipe.poll(30.0):
                raise TimeoutError("the replica's process does not come up")
            self._info = info_of(self._pipe.recv(), self._keys, _CAPACITY, next(_numbers))
        return self._info

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self._process.pid is not None:
            os.kill(self._process.pid, number)

    def bury(self) -> None:
        """Kill it, if it lives, and forget it."""
        self._process.kill()
        self._process.join(10.0)
        self._pipe.close()
