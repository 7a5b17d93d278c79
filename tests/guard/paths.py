"""The hot paths, each made ready to be run so many times in a row, with the same inputs every time.

No sockets, no threads and no turn of a loop is in them: what they do is the same in every process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from itertools import count, repeat
from typing import Any, Final, cast

import msgspec

from hub.api.audio.threads import EncoderThreads
from hub.api.chat import answer as chat_answer
from hub.api.chat import schema
from hub.api.chat.answer import StreamedAnswer
from hub.api.chat.choices import Choices
from hub.api.exchange import Exchange
from hub.api.generation.usage import Usage
from hub.config import HubConfig
from hub.metrics import HubMetrics
from hub.orchestrator.active import AddRequest
from hub.orchestrator.orchestrator import Orchestrator
from hub.output_queue import Delivery, OutputQueue
from hub.pool.core import Pool
from hub.pool.stage_pool import StagePool
from hub.replicas.events import Answered, ClientEvent, Granted, PiecesCame, SessionUp
from hub.replicas.stage_client import StageClient
from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.outputs import OmniOutput
from hub.request.plan import StageGraph
from hub.request.state import RequestState
from omni_discovery import wire
from omni_discovery.balancing.base import Task
from omni_discovery.balancing.policies import LeastLoadBalancer
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.kv import KeyValue, Listing, PutEvent, WatchBatch
from omni_discovery.records import keys
from omni_discovery.records.schema import ReplicaInfo, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.view.table import Delta, ReplicaTable, View
from omni_discovery.wire import frames
from omni_discovery.wire.session import Peer
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import Finished, Job, Outcome, OutputChunk, Work
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import EngineOutput
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.outbox import Outbox, SendResult
from stage_runtime.server.sessions import Sessions
from tests.bench.picking import full_pool
from tests.support.pools import accept
from tests.support.replica_engine import ScriptedEngine, at_once

#: Runs a path so many times.
Run = Callable[[int], None]

_PIECES: Final = 16
_ONE: Final = "stages: [{stage_id: 0, engine: echo, final_output: text}]"
_PAIR: Final = """
stages:
  - {stage_id: 0, engine: e, final_output: text}
  - {stage_id: 1, engine: e, final_output: text}
"""
_BODY: Final = msgspec.json.encode(
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": "How many replicas does a stage need at least? " * 4},
        ],
        "stream": True,
        "max_tokens": 64,
        "temperature": 0.7,
        "stop": ["\n\n"],
    }
)


@dataclass(frozen=True, slots=True)
class Path:
    """One hot path: ``make`` returns what runs it.

    ``inside`` is a function that each turn calls: a test makes it dearer, and wants that to be seen. None: nothing is
    held against this path, it is what the others are compared with.
    """

    name: str
    make: Callable[[], Run]
    turns: int
    inside: tuple[Any, str] | None


def waste(loops: int) -> None:
    """Do nothing so many times, each time at the same cost."""
    for _ in repeat(None, loops):
        pass


def wasteful(function: Callable[..., Any], loops: int, note: Callable[[], object]) -> Callable[..., Any]:
    """The function, which calls ``note`` and turns an empty loop so many times before it begins."""

    @wraps(function)
    def called(*args: Any, **more: Any) -> Any:
        note()
        waste(loops)
        return function(*args, **more)

    return called


def _loop() -> Run:
    return waste


def _call() -> Run:
    nothing, notes = wasteful(lambda _argument: None, 0, list[None]().clear), range(10)

    def run(turns: int) -> None:
        for _ in range(turns):
            nothing(notes)

    return run


def _reference() -> Run:
    """What any Python program does, and nothing of ours: it tells interpreters apart."""
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode

    class Thing:
        def __init__(self, name: str, place: int) -> None:
            self.name, self.place = name, place

        def moved(self) -> int:
            return self.place + 1

    def run(turns: int) -> None:
        kept: dict[str, Thing] = {}
        for turn in range(turns):
            for place in range(10):
                name = f"{turn % 8}-{place}"
                kept[name] = Thing(name, place)
            sum(each.moved() for each in kept.values() if each.place > 2)
            decode(encode({"name": "a", "places": [1, 2, 3]}))

    return run


def _pick() -> Run:
    pool = full_pool("least-load", 200, (1.0,), True)
    core, now_s = pool.core, pool.now()
    task: Task = {"request_id": "r", "engine_inputs": {"prompt": "hello"}, "sampling_params": {}}

    def run(turns: int) -> None:
        for turn in range(turns):
            name = f"r{turn}"
            binding = core.try_pick(name, task)
            assert binding is not None
            accept(core, name)
            pool.release(name)
            core.report(binding.addr, 0, now_s)
            core.grant(binding.addr, 1)

    return run


def _submit() -> Run:
    params = {"temperature": 0.7, "max_tokens": 64, "stop": ["\n\n"]}
    message = wire.Submit(
        epoch=7, request_id="chatcmpl-1", inputs={"prompt": "How many replicas?" * 8}, params=params, credit=True
    )

    def run(turns: int) -> None:
        for _ in range(turns):
            wire.decode_to_replica([wire.encode(message)])

    return run


def _chunk(request_id: str, seq: int, attempt: int = 0) -> wire.Chunk:
    return wire.Chunk(
        epoch=7,
        request_id=request_id,
        seq=seq,
        modality="text",
        queue_length=1,
        attempt=attempt,
        text="word ",
        token_ids=(1000 + seq,),
    )


def _pieces_in() -> Run:
    batch = [frames.join([wire.encode(_chunk(f"chatcmpl-{number}", 3)) for number in range(_PIECES)])]

    def run(turns: int) -> None:
        for _ in range(turns):
            wire.decode_from_replica(batch)

    return run


def _replica() -> Run:
    """A request comes, is accepted, makes its pieces and ends: all that is between the sockets and the engine."""
    jobs: list[Job] = []

    def send(_hub: str, _frames: Any) -> SendResult:
        return SendResult.SENT

    state = ReplicaState(lambda: LifeState.READY, lambda: 8)
    boxes = Outbox(send, 1000, 1 << 20), Outbox(send, 1000, 1 << 20)
    sessions = Sessions(ServerConfig(), state, Counter(), jobs.append, *boxes)
    sessions.handshake.registered_epoch = 7
    sessions.handshake.follow_epoch()
    peer, numbers = Peer("h/1", "h"), count(1000)
    for receive in (sessions.on_input, sessions.on_output):
        receive(peer, wire.encode(wire.Hello(hub_id="h", epoch=7)), 0.0)
    sessions.flush_messages(0.0)

    def run(turns: int) -> None:
        for _ in range(turns):
            submit = wire.Submit(epoch=7, request_id=f"r{next(numbers)}", inputs={"prompt": "hello"})
            sessions.on_input(peer, wire.encode(submit), 1.0)
            sessions.flush_messages(1.0)
            work = jobs.pop()
            assert isinstance(work, Work)
            jobs.clear()
            for seq in range(_PIECES):
                sessions.deliver_outcomes([OutputChunk(work.key, "text", "word ", (1000 + seq,))])
                sessions.flush_messages(1.0)
            sessions.deliver_outcomes([Finished(work.key, "stop")])
            sessions.flush_messages(1.0)
            jobs.clear()

    return run


def _engine_loop() -> Run:
    """A step that gives eight requests a token each."""
    engine, said = ScriptedEngine(), list[Outcome]()
    engine.capacity = 8
    loop = EngineLoop(engine, Payloads(0, {}, lambda: 1.0), {}, said.extend, lambda: 1.0, at_once)
    names = [f"r{number}" for number in range(8)]
    for name in names:
        loop.jobs.put(Work(name, f"h/{name}", name, 0, {"prompt": "hi"}, {}, (), (), 1.0, 61.0))
    loop.turn()
    step = [EngineOutput(name, text="word ", token_ids=(1,)) for name in names]

    def run(turns: int) -> None:
        for _ in range(turns):
            engine.steps.append(step)
            loop.turn()
            assert len(said) >= len(names)
            said.clear()

    return run


def _record(replica_id: int, revision: int) -> KeyValue:
    record = ReplicaRecord(
        stage_id=0,
        replica_id=replica_id,
        status=ReplicaStatus.UP,
        input_addr=f"tcp://10.0.0.1:{10_000 + replica_id}",
        output_addr=f"tcp://10.0.0.1:{20_000 + replica_id}",
        capacity=8,
    )
    return KeyValue(keys.replica_key("default", 0, replica_id), encode_record(record), 1, revision, 1)


def _listed() -> ReplicaTable:
    made = ReplicaTable("default")
    made.replace(Listing(1, 1, tuple(_record(number, 1) for number in range(50))), 1.0)
    return made


def _table_put() -> Run:
    made = _listed()

    def run(turns: int) -> None:
        for turn in range(turns):
            revision = made.snapshot().revision + 1
            made.apply(WatchBatch(revision, (PutEvent(_record(turn % 50, revision)),)), 2.0)

    return run


def _table_list() -> Run:
    listing = Listing(1, 1, tuple(_record(number, 1) for number in range(50)))

    def run(turns: int) -> None:
        for _ in range(turns):
            ReplicaTable("default").replace(listing, 1.0)

    return run


def _machine() -> Run:
    """A request of two stages, of which both show pieces: every event until its end."""
    graph = StageGraph(parse_deploy(_PAIR, "guard.yaml"))
    plan, params = graph.plan(None), graph.merge_params({0: {"max_tokens": 64}})
    replicas = [ev.ReplicaRef(stage_id, 0, 7, f"tcp://{stage_id}:1") for stage_id in range(2)]
    about: dict[str, Any] = {"epoch": 7, "request_id": "r", "queue_length": 1}
    hand_off = wire.PayloadRef(from_stage=0, to_stage=1, key="0-1", connector="shm", size_bytes=1)
    ends = [
        wire.StageDone(**about, seq=_PIECES, finish_reason="stop", payloads=payloads, usage={"completion_tokens": 16})
        for payloads in ((hand_off,), ())
    ]
    pieces, accepted = [_chunk("r", seq) for seq in range(_PIECES)], wire.Accepted(**about)

    def run(turns: int) -> None:
        for _ in range(turns):
            machine = RequestMachine(RequestState("r", {"prompt": "hi"}, plan, params))
            machine.handle(ev.Submitted(), 1.0)
            for stage_id in range(2):
                machine.handle(ev.Sent(stage_id, 0, replicas[stage_id], False), 2.0)
                machine.handle_message(stage_id, accepted, 3.0)
                for piece in pieces:
                    if machine.take_piece(stage_id, piece, 4.0) is None:
                        machine.handle_message(stage_id, piece, 4.0)
                machine.handle_message(stage_id, ends[stage_id], 5.0)
            assert machine.finished

    return run


class Link:
    """A replica whose sockets are not there: what is sent to it is kept."""

    session_up, is_connected, has_open_aborts, named_epoch = True, True, False, 7

    def __init__(self, info: ReplicaInfo) -> None:
        self.info, self.addr = info, info.input_addr
        self.submitted: list[wire.Submit] = []

    def submit(self, message: wire.Submit) -> None:
        self.submitted.append(message)

    def want_credits(self, _waiting: int, _oldest_wait_s: float) -> None:
        """It lends all that it has."""

    def return_credits(self, _session: int, _count: int) -> None:
        """It recalls none."""

    def release_payloads(self, _request_id: str) -> None:
        """It has none."""

    def renew(self, info: ReplicaInfo, *, afresh: bool) -> None:
        """Its record is another."""
        self.info = info

    def close(self) -> None:
        """Nothing is open."""


class LinkedHub:
    """An orchestrator of one stage with a few replicas, which lend it slots. Its loop is turned by hand."""

    def __init__(self, replicas: int, slots: int = 1) -> None:
        self.links, self.outputs = dict[str, Link](), list[Any]()

        def connect(info: ReplicaInfo, _on_event: Callable[[ClientEvent], None]) -> StageClient:
            link = self.links[info.input_addr] = Link(info)
            return cast(StageClient, link)

        self.pool = StagePool(0, LeastLoadBalancer())
        outputs = self.outputs
        self.hub = Orchestrator(
            [self.pool], connect, HubConfig(), HubMetrics(), emit=lambda _request_id, output: outputs.append(output)
        )
        self._plan = StageGraph(parse_deploy(_ONE, "guard.yaml")).plan(None)
        infos = [linked_replica(number) for number in range(replicas)]
        self.hub.apply_view(View({(0, info.replica_id): info for info in infos}, revision=1), Delta(added=tuple(infos)))
        self.turn()
        for link in self.links.values():
            self.tell(SessionUp(link, 0, gated=True))
            self.tell(Granted(link, slots, 0))

    def turn(self) -> None:
        """Until nothing waits."""
        self.hub._take_turn()
        while self.hub._inbox:
            self.hub._take_turn()

    def tell(self, event: ClientEvent) -> None:
        """A client of a replica has news."""
        self.hub._post(event)
        self.turn()

    def begin(self, name: str) -> tuple[Link, int]:
        """A request comes and is accepted; where it is, and as which attempt."""
        self.hub.request_async_queue.put_nowait(AddRequest(name, name, {"prompt": "hi"}, self._plan, {}, 600.0, 1e9))
        self.turn()
        addr = self.pool.core.bound(name)
        assert addr is not None
        link = self.links[addr]
        attempt = link.submitted.pop().attempt
        self.tell(Answered(link, wire.Accepted(epoch=7, request_id=name, queue_length=1, attempt=attempt), (), 1.0))
        return link, attempt

    def piece(self, name: str, link: Link, seq: int, attempt: int) -> None:
        """A piece of it comes."""
        self.tell(PiecesCame(link, [_chunk(name, seq, attempt)], 1.0))

    def end(self, name: str, link: Link, seq: int, attempt: int) -> None:
        """It ends with that piece, and its slot is lent again."""
        last = wire.StageDone(epoch=7, request_id=name, queue_length=0, finish_reason="stop", seq=seq, attempt=attempt)
        self.tell(Answered(link, last, (), 1.0))
        self.tell(Granted(link, 1, 0))


def linked_replica(number: int, queue_length: int = 0) -> ReplicaInfo:
    """The record of one of a LinkedHub's replicas."""
    addr = f"tcp://{number}"
    return ReplicaInfo(f"{addr}:1", f"{addr}:2", 0, ReplicaStatus.UP, queue_length, 0.0, 0.0, number, epoch=7)


def _hub() -> Run:
    """A whole request through the orchestrator: admission, pick, dispatch, pieces to its client's queue, its end."""
    made, numbers = LinkedHub(4), count(1000)

    def run(turns: int) -> None:
        for _ in range(turns):
            name = f"r{next(numbers)}"
            link, attempt = made.begin(name)
            for seq in range(_PIECES):
                made.piece(name, link, seq, attempt)
            made.end(name, link, _PIECES, attempt)
            assert len(made.outputs) == _PIECES + 3
            made.outputs.clear()

    return run


class _Waiter:
    """A client that waits for every output, as one that keeps up does."""

    def done(self) -> bool:
        return False


def _streamed(queue_of: Callable[[Callable[[OmniOutput], bool]], OutputQueue]) -> Run:
    """A piece of text from the request's queue to the bytes of its event."""
    written: list[bytes] = []

    def write(event: bytes) -> bool:
        written.append(event)
        return True

    answer = StreamedAnswer(Exchange(), "m", Choices(("text",)), Usage([0]), EncoderThreads())
    queue = queue_of(lambda output: answer.take(write, output))
    queue._waiter = cast(Any, _Waiter())
    delivery = Delivery({"r": queue}, lambda _abort: None)
    first = OmniOutput("r", 0, "text", text="word", token_ids=(1,), replica="0/0")
    _finish(_collect(answer, first))
    outputs = [OmniOutput("r", 0, "text", text=f"word {n}", token_ids=(n,), replica="0/0") for n in range(_PIECES)]

    def run(turns: int) -> None:
        for _ in range(turns):
            for output in outputs:
                delivery.deliver("r", output)
            assert len(written) == _PIECES
            written.clear()

    return run


async def _collect(answer: StreamedAnswer, output: OmniOutput) -> list[bytes]:
    return [event async for event in answer.events(0, output)]


def _finish(work: Coroutine[Any, Any, object]) -> None:
    """Run what waits for nothing, without a loop."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("it waits")


def _event() -> Run:
    return _streamed(lambda take: OutputQueue(64, 1 << 20, taker=take))


def _event_with_counts() -> Run:
    """A piece of text whose event has the token counts so far: it is made as a whole."""
    answer = StreamedAnswer(Exchange(), "m", Choices(("text",)), Usage([0]), EncoderThreads(), counts_each=True)
    outputs = [OmniOutput("r", 0, "text", text=f"word {n}", token_ids=(n,), replica="0/0") for n in range(_PIECES)]

    def run(turns: int) -> None:
        for _ in range(turns):
            for output in outputs:
                _finish(_collect(answer, output))

    return run


def _chat_body() -> Run:
    def run(turns: int) -> None:
        for _ in range(turns):
            schema.parse_chat(_BODY)

    return run


LOOP: Final = Path("a turn of an empty loop", _loop, 10_000, None)
CALL: Final = Path("a call made wasteful", _call, 200, None)
REFERENCE: Final = Path("code of no package of ours", _reference, 50, None)
PATHS: Final = (
    Path("pick and release, 200 replicas", _pick, 50, (Pool, "try_pick")),
    Path("Submit encoded and decoded", _submit, 100, (wire, "encode")),
    Path(f"batch of {_PIECES} pieces decoded", _pieces_in, 50, (wire, "decode_from_replica")),
    Path(f"replica: request of {_PIECES} pieces", _replica, 8, (Sessions, "on_input")),
    Path("engine loop: step of 8 requests", _engine_loop, 20, (EngineLoop, "turn")),
    Path("table: one record changes, of 50", _table_put, 50, (ReplicaTable, "apply")),
    Path("table: list of 50 records", _table_list, 3, (ReplicaTable, "replace")),
    Path(f"request machine: two stages, {_PIECES} pieces each", _machine, 8, (RequestMachine, "__init__")),
    Path(f"hub: request of {_PIECES} pieces", _hub, 8, (Orchestrator, "_handle")),
    Path("chat's body read and checked", _chat_body, 50, (schema, "check_messages")),
    Path(f"{_PIECES} pieces to events", _event, 20, (Exchange, "note_output")),
    Path(f"{_PIECES} pieces to events with counts", _event_with_counts, 8, (chat_answer, "encode_event")),
)


def running_loop(work: Callable[[], None]) -> None:
    """Do something while a loop is there, of which it gets no turn."""

    async def inside() -> None:
        work()

    asyncio.run(inside())
