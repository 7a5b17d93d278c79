"""A virtual clock, and replicas that live on it: they die, hang, refuse and lose their sessions as they are told.

The book of their credits is the shipped one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any

from hub.request.retry import ENGINE_DIED
from omni_discovery import wire
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.wire import FailureKind
from stage_runtime.server.credits import CreditBook, DoubtHub, GrantCredits

#: How many pieces may be on their way.
WINDOW = 2

if TYPE_CHECKING:
    from tests.support.simulated_hub import Hub


class VirtualClock:
    """Does what is due, in order, and nothing else passes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Call the action when so much time has passed."""
        self._number += 1
        heappush(self._due, (self.now_s + delay_s, self._number, action, args))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, action, args = heappop(self._due)
            action(*args)
        self.now_s = until_s


def answer_of(request_id: str, stage_id: int, variant: int = 0) -> list[str]:
    """What the model of a stage makes of a request, piece by piece: always the same, but for variants."""
    count = zlib.crc32(f"{request_id}/{stage_id}".encode()) % 6
    return [f"{request_id}.{stage_id}.{number}{'!' * variant} " for number in range(count)]


def hands_over(request_id: str, stage_id: int, to_stage: int) -> bool:
    """Whether a stage has something for the next one."""
    return zlib.crc32(f"{request_id}>{stage_id}>{to_stage}".encode()) % 8 > 0


def makes_pieces(request_id: str, stage_id: int) -> bool:
    """Whether the engine of a stage hands on piece by piece."""
    return zlib.crc32(f"{request_id}|{stage_id}".encode()) % 4 > 0


@dataclass(slots=True)
class Job:
    """One attempt that a replica has accepted."""

    submit: wire.Submit
    seq: int = 0
    said: int = 0
    over: bool = False
    #: How many pieces came, by stage, and of whom all; how many were said, and taken, by stage.
    come: dict[int, int] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    handed: int = 0
    taken: dict[int, int] = field(default_factory=dict)
    waits: bool = False
    paused: bool = False
    pieces: list[wire.HandOffPiece] = field(default_factory=list)


@dataclass
class Log:
    """What replicas did, for the invariants."""

    #: How many times work was begun, by request and stage.
    begun: dict[tuple[str, int], int] = field(default_factory=dict)
    #: How many engines each request has killed.
    killed: dict[str, int] = field(default_factory=dict)
    wrong_epoch: int = 0
    payload_gone: int = 0
    not_resumable: int = 0
    pieces: int = 0


class Life:
    """One life of one replica: the epochs of two are never the same, their addresses may be."""

    def __init__(
        self, clock: VirtualClock, rng: Random, log: Log, stage_id: int, replica_id: int, epoch: int, addr: str
    ) -> None:
        self.clock, self.rng, self.log = clock, rng, log
        self.stage_id, self.replica_id, self.epoch, self.addr = stage_id, replica_id, epoch, addr
        #: What its record declares, and which of the possible answers it gives.
        self.deterministic, self.variant = False, 0
        self.capacity = rng.choice([1, 2, 4])
        self.gated = rng.random() < 0.5
        self.alive, self.hung, self.connected, self.draining = True, False, False, False
        self.hub: Hub | None = None
        #: How the process ends when its engine has died.
        self.die: Callable[[Life], None] = Life.kill
        self.session, self.book, self.on_credit = 0, CreditBook(), set[str]()
        self.jobs: dict[str, Job] = {}
        #: Hand-offs that are kept, by request.
        self.kept: dict[str, set[str]] = {}
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._unsent: list[tuple[str, Any]] = []
        self._last_at_s = {"input": 0.0, "output": 0.0}

    def info(self) -> ReplicaInfo:
        """Its record."""
        status = ReplicaStatus.DRAINING if self.draining else ReplicaStatus.UP
        return ReplicaInfo(
            self.addr, self.addr + "o", self.stage_id, status, 0, 0.0, 0.0,
            replica_id=self.replica_id, epoch=self.epoch, capacity=self.capacity, pid=self.epoch,
            deterministic=self.deterministic,
        )  # fmt: skip

    # ---- what happens to it

    def receive(self, message: wire.ToReplica) -> None:
        """A frame has come over the network."""
        self._do(self._take, message)

    def kill(self) -> None:
        """The process is gone, and all that it held."""
        self.alive = self.connected = False
        self.jobs.clear()
        self.kept.clear()

    def hang(self) -> None:
        """It stands still, and keeps what comes."""
        self.hung = True

    def wake(self) -> None:
        """It goes on where it stood."""
        self.hung = False
        held, self._held = self._held, []
        for action, args in held:
            self._do(action, *args)

    def connect(self) -> None:
        """A new session; what was not sent is sent now, late."""
        self.connected, self.session = True, self.session + 1
        if self.gated:
            self.book.open_account("hub", self.session)
        unsent, self._unsent = self._unsent, []
        for socket, frame in unsent:
            self._send(socket, frame)
        self._lend()

    def _do(self, action: Callable[..., None], *args: Any) -> None:
        if not self.alive:
            return
        if self.hung:
            self._held.append((action, args))
        else:
            action(*args)

    # ---- what it does

    def _take(self, message: wire.ToReplica) -> None:
        if isinstance(message, wire.Submit):
            if message.epoch != self.epoch:
                self.log.wrong_epoch += 1
            else:
                self._submit(message)
        elif isinstance(message, wire.Abort):
            job = self.jobs.get(message.request_id)
            if job is not None and job.submit.attempt <= message.attempt:
                self._finish(job, self._done(job, "abort"))
        elif isinstance(message, wire.Feed | wire.PieceRoom | wire.Pause):
            job = self.jobs.get(message.request_id)
            if job is not None and job.submit.attempt == message.attempt:
                self._follow(job, message)
        elif isinstance(message, wire.ReleasePayloads):
            self.kept.pop(message.request_id, None)
        elif isinstance(message, wire.ReturnCredits):
            self.book.take_back("hub", message.session, message.credits)
            self._lend()

    def _submit(self, submit: wire.Submit) -> None:
        running = self.jobs.get(submit.request_id)
        refusal: FailureKind | None = None
        if self.draining:
            refusal = FailureKind.DRAINING
        elif not submit.credit and len(self.jobs) >= self.capacity + 2:
            refusal = FailureKind.OVERLOADED
        elif self.rng.random() < 0.015:
            refusal = self.rng.choice([FailureKind.OVERLOADED, FailureKind.ENGINE])
        if refusal is not None:
            assert not submit.credit or self.book.spend_credit("hub"), "a credit was spent that was not lent"
            said = wire.Rejected(kind=refusal, reason="no", **self._common(submit))
            self._send("input", said)
            self._lend()
            return
        if running is not None:
            assert submit.attempt > running.submit.attempt
            self._finish(running, self._done(running, "abort"))
        job = self.jobs[submit.request_id] = Job(submit)
        took = self.book.begin_request("hub", credit=submit.credit)
        assert took == submit.credit, "a credit was spent that was not lent"
        if took:
            self.on_credit.add(submit.request_id)
        assert len(self.on_credit) + self.book.unspent <= self.capacity, "more is lent than there is"
        key = submit.request_id, self.stage_id
        self.log.begun[key] = self.log.begun.get(key, 0) + 1
        self._send("input", wire.Accepted(**self._common(submit)))
        self._later(job, self._begin)

    def _begin(self, job: Job) -> None:
        submit = job.submit
        if not all(self._has(job, ref) for ref in submit.payloads):
            return
        if submit.inputs["poison"]:
            self.log.killed[submit.request_id] = self.log.killed.get(submit.request_id, 0) + 1
            for each in list(self.jobs.values()):
                self._fail(each, FailureKind.ENGINE, f"{ENGINE_DIED}: poison")
            self.clock.after(0.002, self.die, self)
            return
        if submit.resume is not None:
            assert not self.deterministic, "deterministic work is begun again, not continued"
            job.said = len(submit.resume.token_ids)
            shown = "".join(answer_of(submit.request_id, self.stage_id)[: job.said])
            if submit.inputs["stubborn"] or submit.resume.text != shown:
                assert submit.resume.text == shown, "it is to go on behind something else than was said"
                self.log.not_resumable += 1
                self._fail(job, FailureKind.NOT_RESUMABLE, "stop: it lags")
                return
        self._later(job, self._speak)

    def _speak(self, job: Job) -> None:
        submit = job.submit
        answer = answer_of(submit.request_id, self.stage_id, self.variant)
        luck = self.rng.random()
        if luck < 0.01:
            self._fail(job, FailureKind.ENGINE, "it broke")
        elif luck < 0.015:
            self._finish(job, self._done(job, "abort"))
        elif job.paused or self._is_starved(job) or self._is_behind(job):
            job.waits = True
        elif job.said == len(answer):
            self._hand_over(job)
        else:
            self._hand_on(job)
            piece, number = answer[job.said], job.said
            style = submit.inputs["styles"][self.stage_id]
            chunk = wire.Chunk(
                seq=job.seq,
                modality="text",
                text="" if style == "pieces" else piece,
                token_ids=(number + 1,) if style == "tokens" else (),
                **self._common(submit),
            )
            job.seq, job.said = job.seq + 1, job.said + 1
            self._send("output", (chunk, [piece.encode()] if style == "pieces" else []))
            self._later(job, self._speak)

    def _hand_over(self, job: Job) -> None:
        request_id, refs = job.submit.request_id, []
        for to_stage in job.submit.next_stages:
            if job.handed and to_stage in job.submit.stream_to:
                continue
            if hands_over(request_id, self.stage_id, to_stage):
                key = f"{request_id}.{self.epoch}.{job.submit.attempt}.{to_stage}"
                self.kept.setdefault(request_id, set()).add(key)
                refs.append(
                    wire.PayloadRef(
                        from_stage=self.stage_id, to_stage=to_stage, key=key, connector="memory", size_bytes=1,
                        metadata={"holder": self},
                    )
                )  # fmt: skip
        self._finish(job, self._done(job, "stop", tuple(refs)))

    # ---- pieces and pauses

    def _follow(self, job: Job, message: wire.Feed | wire.PieceRoom | wire.Pause) -> None:
        match message:
            case wire.Feed():
                self._feed(job, message)
            case wire.PieceRoom():
                self._room(job, message)
            case wire.Pause():
                job.paused = message.paused
                self._send("input", wire.Accepted(**self._common(job.submit)))
                self._go_on(job)

    def _has(self, job: Job, ref: wire.PayloadRef) -> bool:
        holder = ref.metadata["holder"]
        if holder.alive and ref.key in holder.kept.get(job.submit.request_id, ()) and self.rng.random() > 0.01:
            return True
        self.log.payload_gone += 1
        self._fail(job, FailureKind.PAYLOAD, "the hand-off is not there any more")
        return False

    def _feed(self, job: Job, feed: wire.Feed) -> None:
        come = job.come.get(feed.from_stage, 0)
        assert feed.from_stage in job.submit.stream_from
        if feed.number > come:
            self._fail(job, FailureKind.PAYLOAD, f"piece {come} never came")
            return
        if feed.number == come and feed.is_last:
            job.complete.add(feed.from_stage)
        elif feed.number == come:
            assert feed.payload is not None
            assert feed.payload.key.endswith(f".{feed.number}"), "pieces are mixed up"
            if not self._has(job, feed.payload):
                return
            come = job.come[feed.from_stage] = come + 1
        if come:
            about = self._common(job.submit)
            self._send("output", (wire.PieceTaken(from_stage=feed.from_stage, number=come - 1, **about), []))
        self._go_on(job)

    def _room(self, job: Job, room: wire.PieceRoom) -> None:
        assert room.number <= job.handed, "more was taken than was made"
        job.taken[room.to_stage] = max(room.number, job.taken.get(room.to_stage, 0))
        for piece in job.pieces if room.again else ():
            if piece.number >= min(job.taken.get(stage, 0) for stage in job.submit.stream_to):
                self._send("output", (piece, []))
        self._go_on(job)

    def _go_on(self, job: Job) -> None:
        if job.waits:
            job.waits = False
            self._later(job, self._speak)

    def _is_starved(self, job: Job) -> bool:
        return any(
            stage not in job.complete
            and (job.come.get(stage, 0) <= job.said or job.said == len(answer_of(job.submit.request_id, self.stage_id)))
            for stage in job.submit.stream_from
        )

    def _is_behind(self, job: Job) -> bool:
        return any(job.handed - job.taken.get(stage, 0) >= WINDOW for stage in job.submit.stream_to)

    def _hand_on(self, job: Job) -> None:
        """A piece for each word that it says, the last one with the last."""
        request_id, takers = job.submit.request_id, job.submit.stream_to
        takers = tuple(stage for stage in takers if hands_over(request_id, self.stage_id, stage))
        if not takers or not makes_pieces(request_id, self.stage_id):
            return
        key = f"{request_id}.{self.epoch}.{job.submit.attempt}.{job.handed}"
        self.kept.setdefault(request_id, set()).add(key)
        refs = tuple(
            wire.PayloadRef(
                from_stage=self.stage_id, to_stage=stage, key=key, connector="memory", size_bytes=1,
                metadata={"holder": self},
            )
            for stage in takers
        )  # fmt: skip
        job.pieces.append(wire.HandOffPiece(number=job.handed, payloads=refs, **self._common(job.submit)))
        self._send("output", (job.pieces[-1], []))
        job.handed += 1
        self.log.pieces += 1
        # Nobody waits for a stage that gets none.
        job.taken |= {stage: 1 << 30 for stage in job.submit.stream_to if stage not in takers}

    # ---- what it says

    def _done(self, job: Job, reason: str, refs: tuple[wire.PayloadRef, ...] = ()) -> wire.StageDone:
        usage = {"completion_tokens": job.said}
        about = self._common(job.submit)
        return wire.StageDone(seq=job.seq, finish_reason=reason, payloads=refs, usage=usage, pieces=job.handed, **about)

    def _fail(self, job: Job, kind: FailureKind, reason: str) -> None:
        self._finish(job, wire.StageFailed(kind=kind, reason=reason, **self._common(job.submit)))

    def _finish(self, job: Job, last: wire.StageDone | wire.StageFailed) -> None:
        job.over = True
        request_id = job.submit.request_id
        if self.jobs.get(request_id) is job:
            del self.jobs[request_id]
            self.on_credit.discard(request_id)
            self.book.end_request("hub")
        self._send("output", (last, []))
        self._lend()

    def _lend(self) -> None:
        self.book.set_capacity(0 if self.draining else self.capacity)
        if not (self.gated and self.connected):
            return
        for action in self.book.lend_and_recall(self.clock.now_s):
            assert not isinstance(action, DoubtHub), "its hub spends what it is lent"
            kind = wire.Grant if isinstance(action, GrantCredits) else wire.Recall
            head = {"epoch": self.epoch, "session": action.session, "queue_length": len(self.jobs)}
            self._send("output", kind(credits=action.credits, **head))
            if kind is wire.Recall:
                self.clock.after(0.6, self._do, self._lend)

    def _common(self, submit: wire.Submit) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "request_id": submit.request_id,
            "attempt": submit.attempt,
            "queue_length": len(self.jobs),
        }

    def _later(self, job: Job, action: Callable[[Job], None]) -> None:
        def unless_over() -> None:
            if not job.over:
                action(job)

        self.clock.after(self.rng.uniform(0.001, 0.04), self._do, unless_over)

    def _send(self, socket: str, frame: Any) -> None:
        """In order on each socket; rarely twice, rarely never."""
        assert self.hub is not None
        if not self.connected:
            # What is sent before it notices is lost; what comes after that is kept, in order.
            if (self._unsent or self.rng.random() < 0.5) and not isinstance(frame, wire.Grant | wire.Recall):
                self._unsent.append((socket, frame))
            return
        luck = self.rng.random()
        if luck < 0.004 and isinstance(frame, tuple) and isinstance(frame[0], wire.Chunk):
            return
        for _ in range(2 if luck > 0.99 and not isinstance(frame, wire.Grant | wire.Recall) else 1):
            at_s = max(self._last_at_s[socket], self.clock.now_s + self.rng.uniform(0.0002, 0.003))
            self._last_at_s[socket] = at_s
            self.clock.after(at_s - self.clock.now_s, self.hub.hear, self, self.session, frame)
