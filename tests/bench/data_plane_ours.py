"""The shipped data plane: StageClient on uvloop here, server and engine loop with the echo engine in a process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from hub.config import HubConfig
from hub.replicas.events import Answered, ClientEvent, Granted, Recalled, SessionDown, SessionUp
from hub.replicas.sockets import make_context
from hub.replicas.stage_client import StageClient
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.deploy.document import decode_deploy
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import Job, Wake
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import create_engine
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.server import ReplicaServer

HUB_ID: Final = "bench"
_EPOCH: Final = 7


class EchoReplica:
    """What a replica process has, but for the registry. For an Actor; the engine's loop has a thread of its own."""

    def __init__(self, keys: KeyPair | None, hub_key: str, capacity: int) -> None:
        # It would say of each client that is done that it is gone.
        logging.disable(logging.WARNING)
        stages = [{"stage_id": 0, "engine": "echo", "engine_args": {"capacity": capacity}, "final_output": "text"}]
        engine = create_engine(decode_deploy(msgspec.json.encode({"stages": stages}), "bench").stage(0))
        state = ReplicaState(lambda: LifeState.READY, lambda: engine.capacity)
        self._server = ReplicaServer(ServerConfig(), "127.0.0.1", keys, state, self._take)
        self._loop = EngineLoop(engine, Payloads(0, {}, time.monotonic), {}, self._server.emit)
        self._is_over = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        if keys is not None:
            self._server.set_allowed_hubs({HUB_ID: hub_key})
        self._server.start()
        self._server.set_epoch(_EPOCH)
        self._thread.start()

    def ports(self) -> tuple[int, int]:
        """Of the input and the output socket."""
        return self._server.input_port, self._server.output_port

    def shut(self) -> None:
        """End the threads."""
        self._is_over = True
        self._loop.jobs.put(Wake())
        self._thread.join(5.0)
        self._server.close()

    def _take(self, job: Job) -> None:
        self._loop.jobs.put(job)

    def _work(self) -> None:
        while not self._is_over:
            self._loop.turn()


def info_of(ports: tuple[int, int], keys: KeyPair | None, capacity: int, replica_id: int = 0) -> ReplicaInfo:
    """The record that such a replica would have."""
    return ReplicaInfo(
        input_addr=f"tcp://127.0.0.1:{ports[0]}",
        output_addr=f"tcp://127.0.0.1:{ports[1]}",
        stage_id=0,
        status=ReplicaStatus.UP,
        queue_length=0,
        last_heartbeat=0.0,
        registered_at=0.0,
        replica_id=replica_id,
        epoch=_EPOCH,
        capacity=capacity,
        curve_public_key="" if keys is None else keys.public,
    )


class OurClient:
    """The same face as BareClient, over a StageClient that goes by credits."""

    def __init__(self, info: ReplicaInfo, keys: KeyPair | None, on_answer: Callable[[int], Any]) -> None:
        self._on_answer = on_answer
        self._up = asyncio.Event()
        self._credits = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = make_context()
        # Nothing waits in these runs for as long as that but behind others.
        config = HubConfig(accept_timeout_s=5.0)
        self._client = StageClient(info, HUB_ID, keys, config, self._context, self._hear)

    async def ready(self) -> None:
        """Wait for the session."""
        await asyncio.wait_for(self._up.wait(), 10.0)

    def ask(self, request_id: int, prompt: str) -> None:
        """Send one request, on a credit if there is one."""
        credit = self._credits > 0
        self._credits -= credit
        self._client.submit(
            wire.Submit(epoch=_EPOCH, request_id=str(request_id), inputs={"prompt": prompt}, credit=credit)
        )

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
        self._context.term()

    def _hear(self, event: ClientEvent) -> None:
        match event:
            case Answered(message=wire.StageDone(request_id=request_id)):
                self._on_answer(int(request_id))
            case Answered(message=wire.Accepted() | wire.Chunk()):
                pass
            case Granted(credits=credits_):
                self._credits += credits_
            case Recalled(session=session):
                self._client.return_credits(session, 0)
            case SessionUp():
                self._up.set()
            case SessionDown() | Answered():
                raise RuntimeError(f"the replica went or refused: {event}")
            case _:
                pass
