"""A real supervisor with real replicas of one stage, found through a real registry and spoken to frame by frame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import DeployConfig, decode_deploy, encode_deploy
from omni_discovery.records.schema import HubRecord, ReplicaInfo, ReplicaStatus
from tests.support.replica_hub import RawHub, eventually

STARTUP_S = 60.0


def echo_stages(*engine_args: dict[str, Any]) -> DeployConfig:
    """A chain of echo stages."""
    stages = [
        {"stage_id": number, "engine": "echo", "engine_args": args, "final_output": "text"}
        for number, args in enumerate(engine_args)
    ]
    import msgspec

    return decode_deploy(msgspec.json.encode({"stages": stages}), "test")


class Deployment:
    """One namespace: the deploy document in the registry, a registered hub, and supervisors."""

    def __init__(
        self,
        endpoint: str,
        namespace: str,
        deploy: DeployConfig,
        folder: Path,
        flags: Sequence[str] = ("--allow", "all"),
    ) -> None:
        """``flags`` are given to every supervisor: as a rule these hosts trust whoever writes the document."""
        self.endpoint, self.namespace, self.folder, self._flags = endpoint, namespace, folder, flags
        self.keys = KeyPair.generate()
        self.supervisors: list[subprocess.Popen[bytes]] = []
        self._hubs: list[RawHub] = []
        record = HubRecord(hub_id="hub-1", curve_public_key=self.keys.public)
        self.client = OmniCoordClientForHub(endpoint, namespace=namespace, ttl_s=5.0, hub=record)
        self.client.create_pipeline(encode_deploy(deploy))

    def start(self, stage_id: int = 0, count: int = 1, *flags: str) -> subprocess.Popen[bytes]:
        """Start a supervisor; its output goes to ``log``."""
        with self.log(len(self.supervisors)).open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "stage_runtime", "--stage-id", str(stage_id), "--etcd-endpoints",
                    self.endpoint, "--namespace", self.namespace, "--omni-dp-size-local", str(count),
                    "--omni-heartbeat-timeout", "5",
                    *self._flags, *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )  # fmt: skip
        self.supervisors.append(process)
        return process

    def log(self, number: int = 0) -> Path:
        """What one supervisor and its replicas print."""
        return self.folder / f"supervisor-{number}.log"

    def replicas(self, stage_id: int = 0, status: ReplicaStatus = ReplicaStatus.UP) -> list[ReplicaInfo]:
        """The stage's replicas with that status, as the registry has them."""
        found = self.client.view().replicas.values()
        return [info for info in found if info.stage_id == stage_id and info.status is status]

    def wait_up(self, stage_id: int = 0, count: int = 1, timeout_s: float = STARTUP_S) -> list[ReplicaInfo]:
        """Wait until so many replicas of the stage are up."""
        eventually(lambda: len(self.replicas(stage_id)) >= count or self._gave_up(), timeout_s)
        up = len(self.replicas(stage_id)) >= count
        assert up, self.log(0).read_text() if self.supervisors else "no supervisor"
        return self.replicas(stage_id)

    def _gave_up(self) -> bool:
        return bool(self.supervisors) and all(process.poll() is not None for process in self.supervisors)

    def hub(self, replica: ReplicaInfo, keys: KeyPair | None = None, hub_id: str = "hub-1") -> RawHub:
        """A hub's sockets to one replica, not greeted yet."""
        hub = RawHub(
            hub_id, keys or self.keys, replica.input_addr, replica.output_addr, replica.curve_public_key, replica.epoch
        )
        self._hubs.append(hub)
        return hub

    def session(self, replica: ReplicaInfo) -> RawHub:
        """A hub's sockets to one replica, welcomed on both."""
        hub = self.hub(replica)
        hub.hello(STARTUP_S)
        return hub

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hub in self._hubs:
            hub.close()
        for process in self.supervisors:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGTERM)
        for process in self.supervisors:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.client.close()


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
