"""A hub on a virtual clock: the shipped machines, pools, waiting lines and retry budget under a simple driver."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hub.config import PoolOptions
from hub.orchestrator.retry_budget import RetryBudget
from hub.pool.core import Pool
from hub.pool.entry import BindingEnd
from hub.pool.wait_queue import PriorityQueue, Waiter
from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.balancing.policies import build_load_balancer_factory
from tests.support.pools import accept, spent_credit
from tests.support.request_walk import Heard, apply
from tests.support.simulated_replica import Life, VirtualClock

ACCEPT_TIMEOUT_S, ACCEPT_LIMIT_S, GRACE_S, PICK_TIMEOUT_S = 0.1, 1.0, 1.0, 10.0


@dataclass(eq=False)
class Active:
    """One request, and what became of it."""

    machine: RequestMachine
    request_id: str
    deadline_s: float
    waiters: dict[int, Waiter[ev.Dispatch]] = field(default_factory=dict)
    graces: set[tuple[int, int]] = field(default_factory=set)
    #: Attempts that a replica has spoken of.
    answered: set[tuple[int, int]] = field(default_factory=set)
    shown: list[OmniOutput] = field(default_factory=list)
    dispatches: list[ev.Dispatch] = field(default_factory=list)
    restarts: int = 0
    #: How often work was stopped because what it was fed with was lost.
    withdrawn: int = 0
    finishes: list[tuple[float, ev.Finish]] = field(default_factory=list)


class Hub:
    """Requests go in by ``submit``; ``requests`` holds all of them, ended or not."""

    def __init__(
        self, clock: VirtualClock, stage_ids: tuple[int, ...], policy: str, budget: RetryBudget, counts: dict[str, int]
    ) -> None:
        self.clock, self.counts = clock, counts
        new_balancer = build_load_balancer_factory(policy)
        self.pools = {stage_id: Pool(stage_id, new_balancer(), PoolOptions(slow_start_s=0.5)) for stage_id in stage_ids}
        self._lines: dict[int, PriorityQueue[ev.Dispatch]] = {stage_id: PriorityQueue() for stage_id in stage_ids}
        #: Whom we talk to, by address, and those whose session is up, with its number.
        self.clients: dict[str, Life] = {}
        self.sessions: dict[Life, int] = {}
        #: Who listens at an address, whoever we believe to be there.
        self.listening: dict[str, Life] = {}
        #: What the registry has shown: address and epoch.
        self.listed: dict[str, int] = {}
        self.requests: dict[str, Active] = {}
        self._budget = budget
        self._paced: deque[tuple[Active, ev.Dispatch]] = deque()
        self._owed: list[tuple[Life, wire.ToReplica]] = []

    # ---- what the client asks

    def submit(self, machine: RequestMachine, deadline_s: float) -> None:
        """A request is admitted."""
        active = Active(machine, machine.state.public.request_id, deadline_s)
        self.requests[active.request_id] = active
        self._budget.admitted(self.clock.now_s)
        self.clock.after(deadline_s - self.clock.now_s, self.tell, active, ev.DeadlinePassed())
        self.tell(active, ev.Submitted())

    def tell(self, active: Active, event: ev.Event | Heard) -> None:
        """Feed a machine and carry out what it decides."""
        events: deque[ev.Event | Heard] = deque([event])
        while events:
            event = events.popleft()
            actions = apply(active.machine, event, self.clock.now_s)
            retried = {action.stage_id for action in actions if isinstance(action, ev.Retry)}
            stopped = {action.stage_id for action in actions if isinstance(action, ev.Abort)}
            if retried:
                has_failed = isinstance(event, Heard) and isinstance(event.message, wire.StageFailed)
                fallen = {event.stage_id} if isinstance(event, Heard) and has_failed else set()
                active.withdrawn += len((stopped | fallen) - retried)
                self._count("withdrawn", len((stopped | fallen) - retried))
            for action in actions:
                if isinstance(action, ev.Dispatch) and retried and action.stage_id not in retried:
                    active.restarts += 1
                    self._count("restart")
                follows = self._carry_out(active, action)
                if follows is not None:
                    events.append(follows)

    # ---- what the registry and the sessions tell

    def list(self, life: Life) -> None:
        """The registry shows a replica, or its record has changed."""
        pool, before = self.pools[life.stage_id], self.clients.get(life.addr)
        if before is not None and before is not life:
            self.lose(before, "another process has its address")
            self.sessions.pop(before, None)
            pool.session_down(life.addr, self.clock.now_s)
        self.clients[life.addr], self.listed[life.addr] = life, life.epoch
        pool.upsert(life.info(), self.clock.now_s)
        if life in self.sessions and not pool.members.answers(life.addr):
            # It had been forgotten meanwhile: another connection is made.
            del self.sessions[life]
            self.clock.after(0.003, self.session_up, life)
        self._serve(life.stage_id)

    def delist(self, life: Life) -> None:
        """The registry does not show it any more. A process that is gone loses what it had."""
        if self.listed.get(life.addr) == life.epoch:
            del self.listed[life.addr]
            self.pools[life.stage_id].remove(life.addr, self.clock.now_s)
            if not life.alive:
                self.lose(life, "its record and its process are gone")
            self._serve(life.stage_id)

    def session_up(self, life: Life) -> None:
        """A session with a replica begins; what it was owed from the one before is said again."""
        if not life.alive or life.hung or self.clients.get(life.addr) is not life or life in self.sessions:
            return
        self.sessions[life] = life.session + 1
        pool = self.pools[life.stage_id]
        pool.session_up(life.addr, self.clock.now_s, uses_credits=life.gated)
        life.connect()
        owed, self._owed = self._owed, []
        for each, message in owed:
            self._send(each, message)
        for request_id in pool.members.in_flight(life.addr):
            active = self.requests[request_id]
            if active.machine.must_repeat(life.stage_id):
                attempt = active.machine.runs[life.stage_id].attempt
                self.tell(active, ev.SessionBack(life.stage_id, attempt))
        self._serve(life.stage_id)

    def session_down(self, life: Life, reason: str) -> None:
        """The socket or its heartbeat says that nobody answers: what can move moves, the rest waits a while."""
        if self.sessions.pop(life, None) is None or self.clients.get(life.addr) is not life:
            return
        stage_id, pool = life.stage_id, self.pools[life.stage_id]
        pool.session_down(life.addr, self.clock.now_s)
        for request_id in pool.members.in_flight(life.addr):
            active = self.requests[request_id]
            attempt = active.machine.runs[stage_id].attempt
            if active.machine.can_move(stage_id):
                self.tell(active, ev.ReplicaLost(stage_id, attempt, reason))
            elif (stage_id, attempt) not in active.graces:
                self._count("grace")
                active.graces.add((stage_id, attempt))
                self.clock.after(GRACE_S, self._still_silent, active, stage_id, attempt)

    def lose(self, life: Life, reason: str) -> None:
        """Nothing that is in flight there will be answered."""
        if self.clients.get(life.addr) is life:
            for request_id in self.pools[life.stage_id].members.in_flight(life.addr):
                active = self.requests[request_id]
                attempt = active.machine.runs[life.stage_id].attempt
                self.tell(active, ev.ReplicaLost(life.stage_id, attempt, reason))

    def kill(self, life: Life) -> None:
        """The process dies: the socket says so at once, most times the process's absence soon after."""
        if life.alive:
            life.kill()
            # The more memory it had, the later its sockets are closed.
            delay_s = life.rng.choice([0.002, 0.002, 0.15])
            self.clock.after(delay_s, self.session_down, life, "its connection is closed")
            self.clock.after(delay_s + 0.01, self.lose, life, "its process is gone")

    # ---- what replicas say

    def hear(self, life: Life, session: int, frame: Any) -> None:
        """A frame has arrived."""
        if self.clients.get(life.addr) is not life or self.sessions.get(life) != session:
            self._count("lost frame")
            return
        pool, stage_id = self.pools[life.stage_id], life.stage_id
        head = frame[0] if isinstance(frame, tuple) else frame
        pool.report(life.addr, head.queue_length, self.clock.now_s)
        if isinstance(frame, wire.Grant):
            pool.grant(life.addr, frame.credits)
            self._serve(stage_id)
            return
        if isinstance(frame, wire.Recall):
            self._count("recall")
            given_up = pool.recall(life.addr, frame.credits)
            self._send(life, wire.ReturnCredits(epoch=life.epoch, session=session, credits=given_up))
            return
        message, attachments = frame if isinstance(frame, tuple) else (frame, [])
        active = self.requests[message.request_id]
        if not active.machine.is_out(stage_id, message.attempt) or pool.bound(message.request_id) != life.addr:
            self._count("stale frame")
            return
        active.graces.discard((stage_id, message.attempt))
        active.answered.add((stage_id, message.attempt))
        run = active.machine.runs[stage_id]
        assert run.replica is not None
        assert run.replica.epoch == life.epoch == message.epoch, "a frame of another life counts"
        newest = max(each.attempt for each in active.dispatches if each.stage_id == stage_id)
        assert message.attempt == newest, "a frame of an attempt that was given up counts"
        if isinstance(message, wire.Accepted | wire.Chunk | wire.HandOffPiece | wire.PieceTaken):
            accept(pool, message.request_id)
        else:
            if isinstance(message, wire.StageFailed) and message.kind is wire.FailureKind.ENGINE:
                pool.failed(life.addr, self.clock.now_s)
            pool.release(message.request_id)
        self.tell(active, Heard(stage_id, message, attachments))
        self._serve(stage_id)

    def _still_silent(self, active: Active, stage_id: int, attempt: int) -> None:
        if (stage_id, attempt) in active.graces:
            active.graces.discard((stage_id, attempt))
            self.tell(active, ev.ReplicaLost(stage_id, attempt, "it said nothing after its connection was lost"))

    def _unanswered(self, active: Active, life: Life, attempt: int, *, is_final: bool) -> None:
        stage_id = life.stage_id
        if (stage_id, attempt) in active.answered or not active.machine.is_out(stage_id, attempt):
            return
        avoid = {*active.machine.runs[stage_id].avoid, life.addr}
        if is_final or self.pools[stage_id].has_free(avoid):
            self._count("unanswered")
            reason = "it said nothing after the dispatch"
            self.tell(active, ev.ReplicaLost(stage_id, attempt, reason, avoid_addr=life.addr))

    # ---- what machines ask for

    def _carry_out(self, active: Active, action: ev.Action) -> ev.Event | None:
        match action:
            case ev.Dispatch():
                return self._dispatch(active, action)
            case ev.Abort(stage_id=stage_id, attempt=attempt, replica=replica):
                waiter = active.waiters.pop(stage_id, None)
                if waiter is not None:
                    self._lines[stage_id].discard(waiter)
                self.pools[stage_id].release(active.request_id)
                self._say(replica, wire.Abort, active, attempt=attempt)
                self._serve(stage_id)
            case ev.FeedInput() | ev.PieceRoom() | ev.Pause():
                self._pass_on(active, action)
            case ev.ReleasePayload(replica=replica):
                self._say(replica, wire.ReleasePayloads, active)
            case ev.Emit(output=output):
                active.shown.append(output)
            case ev.Retry(resumed=resumed):
                self._count("continue" if resumed else "again")
            case ev.Drop(reason=reason):
                self._count(f"drop {reason}")
            case ev.Finish():
                active.finishes.append((self.clock.now_s, action))
        return None

    def _pass_on(self, active: Active, action: ev.FeedInput | ev.PieceRoom | ev.Pause) -> None:
        if isinstance(action, ev.Pause):
            self._count("paused", action.paused)
            self._say(action.replica, wire.Pause, active, attempt=action.attempt, paused=action.paused)
            return
        about: dict[str, Any] = {"attempt": action.attempt, "number": action.number}
        if isinstance(action, ev.FeedInput):
            self._count("feed")
            about |= {"from_stage": action.from_stage, "payload": action.payload, "is_last": action.payload is None}
            self._say(action.replica, wire.Feed, active, **about)
        else:
            self._count("said again", action.again)
            about |= {"to_stage": action.to_stage, "again": action.again}
            self._say(action.replica, wire.PieceRoom, active, **about)

    def _dispatch(self, active: Active, action: ev.Dispatch) -> ev.Event | None:
        active.dispatches.append(action)
        if action.resume is not None:
            shown = [output for output in active.shown if output.stage_id == action.stage_id]
            assert action.resume.text == "".join(output.text for output in shown)
            assert action.resume.token_ids == tuple(number for output in shown for number in output.token_ids)
        if action.is_retry and (self._paced or not self._budget.spend(self.clock.now_s)):
            self._count("paced")
            self._paced.append((active, action))
            if len(self._paced) == 1:
                self.clock.after(self._budget.delay_s(self.clock.now_s), self._give_turns)
            return None
        return self._pick(active, action)

    def _give_turns(self) -> None:
        while self._paced and self._budget.spend(self.clock.now_s):
            active, action = self._paced.popleft()
            event = self._pick(active, action) if active.machine.is_out(action.stage_id, action.attempt) else None
            if event is not None:
                self.tell(active, event)
        if self._paced:
            self.clock.after(self._budget.delay_s(self.clock.now_s), self._give_turns)

    def _pick(self, active: Active, action: ev.Dispatch) -> ev.Event | None:
        pool, stage_id = self.pools[action.stage_id], action.stage_id
        found = pool.pick(active.request_id, {"request_id": active.request_id}, avoid=action.avoid)
        if found is not None:
            return self._submit(active, action)
        if pool.all_avoided(action.avoid):
            return ev.StageUnavailable(stage_id, action.attempt, "every replica has failed this request")
        now_s = self.clock.now_s
        waiter = Waiter(active.request_id, {}, None, action.avoid, action.priority, now_s, action)
        active.waiters[stage_id] = waiter
        self._lines[stage_id].add(waiter)
        self.clock.after(PICK_TIMEOUT_S, self._waited, active, waiter)
        return None

    def _waited(self, active: Active, waiter: Waiter[ev.Dispatch]) -> None:
        action = waiter.token
        if active.waiters.get(action.stage_id) is not waiter:
            return
        if self.pools[action.stage_id].members.pickable_count:
            self.clock.after(PICK_TIMEOUT_S, self._waited, active, waiter)
            return
        del active.waiters[action.stage_id]
        self._lines[action.stage_id].discard(waiter)
        self.tell(active, ev.StageUnavailable(action.stage_id, action.attempt, "no UP replica"))

    def _serve(self, stage_id: int) -> None:
        pool, line = self.pools[stage_id], self._lines[stage_id]
        for waiter in list(line.avoiding.values()):
            if waiter.is_waiting and pool.all_avoided(waiter.avoid):
                line.discard(waiter)
                active, action = self.requests[waiter.request_id], waiter.token
                del active.waiters[stage_id]
                self.tell(active, ev.StageUnavailable(stage_id, action.attempt, "every replica has failed it"))
        unsuited: list[Waiter[ev.Dispatch]] = []
        while pool.free_count and (popped := line.pop()) is not None:
            if pool.pick(popped.request_id, {"request_id": popped.request_id}, avoid=popped.avoid) is None:
                unsuited.append(popped)
                continue
            active = self.requests[popped.request_id]
            del active.waiters[stage_id]
            event = self._submit(active, popped.token)
            self.tell(active, event)
        for popped in unsuited:
            if self.requests[popped.request_id].waiters.get(stage_id) is popped:
                line.put_back(popped)

    def _submit(self, active: Active, action: ev.Dispatch) -> ev.Event:
        pool, stage_id = self.pools[action.stage_id], action.stage_id
        addr = pool.bound(active.request_id)
        assert addr is not None
        info = pool.members.get(addr)
        assert info is not None
        assert self.listed.get(addr) == info.epoch, "dispatched to a replica that the registry does not show"
        life = self.clients[addr]
        if life not in self.sessions or not life.rng.random() > 0.003:
            pool.release(active.request_id, BindingEnd.UNSENT)
            return ev.ReplicaLost(stage_id, action.attempt, "it can't be sent", may_have_run=False, avoid_addr=addr)
        submit = wire.Submit(
            epoch=info.epoch, request_id=active.request_id, attempt=action.attempt, inputs=dict(action.inputs),
            payloads=action.payloads, next_stages=action.next_stages, resume=action.resume,
            credit=spent_credit(pool, active.request_id), stream_from=action.stream_from, stream_to=action.stream_to,
        )  # fmt: skip
        self._send(life, submit)
        self.clock.after(ACCEPT_TIMEOUT_S, lambda: self._unanswered(active, life, action.attempt, is_final=False))
        self.clock.after(ACCEPT_LIMIT_S, lambda: self._unanswered(active, life, action.attempt, is_final=True))
        replica = ev.ReplicaRef(stage_id, info.replica_id, info.epoch, addr)
        return ev.Sent(stage_id, action.attempt, replica, info.deterministic)

    def _say(self, replica: ev.ReplicaRef | None, kind: Any, active: Active, **fields: Any) -> None:
        life = None if replica is None else self.clients.get(replica.input_addr)
        if replica is not None and life is not None and life.epoch == replica.epoch:
            self._send(life, kind(epoch=life.epoch, request_id=active.request_id, **fields))

    def _send(self, life: Life, message: wire.ToReplica) -> None:
        """In order; an abort or a release for which there is no session is said again when there is one."""
        if life in self.sessions:
            self.clock.after(0.001, self._arrive, life, message)
        elif isinstance(message, wire.Abort | wire.ReleasePayloads):
            self._owed.append((life, message))

    def _arrive(self, life: Life, message: wire.ToReplica) -> None:
        listener = self.listening[life.addr]
        if listener.alive and (life.connected or listener is not life):
            listener.receive(message)
        elif isinstance(message, wire.Abort | wire.ReleasePayloads):
            self._owed.append((life, message))

    def _count(self, what: str, times: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + times
