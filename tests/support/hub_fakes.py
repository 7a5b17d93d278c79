"""A scripted replica on real ZMQ sockets, and hubs that talk to it without a registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import zmq

from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.replicas.resolver import Resolver
from hub.replicas.sockets import LoopSocket
from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.curve import KeyPair, secure_server
from omni_discovery.deploy.document import DeployConfig, parse_deploy
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.stories import Stories
from omni_discovery.view.table import Delta, View
from tests.support.quiet import patience_s

ONE_STAGE = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
PAIR = """
stages:
  - {stage_id: 0, engine: echo, final_output: text, default_sampling_params: {max_tokens: 8}}
  - {stage_id: 1, engine: echo, final_output: image}
"""
#: Short waits, so that what must time out does so within a test's patience. The fake replicas below send each message
#: in one frame, as those of the release before.
QUICK = HubConfig(
    former_replicas=True,
    pick_timeout_s=1.0,
    accept_timeout_s=0.3,
    accept_limit_s=1.5,
    abort_timeout_s=0.5,
    request_timeout_s=10.0,
    hello_interval_s=0.02,
    connect_timeout_s=1.0,
    reconnect_min_s=0.02,
    reconnect_max_s=0.1,
)

_revisions = count(1)
Script = Callable[["FakeReplica", wire.Submit], None]


def deploy_of(text: str) -> DeployConfig:
    return parse_deploy(text, "test.yaml")


def echo(replica: FakeReplica, submit: wire.Submit) -> None:
    """Accept, put the prompt out word by word, and hand over whatever is wanted."""
    replica.accept(submit)
    words = str(submit.inputs.get("prompt", "")).split()
    for seq, word in enumerate(words):
        replica.chunk(submit, seq, text=word + " ")
    if submit.segmented:
        replica.segment_done(submit, len(words), 0)
    else:
        replica.done(submit, len(words))


def echo_on(replica: FakeReplica, update: wire.Update) -> None:
    """Say a further segment, or end, if its request was begun here."""
    submits = [each for each in replica.of(wire.Submit) if each.request_id == update.request_id]
    if not submits:
        return
    submit, seq = submits[-1], replica.segment_ends.get(update.request_id, 0)
    replica.accept(submit)
    if update.is_last:
        replica.done(submit, seq)
        return
    words = str(update.inputs.get("prompt", "")).split()
    for number, word in enumerate(words, seq):
        replica.chunk(submit, number, text=word + " ")
    replica.segment_done(submit, seq + len(words), update.segment)


def picture(replica: FakeReplica, submit: wire.Submit) -> None:
    """Accept and put out one picture."""
    replica.accept(submit)
    replica.chunk(submit, 0, modality="image", mime="image/png", attachments=[b"PNG"])
    replica.done(submit, 1)


def accept_only(replica: FakeReplica, submit: wire.Submit) -> None:
    """Take the work and say nothing more."""
    replica.accept(submit)


def silence(_replica: FakeReplica, _submit: wire.Submit) -> None:
    """Read the work and say nothing at all."""


class FakeReplica:
    """One life of one replica on the test's own loop. ``script`` is called with each Submit."""

    def __init__(
        self,
        script: Script = echo,
        stage_id: int = 0,
        replica_id: int = 0,
        epoch: int | None = None,
        keys: KeyPair | None = None,
        zap: bool = False,
        bind: tuple[str, str] | None = None,
        *,
        cuts: bool = False,
    ) -> None:
        """``cuts``: it cuts long messages, and says so; it takes short ones only."""
        self.script = script
        self.received: list[wire.ToReplica] = []
        self.queue_length = 0
        self.greets = True
        self.acknowledges_aborts = True
        #: What it does about further segments.
        self.on_update: Callable[[FakeReplica, wire.Update], None] | None = echo_on if script is echo else None
        #: What it does with a piece of a hand-off.
        self.on_feed: Callable[[FakeReplica, wire.Feed], None] | None = None
        #: The number of the frame behind the last segment's end, by request.
        self.segment_ends: dict[str, int] = {}
        self._keys = keys or KeyPair.generate()
        self._hub = b""
        self._cuts = cuts
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        wanted = bind or ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self._input, input_addr = self._bind("input", wanted[0], zap=zap)
        self._output, output_addr = self._bind("output", wanted[1], zap=zap)
        self.info = ReplicaInfo(
            input_addr=input_addr,
            output_addr=output_addr,
            stage_id=stage_id,
            status=ReplicaStatus.UP,
            queue_length=0,
            last_heartbeat=0.0,
            registered_at=0.0,
            replica_id=replica_id,
            epoch=next(_revisions) if epoch is None else epoch,
            curve_public_key=self._keys.public,
            wire_version=wire.VERSION_CUT if cuts else 1,
        )

    @property
    def name(self) -> str:
        return f"{self.info.stage_id}/{self.info.replica_id}"

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        return self._context

    def of(self, kind: type[Any]) -> list[Any]:
        """The messages of one kind that it has received."""
        return [message for message in self.received if isinstance(message, kind)]

    def _bind(self, name: str, addr: str, *, zap: bool) -> tuple[LoopSocket, str]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("[" in addr))
        if zap:
            socket.setsockopt(zmq.ZAP_DOMAIN, b"replica")
        secure_server(socket, self._keys)
        socket.bind(addr)
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return LoopSocket(socket, lambda frames: self._read(name, frames)), bound

    def _read(self, name: str, frames: list[bytes]) -> None:
        self._hub = frames[0]
        for message in wire.decode_to_replica(frames[1:]):
            self._hear(name, message)

    def _hear(self, name: str, message: wire.ToReplica) -> None:
        self.received.append(message)
        if isinstance(message, wire.Hello):
            if self.greets and message.epoch == self.info.epoch:
                welcome = wire.Welcome(epoch=message.epoch, capacity=1, queue_length=self.queue_length)
                self.say(welcome, self._input if name == "input" else self._output)
        elif isinstance(message, wire.Abort):
            if self.acknowledges_aborts:
                self.say(
                    wire.Aborted(
                        epoch=message.epoch,
                        request_id=message.request_id,
                        attempt=message.attempt,
                        running=True,
                        queue_length=self.queue_length,
                    )
                )
        elif isinstance(message, wire.Submit):
            self.script(self, message)
        elif isinstance(message, wire.Update) and self.on_update is not None:
            self.on_update(self, message)
        elif isinstance(message, wire.Feed) and self.on_feed is not None:
            self.on_feed(self, message)

    def say(
        self, message: wire.FromReplica, socket: LoopSocket | None = None, attachments: Sequence[bytes] = ()
    ) -> None:
        on_input = isinstance(message, wire.Accepted | wire.Rejected | wire.Aborted)
        target = socket or (self._input if on_input else self._output)
        self._send_frames([wire.encode(message), *attachments], target)

    def send_head(self, head: bytes) -> None:
        """Send what is encoded already."""
        self._send_frames([head], self._output)

    def _send_frames(self, frames: Sequence[bytes], socket: LoopSocket) -> None:
        socket.send([self._hub, *(wire.cut(frames) if self._cuts else frames)])

    def accept(self, submit: wire.Submit) -> None:
        self.say(wire.Accepted(**self._about(submit)))

    def reject(self, submit: wire.Submit, kind: wire.FailureKind = wire.FailureKind.OVERLOADED) -> None:
        self.say(wire.Rejected(**self._about(submit), kind=kind, reason="no"))

    def chunk(
        self,
        submit: wire.Submit,
        seq: int,
        text: str = "",
        modality: str = "text",
        mime: str = "",
        attachments: Sequence[bytes] = (),
    ) -> None:
        about = self._about(submit)
        self.say(wire.Chunk(**about, seq=seq, modality=modality, text=text, mime=mime), attachments=attachments)

    def done(self, submit: wire.Submit, seq: int, *, finish_reason: str = "stop", hands_over: bool = True) -> None:
        payloads = tuple(self.payload(submit, stage_id) for stage_id in submit.next_stages) if hands_over else ()
        about = self._about(submit)
        self.say(
            wire.StageDone(**about, seq=seq, finish_reason=finish_reason, payloads=payloads, usage={"tokens": seq})
        )

    def segment_done(self, submit: wire.Submit, seq: int, segment: int) -> None:
        self.segment_ends[submit.request_id] = seq + 1
        payloads = tuple(self.payload(submit, stage_id) for stage_id in submit.next_stages)
        about = self._about(submit)
        self.say(wire.SegmentDone(**about, seq=seq, segment=segment, finish_reason="stop", payloads=payloads))

    def fail(self, submit: wire.Submit, kind: wire.FailureKind = wire.FailureKind.ENGINE) -> None:
        self.say(wire.StageFailed(**self._about(submit), kind=kind, reason="it broke"))

    def payload(self, submit: wire.Submit, to_stage: int) -> wire.PayloadRef:
        stage_id = self.info.stage_id
        key = f"{submit.request_id}/{submit.attempt}/{to_stage}"
        return wire.PayloadRef(from_stage=stage_id, to_stage=to_stage, key=key, connector="shm", size_bytes=1)

    def _about(self, submit: wire.Submit) -> dict[str, Any]:
        return {
            "epoch": submit.epoch,
            "request_id": submit.request_id,
            "attempt": submit.attempt,
            "queue_length": self.queue_length,
        }

    def kill_soon(self, after_s: float = 0.01) -> None:
        """Die, after what was said has had the time to leave."""
        asyncio.get_running_loop().call_later(after_s, self.kill)

    def kill(self) -> None:
        """Close its sockets as a dead process does. Idempotent."""
        self._input.close()
        self._output.close()
        if not self._context.closed:
            self._context.term()


def view_of(replicas: Iterable[ReplicaInfo]) -> View:
    """A view at a new revision that lists these records."""
    return View(replicas={(info.stage_id, info.replica_id): info for info in replicas}, revision=next(_revisions))


def show(omni: AsyncOmni, *replicas: ReplicaInfo) -> None:
    """Let the hub see a registry that holds exactly these records."""
    omni.apply_view(view_of(replicas), Delta(added=tuple(replicas)))


@asynccontextmanager
async def running_hub(
    *replicas: FakeReplica,
    deploy: str = ONE_STAGE,
    config: HubConfig = QUICK,
    policy: str = "round-robin",
    wait: bool = True,
    stories: Stories | None = None,
    resolver: Resolver | None = None,
) -> AsyncIterator[AsyncOmni]:
    """A hub that sees these replicas; hub and replicas are closed at the end."""
    omni = AsyncOmni(deploy_of(deploy), "hub-1", KeyPair.generate(), config, policy, stories=stories, resolver=resolver)
    try:
        async with started_hub(omni, *(replica.info for replica in replicas), wait=wait):
            yield omni
    finally:
        for replica in replicas:
            replica.kill()


@asynccontextmanager
async def started_hub(
    omni: AsyncOmni, *infos: ReplicaInfo, wait: bool = True, timeout_s: float = 5.0
) -> AsyncIterator[AsyncOmni]:
    """A hub that sees these records, with ``wait`` once it can pick them all; it is closed at the end."""
    await omni.start()
    try:
        show(omni, *infos)
        if wait:
            await until(lambda: sum(stage.pickable for stage in omni.stage_status()) == len(infos), timeout_s)
        yield omni
    finally:
        await omni.close()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until something is so. Raise TimeoutError."""
    async with asyncio.timeout(patience_s(timeout_s)):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def collect(outputs: AsyncIterator[OmniOutput]) -> list[OmniOutput]:
    return [output async for output in outputs]


def text_of(outputs: Iterable[OmniOutput]) -> str:
    return "".join(output.text for output in outputs)


async def ask(omni: AsyncOmni, prompt: str = "hello there") -> str:
    """The text of one whole answer."""
    return text_of(await collect(omni.generate({"prompt": prompt})))


def with_status(info: ReplicaInfo, status: ReplicaStatus) -> ReplicaInfo:
    return replace(info, status=status)
