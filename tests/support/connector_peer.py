"""Another process with a connector, told over a pipe what to do; it can be killed at any moment."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import zlib
from multiprocessing.connection import Connection
from typing import Any

import torch

from stage_runtime.connectors import ConnectorSpec, OmniConnectorFactory
from tests.support.netns import Host

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


def payload(size_bytes: int, seed: int = 0) -> dict[str, Any]:
    """A hand-off of about that size whose content is known from the seed."""
    tensor = torch.arange(max(size_bytes // 8, 1), dtype=torch.int64)
    tensor += seed
    return {"seed": seed, "tensor": tensor}


def digest(value: dict[str, Any]) -> int:
    """What tells two payloads apart."""
    return zlib.crc32(value["tensor"].numpy().data.cast("B"))


def intact(value: dict[str, Any]) -> bool:
    """Whether a payload is what ``payload`` made, from the first to the last number."""
    tensor = value["tensor"]
    return bool(torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int64) + value["seed"]))


def _serve(kind: str, extra: dict[str, Any], pipe: Connection, home: Host | None) -> None:
    with contextlib.nullcontext() if home is None else home.inside():
        _obey(kind, extra, pipe)


def _obey(kind: str, extra: dict[str, Any], pipe: Connection) -> None:
    connector = OmniConnectorFactory.create_connector(ConnectorSpec(kind, extra))
    held: dict[str, Any] = {}
    pipe.send("ready")
    while True:
        try:
            order, *arguments = pipe.recv()
        except EOFError:
            return
        match order:
            case "put":
                key, size_bytes, seed = arguments
                pipe.send(connector.put("0", "1", key, payload(size_bytes, seed)))
            case "get":
                key, metadata = arguments
                got = connector.get("0", "1", key, metadata)
                answer = None if got is None else (intact(got[0]), got[0]["seed"], got[1])
                del got
                pipe.send(answer)
            case "hold":
                key, metadata = arguments
                held[key] = connector.get("0", "1", key, metadata)
                pipe.send(held[key] is not None)
            case "holds":
                pipe.send(intact(held[arguments[0]][0]))
            case "drop":
                held.pop(arguments[0], None)
                pipe.send(None)
            case "begin":
                # No answer until the fetch is over: whoever asks will kill this process meanwhile.
                key, metadata = arguments
                pipe.send("begun")
                connector.get("0", "1", key, metadata)
            case _:
                pipe.send(getattr(connector, order)(*arguments))


class Peer:
    """The process, on this machine or on a host of its own network. ``kill`` is SIGKILL."""

    def __init__(self, kind: str, home: Host | None = None, **extra: Any) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(kind, extra, theirs, home), daemon=True)
        self.process.start()
        theirs.close()
        assert self.wait() == "ready"

    def call(self, *order: Any) -> Any:
        """Have something done, and its outcome."""
        self._pipe.send(order)
        return self.wait()

    def wait(self, timeout_s: float = 60.0) -> Any:
        assert self._pipe.poll(timeout_s), "the other process says nothing"
        return self._pipe.recv()

    def kill(self) -> None:
        """End it as the kernel does when memory runs out. Idempotent."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._pipe.close()
