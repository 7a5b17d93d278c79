"""The judge: the histories of clients, hubs, replicas and the registry, and the rules that they must keep.

What the right answer of a request is, is known beforehand: the echo of its prompt, by every stage.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hub.api.errors import describe
from omni_discovery.errors import OmniError, OverloadedError, PoisonousRequestError
from tests.simulation.plan import Ask

if TYPE_CHECKING:
    from hub.replicas.events import Answered
    from tests.simulation.hub import SimHub
    from tests.simulation.replica import SimReplica, SimServer
    from tests.simulation.virtual_time import Process
    from tests.simulation.world import World

#: How much later than its deadline a request may end.
_LATE_S: Final = 1.0
#: How long the hubs may take to notice that a replica is well again.
_KNOWN_S: Final = 25.0
#: How long a replica may take to hear that a hub is revoked: a second, and what a slow network adds.
_REVOKED_S: Final = 2.0
#: How long a request may stay with a replica after hubs must know that its process has ended, where another is free.
_MOVED_S: Final = 0.5
#: How long hubs may take to move a request from a replica that does not answer to another one.
_LONG_S: Final = 20.0
_SECRET: Final = "xyzzy"
#: How often in a row a client that keeps to Retry-After may be refused.
MOST_REFUSED: Final = 6
#: What an error says where output that was shown can't be made again.
_NOT_MADE_AGAIN: Final = ("is not made twice", "not sure to be made again")
#: Where more than this share of a stage's slots is asked for, no time to come back can be promised.
_CALM_LOAD: Final = 0.5
#: Writes of one record in ten seconds: two loads a second, and changes of its status.
_MOST_WRITES: Final = 20 + 15
#: Beats in ten seconds, by all hubs together.
_MOST_BEATS: Final = 200 + 20


@dataclass(eq=False)
class Case:
    """One request, as its client saw it."""

    number: int
    ask: Ask
    name: str
    prompt: str
    asked_s: float
    hub: SimHub | None
    is_probe: bool
    #: Text by stage.
    text: dict[int, str] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    summaries: int = 0
    ends: list[str] = field(default_factory=list)
    has_left: bool = False
    #: The most requests that were open at once while it was.
    most_open: int = 0
    #: How often this client was refused before, in a row.
    refused: int = 0
    error: OmniError | None = None


class Judge:
    """Collects violations, each as one line that begins with the name of its rule."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[str] = []
        self.ends: Counter[str] = Counter()
        self.open_asks: dict[int, Case] = {}
        self.last_deadline_s = 0.0
        #: Replicas whose drain was acknowledged, and when.
        self._acknowledged: dict[SimReplica, float] = {}
        #: When each hub that is revoked was.
        self._revoked: dict[str, float] = {}
        #: Whether nothing keeps what an operator writes from replicas.
        self._hears_operators = not any("etcd" in fault.kind for fault in world.plan.faults)
        #: Where each request was sent last, by its name and stage; and when hubs must know that this replica has ended.
        self._sent: dict[tuple[str, int], SimReplica] = {}
        self._known_lost_s: dict[tuple[str, int], float] = {}
        #: When each record was written lately.
        self._written: dict[str, deque[float]] = {}
        self._tasks: dict[Process, int] = {}
        #: Until when a host counts as disturbed.
        self._disturbed_until_s: dict[str, float] = {}

    # ---- what happens

    def violate(self, rule: str, text: str) -> None:
        line = f"{rule}: {text} (at {self._world.now_s:.3f} s)"
        if len(self.violations) < 20:
            self.violations.append(line)

    def defect(self, text: str) -> None:
        self.violate("liveness", text)

    def unhandled(self, context: dict[str, Any]) -> None:
        self.violate("bug", f"{context.get('message')}: {context.get('exception')!r}")

    def logged(self, record: logging.LogRecord) -> None:
        event = record.getMessage().split("\n")[0][:300]
        known = ("engine.died", "replica.engine_dead", "replica.hopeless", "request.poisonous", "hub.revoked")
        if event.startswith(known):
            return
        cause = "" if not record.exc_info else f" {record.exc_info[1]!r}"
        self.violate("bug", f"an error in the log: {event}{cause}")

    def disturbed(self, host: str, for_s: float = 0.0) -> None:
        """Something is done to a host, for so long."""
        until_s = self._world.now_s + for_s
        self._disturbed_until_s[host] = max(self._disturbed_until_s.get(host, 0.0), until_s)

    def hub_revoked(self, hub_id: str) -> None:
        """An operator has revoked a hub."""
        self._revoked[hub_id] = self._world.now_s

    def hub_allowed(self, hub_id: str) -> None:
        """The hub is not revoked any more."""
        self._revoked.pop(hub_id, None)

    def replica_killed(self, replica: SimReplica, silent_s: float = 0.0) -> None:
        """Its process has ended at once; hubs notice it ``silent_s`` later."""
        for name, stage in [each for each, sent_to in self._sent.items() if sent_to is replica]:
            case = self.open_asks.get(int(name.removeprefix("r")))
            if case is not None and stage not in case.finished:
                self._known_lost_s[name, stage] = self._world.now_s + silent_s

    def hub_died(self, hub: SimHub) -> None:
        """Its clients see their connections break."""
        for case in [case for case in self.open_asks.values() if case.hub is hub]:
            self.ended(case, "hub died")

    # ---- requests

    def asked(self, number: int, ask: Ask, hub: SimHub | None, *, is_probe: bool, refused: int) -> Case:
        name = f"r{number}"
        prompt = " ".join(f"{_SECRET}{number}-{word}" for word in range(ask.words))
        case = Case(number, ask, name, prompt, self._world.now_s, hub, is_probe, refused=refused)
        self.open_asks[number] = case
        for each in self.open_asks.values():
            each.most_open = max(each.most_open, len(self.open_asks))
        self.last_deadline_s = max(self.last_deadline_s, self._world.now_s + ask.timeout_s)
        self._world.note("asked", name)
        return case

    def shown(self, case: Case, output: Any) -> None:
        if case.ends:
            self.violate("once", f"{case.name} got output behind its end")
        if output.is_summary:
            case.summaries += 1
            return
        if output.finish_reason is not None:
            case.finished.append(output.stage_id)
        case.text[output.stage_id] = case.text.get(output.stage_id, "") + output.text
        self._world.note("shown", case.name, output.stage_id, output.text)
        if not case.prompt.startswith(case.text[output.stage_id]):
            self.violate(
                "answer",
                f"{case.name} stage {output.stage_id} shows {case.text[output.stage_id][-60:]!r}, a wrong answer",
            )

    def ended(self, case: Case, how: str, error: OmniError | None = None) -> None:
        world = self._world
        case.ends.append(how)
        case.error = error
        self.open_asks.pop(case.number, None)
        if len(case.ends) > 1:
            self.violate("once", f"{case.name} ended {len(case.ends)} times: {case.ends}")
        late_s = world.now_s - case.asked_s - case.ask.timeout_s
        # What was there in time, a slow client reads later.
        reading_s = case.ask.reads_s * (case.ask.words + 2) * len(world.plan.stages)
        if late_s > _LATE_S + reading_s and how in ("ok", "error") and not self._was_disturbed(case.hub, case):
            self.violate("deadline", f"{case.name} ended {late_s:.1f} s behind its deadline: {how} {error!r}")
        if how == "ok":
            self._check_answer(case)
        elif error is not None:
            how = str(describe(error)[0])
            self._check_error(case, error, int(how))
        if case.is_probe and how != "ok":
            self.violate("liveness", f"{case.name}, asked when all was well, ended with {how}: {error!r}")
        self.ends[how] += 1
        world.note("ended", case.name, how)

    def _check_answer(self, case: Case) -> None:
        stages = list(range(len(self._world.plan.stages)))
        wrong = [stage for stage in stages if case.text.get(stage, "").rstrip() != case.prompt]
        if wrong:
            short = {stage: case.text.get(stage, "")[-40:] for stage in wrong}
            self.violate("answer", f"{case.name} ended well with another answer: {short}, not {case.prompt[-40:]!r}")
        if sorted(case.finished) != stages or case.summaries != 1:
            self.violate("once", f"{case.name}: stages ended {case.finished}, {case.summaries} summaries")

    def _check_error(self, case: Case, error: OmniError, status: int) -> None:
        if isinstance(error, OverloadedError):
            if not error.retry_after_s:
                self.violate("retry-after", f"{case.name} is refused without a time to come back")
            is_calm = not self._disturbed_until_s and self._world.plan.busiest_load < _CALM_LOAD
            if case.refused == MOST_REFUSED and is_calm:
                self.violate("retry-after", f"{case.name} came back when it was told to, and was refused each time")
            return
        if status < 500:
            self.violate("5xx", f"{case.name}, a good request, got {status}: {error}")
            return
        if status == 504:
            if self._had_time(case):
                self.violate("5xx", f"{case.name} got 504 though nothing was in its way: {error}")
            elif self._had_room(case):
                self.violate("5xx", f"{case.name} got 504 though a replica of each stage was free: {error}")
            return
        if case.hub is None or self._was_disturbed(case.hub, case) or self._is_documented(error):
            return
        if all(self._was_served(stage, case) for stage in range(len(self._world.plan.stages))):
            self.violate("5xx", f"{case.name} got {status} while a replica of each stage and the hub lived: {error}")

    def _is_documented(self, error: OmniError) -> bool:
        """Whether docs/architecture.md and decision 13 say that no other replica can help.

        A hand-off went with the host that kept it, its maker's output was shown, and a stage is not deterministic; or
        two replicas were killed while they ran the request.
        """
        plan = self._world.plan
        is_undone = len(plan.deterministic) < len(plan.stages) and any(text in str(error) for text in _NOT_MADE_AGAIN)
        return is_undone or isinstance(error, PoisonousRequestError)

    def _had_time(self, case: Case) -> bool:
        """Whether a request should have been done in time: slots were free, and nothing was wrong anywhere."""
        plan = self._world.plan
        if case.ask.reads_s or any(until_s > case.asked_s - _KNOWN_S for until_s in self._disturbed_until_s.values()):
            return False
        if any(not self._is_old(each.replica, case) for each in self._world.supervisors):
            return False
        needed_s = case.ask.words * (plan.step_s + plan.wake_s) * len(plan.stages) + 1.0
        return plan.offered_load < _CALM_LOAD / 2 and plan.loss == 0.0 and case.ask.timeout_s > 4 * needed_s

    def _had_room(self, case: Case) -> bool:
        """Whether a request had a long time, an undisturbed hub, and one such replica of each stage that had room."""
        plan = self._world.plan
        # Work that a replica has accepted stays there while that answers heartbeats: engines may be busy for long.
        held_s = [self._world.began_s + fault.at_s for fault in plan.faults if fault.kind == "hold replica"]
        if any(case.asked_s <= each_s <= self._world.now_s for each_s in held_s):
            return False
        if case.ask.reads_s or plan.loss or case.most_open > plan.capacity or self._was_disturbed(case.hub, case):
            return False
        needed_s = case.ask.words * (plan.step_s + plan.wake_s) * len(plan.stages) + 1.0
        is_long = case.ask.timeout_s > _LONG_S and case.ask.timeout_s - _LONG_S > needed_s
        return is_long and all(self._was_served(stage, case) for stage in range(len(plan.stages)))

    def _was_disturbed(self, hub: SimHub | None, case: Case) -> bool:
        return hub is None or self._disturbed_until_s.get(hub.process.host, -1e9) > case.asked_s - _KNOWN_S

    def _was_served(self, stage: int, case: Case) -> bool:
        """Whether one replica of the stage lived all the time, and before for long enough to be known."""
        since_s = case.asked_s - _KNOWN_S
        for supervisor in self._world.supervisors:
            is_quiet = self._disturbed_until_s.get(supervisor.host, -1e9) < since_s
            if supervisor.stage_id == stage and is_quiet and self._is_old(supervisor.replica, case):
                return True
        return False

    def _is_old(self, replica: SimReplica | None, case: Case) -> bool:
        """Whether a replica takes work, and did so before the request for long enough to be known."""
        if replica is None or not replica.takes_work or replica.up_at_s is None:
            return False
        return replica.up_at_s < case.asked_s - _KNOWN_S

    # ---- hubs, replicas, registry

    def answer_taken(self, hub: SimHub, event: Answered) -> None:
        """A hub has let an answer of a replica in."""
        client, message = event.client, event.message
        session: Any = client._session  # type: ignore[attr-defined]
        if not session.knows_epoch(message.epoch):
            self.violate("epoch", f"{hub.hub_id} took a frame of epoch {message.epoch} from {client.info.name}")

    def turn_taken(self, server: SimServer) -> None:
        used, unspent = server.credits
        capacity = server._sessions._state.capacity()
        # Credits that are not given back in time are void, and what is sent with them meanwhile comes on top.
        late = server.unbacked_count if used + unspent > capacity else 0
        if unspent > capacity or (capacity and used + unspent > capacity + late):
            self.violate("slots", f"{unspent} slots are lent, {used} in use, {late} beyond those lent, of {capacity}")

    def drain_acknowledged(self, replica: SimReplica) -> None:
        """Every hub has said that it sends the replica nothing more."""
        self._acknowledged[replica] = self._world.now_s

    def submitted(self, replica: SimReplica, hub_id: str, message: Any, sent_at_s: float) -> None:
        """A replica has let a request in."""
        epoch = replica.server._sessions.handshake._protocol.epoch
        if message.epoch != epoch:
            self.violate(
                "epoch", f"{replica.name} took {message.request_id} for epoch {message.epoch}, its own is {epoch}"
            )
        self._check_stall(replica, message.request_id.partition("~")[0], sent_at_s)
        acknowledged_s = self._acknowledged.get(replica)
        if acknowledged_s is not None and sent_at_s > acknowledged_s:
            text = f"{hub_id} sent {message.request_id} to {replica.name} behind the acknowledgement of its drain"
            self.violate("drain", text)
        revoked_s = self._revoked.get(hub_id)
        if revoked_s is not None and self._hears_operators and self._world.now_s > revoked_s + _REVOKED_S:
            late_s = self._world.now_s - revoked_s
            self.violate("revoked", f"{replica.name} took {message.request_id} of {hub_id}, {late_s:.1f} s revoked")

    def _check_stall(self, replica: SimReplica, name: str, sent_at_s: float) -> None:
        """A request whose replica was killed goes to another one at once, where one is free."""
        place = (name, replica.stage_id)
        self._sent[place] = replica
        known_s = self._known_lost_s.pop(place, None)
        case, plan = self.open_asks.get(int(name.removeprefix("r"))), self._world.plan
        if known_s is None or case is None or plan.loss or case.most_open > plan.capacity:
            return
        late_s = sent_at_s - known_s
        if late_s > _MOVED_S and not self._was_disturbed(case.hub, case) and self._was_served(place[1], case):
            self.violate(
                "stall", f"{name} waited {late_s:.1f} s when its replica of stage {place[1]} was known to be lost"
            )

    def written(self, key: str, value: bytes) -> None:
        """The registry holds another value of a key."""
        if _SECRET.encode() in value:
            self.violate("secret", f"{key} holds a prompt")
        kind, now_s = key.split("/")[4], self._world.now_s
        most = {"replicas": _MOST_WRITES, "beats": _MOST_BEATS}.get(kind)
        if most is None:
            return
        written = self._written.setdefault("beats" if kind == "beats" else key, deque())
        written.append(now_s)
        while written[0] < now_s - 10.0:
            written.popleft()
        if len(written) == most + 1:
            self.violate("budget", f"{key} was written {len(written)} times in ten seconds")

    def cluster_is_up(self, tasks: dict[Process, int]) -> None:
        """Nothing was asked yet: so many tasks each process needs."""
        self._tasks = tasks

    def views_differ(self) -> str:
        """Where a hub's view, the registry, and what lives are not the same; empty if they are."""
        world = self._world
        prefix = f"/omni/v1/{world.namespace}/replicas/"
        listed = {key for key in world.etcd.keys_now() if key.startswith(prefix)}
        alive = {f"{prefix}{each.name}" for each in world.live_replicas()}
        if listed != alive:
            return f"registered {sorted(listed)}, alive {sorted(alive)}"
        for hub in world.live_hubs():
            shown = {f"{prefix}{stage}/{number}" for stage, number in hub.shown_replicas()}
            if shown != listed:
                return f"{hub.hub_id} shows {sorted(shown)}, registered {sorted(listed)}"
        return ""

    def final_look(self) -> None:
        """At rest: views are the registry, nothing is there that does not live, and processes are as they were."""
        world = self._world
        if difference := self.views_differ():
            self.violate("views", difference)
        prefix = f"/omni/v1/{world.namespace}/hubs/"
        hubs = {key.removeprefix(prefix) for key in world.etcd.keys_now() if key.startswith(prefix)}
        if hubs != {hub.hub_id for hub in world.live_hubs()}:
            self.violate("views", f"hubs {sorted(hubs)} are registered")
        for process, count in world.task_counts().items():
            kind = process.name.partition("-")[0]
            usual = max(before for each, before in self._tasks.items() if each.name.startswith(kind))
            if count > usual + 1:
                self.violate("liveness", f"{process.name} has {count} tasks at rest, not {usual}")
