"""A replica in a process of its own, without a registry or a supervisor, so that nothing brings it back."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


class ChildReplica:
    """Runs while it is entered, or until it is killed; ``info`` is what its record would say."""

    def __init__(self, hubs: Mapping[str, str], replica_id: int = 0, epoch: int = 70, **engine_args: Any) -> None:
        order = {"hubs": dict(hubs), "replica_id": replica_id, "epoch": epoch, **engine_args}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.child_replica", json.dumps(order), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.info: ReplicaInfo

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self._process.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        fields = json.loads(self._process.stdout.readline())
        self.info = ReplicaInfo(**{**fields, "status": ReplicaStatus(fields["status"])})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    from omni_discovery.deploy.document import decode_deploy
    from tests.support.local_replica import LocalReplica

    order = json.loads(sys.argv[1])
    deploy = decode_deploy(order.pop("deploy").encode(), "test") if "deploy" in order else None
    if deploy is not None and "engine_class" in order:
        # In place of the echo.
        module, _, name = order.pop("engine_class").partition(":")
        order["engine"] = getattr(importlib.import_module(module), name)(deploy.stage(order["stage_id"]))
        order["engine"].load(lambda _phase, _progress: None)
    with LocalReplica(order.pop("hubs"), deploy=deploy, **order) as replica:
        shown = {name: value for name, value in asdict(replica.info).items() if name != "extra"}
        print(json.dumps(shown), flush=True)  # noqa: T201
        # Ends with whoever started it.
        sys.stdin.read()


if __name__ == "__main__":
    main()
