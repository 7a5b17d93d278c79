"""A replica's server and engine in this process, without a registry: what it counts and runs can be looked at."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.wire import VERSION_CUT
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import Job
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads, build_edges
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.capabilities import capabilities_of
from stage_runtime.engines.echo.engine import EchoEngine
from stage_runtime.lifecycle import LifeState
from stage_runtime.replica.identity import params_of, voices_of
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.server import ReplicaServer
from tests.support.replica_hub import RawHub

#: Adding up so many numbers is one call into C of a second or more, in which no other thread gets a turn.
_HOG: Final = 100_000_000


class CountingEcho(EchoEngine):
    """Remembers every request that was begun, as ``hub/request/attempt``.

    A prompt that begins with ``hog`` keeps the whole interpreter to itself for a while, as some compilers do.
    """

    def __init__(self, stage: StageConfig) -> None:
        super().__init__(stage)
        self.begun: list[str] = []
        self.requests: list[StageRequest] = []

    def add(self, request: StageRequest) -> None:
        super().add(request)
        if str(request.inputs.get("prompt", "")).startswith("hog"):
            sum(range(_HOG))
        self.begun.append(request.key.rpartition("#")[0])
        self.requests.append(request)


class LocalReplica:
    """Serves while it is entered. ``keys`` None: nothing is encrypted; with ``deploy`` it hands over as that says.

    ``engine`` is a loaded one, in place of the echo.
    """

    def __init__(
        self,
        hubs: Mapping[str, str] | None = None,
        *,
        encrypted: bool = True,
        config: ServerConfig | None = None,
        stage_id: int = 0,
        replica_id: int = 0,
        epoch: int = 70,
        deploy: DeployConfig | None = None,
        engine: Any = None,
        **engine_args: Any,
    ) -> None:
        self.keys = KeyPair.generate() if encrypted else None
        self.engine = engine or CountingEcho(StageConfig(stage_id=stage_id, engine="echo", engine_args=engine_args))
        self.life_state = LifeState.READY
        state = ReplicaState(lambda: self.life_state, lambda: self.engine.capacity)
        self.server = ReplicaServer(config or ServerConfig(), "127.0.0.1", self.keys, state, self._take)
        edges = {} if deploy is None else build_edges(deploy, stage_id, "test", "127.0.0.1", "127.0.0.1")
        self.payloads = Payloads(stage_id, edges, time.monotonic)
        self.loop = EngineLoop(self.engine, self.payloads, {}, self.server.emit)
        self.server.set_allowed_hubs({hub_id: key for key, hub_id in (hubs or {}).items()})
        self.server.set_replica_name(f"{stage_id}/{replica_id}")
        self.server.set_epoch(epoch)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.info = ReplicaInfo(
            input_addr=f"tcp://127.0.0.1:{self.server.input_port}",
            output_addr=f"tcp://127.0.0.1:{self.server.output_port}",
            stage_id=stage_id,
            status=ReplicaStatus.UP,
            queue_length=0,
            last_heartbeat=0.0,
            registered_at=0.0,
            replica_id=replica_id,
            epoch=epoch,
            capacity=self.engine.capacity,
            curve_public_key="" if self.keys is None else self.keys.public,
            voices=list(voices_of(self.engine)),
            params=None if deploy is None else params_of(deploy.stage(stage_id), self.engine),
            partial_images=capabilities_of(self.engine).gives_partial_images(),
            wire_version=VERSION_CUT,
        )

    @property
    def ports(self) -> set[int]:
        return {self.server.input_port, self.server.output_port}

    def raw_hub(self, hub_id: str, keys: KeyPair | None, routing_id: str = "", receive_queue: int = 1000) -> RawHub:
        """A hub's bare sockets to it. ``receive_queue``: the messages that it takes in before anybody reads them."""
        info = self.info
        addresses = info.input_addr, info.output_addr
        return RawHub(hub_id, keys, *addresses, info.curve_public_key, info.epoch, routing_id, receive_queue)

    def _take(self, job: Job) -> None:
        self.loop.jobs.put(job)

    def _run(self) -> None:
        if torch := sys.modules.get("torch"):
            # How many threads torch uses here is settled now, and not between two calls of a kernel that counts them.
            torch.get_num_threads()
        while not self._closing.is_set():
            self.loop.turn()

    def __enter__(self) -> Self:
        self.server.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(10.0)
        self.server.close()
        self.payloads.close()
