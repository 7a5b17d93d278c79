"""Requests, pools and replicas on a virtual clock, with losses: whatever happens, every request ends as it should."""

from __future__ import annotations

import random
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from hub.orchestrator.retry_budget import RetryBudget
from hub.request import events as ev
from hub.request.machine import RequestMachine
from hub.request.plan import RequestPlan, StageGraph
from hub.request.state import RequestState
from omni_discovery.balancing.policies import LoadBalancingPolicy
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import DeadlineExceededError, RequestError
from tests.support.request_walk import BRANCHING, PAIR
from tests.support.simulated_hub import Active, Hub
from tests.support.simulated_replica import Life, Log, VirtualClock, answer_of, hands_over

SINGLE = "stages: [{stage_id: 0, engine: e, final_output: text}]"
_ON = "async_chunk: true\nedges: [{from: 0, to: 1, window_size: 2}%s]\n"
IN_PIECES = (
    _ON % "" + PAIR,
    _ON % ", {from: 0, to: 2, window_size: 2}, {from: 1, to: 3, window_size: 2}, {from: 2, to: 3, window_size: 2}"
    + BRANCHING,
    _ON % ", {from: 0, to: 2, async_chunk: false}, {from: 1, to: 3, window_size: 2}, {from: 2, to: 3, window_size: 2}"
    + BRANCHING,
)
#: Only the last stage is heard.
SPEECH = (
    _ON % "" + "stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e, final_output: image}]",
    _ON % ", {from: 1, to: 2, window_size: 2}"
    + "stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e}, {stage_id: 2, engine: e, final_output: audio}]",
)
#: Ends that a request need not have where everything can be made again.
DOUBTS = ("not sure to be made again", "without token ids", "is not made twice", "come again", "is another")
ATTEMPTS = 3
#: Requests and faults come so long; then everybody who lives is well again, and all must end and be cleaned up.
FAULTS_END_S, LONGEST_S, END_S = 3.0, 25.0, 40.0
BLOCK = 50


class World:
    """One run: a hub, its replicas, their misfortunes, and the requests, all drawn from the seed.

    ``declares`` says whether replicas declare that they are deterministic; those of an ``untrue`` stage are not, and
    their answers differ from one life to the next.
    """

    def __init__(
        self, seed: int, documents: Sequence[str], *, declares: bool = False, untrue: int | None = None
    ) -> None:
        # The balancer draws from the shared generator.
        random.seed(seed)
        self.rng = Random(seed)
        #: For what has no part in what goes wrong.
        self._paces = Random(seed)
        self.clock, self.log, self.counts = VirtualClock(), Log(), dict[str, int]()
        self._declares, self._untrue = declares, untrue
        self.graph = StageGraph(parse_deploy(self.rng.choice(documents), "test.yaml"))
        self.styles = {0: self.rng.choice(["tokens", "tokens", "text"]), 1: "pieces", 2: "tokens", 3: "pieces"}
        # A small budget, so that retries often have to wait for their turn.
        budget = RetryBudget(0.0, floor_per_s=self.rng.choice([2.0, 10.0]), burst=self.rng.choice([1.0, 20.0]))
        policy = self.rng.choice(list(LoadBalancingPolicy))
        self.hub = Hub(self.clock, self.graph.stage_ids, policy, budget, self.counts)
        self.lives: list[Life] = []
        self.plans: dict[str, RequestPlan] = {}
        self._epoch = 100
        for stage_id in self.graph.stage_ids:
            for replica_id in range(self.rng.choice([1, 2, 3, 4])):
                self._start(stage_id, replica_id)
        for number in range(self.rng.choice([5, 15, 30])):
            self.clock.after(self.rng.uniform(0.0, FAULTS_END_S), self._ask, f"r{number}")
        for _ in range(self.rng.choice([0, 4, 12, 24])):
            self.clock.after(self.rng.uniform(0.0, FAULTS_END_S), self._harm)
        self.clock.after(FAULTS_END_S + 2.0, self._heal)

    def _start(self, stage_id: int, replica_id: int, addr: str = "") -> None:
        self._epoch += 1
        life = Life(
            self.clock, self.rng, self.log, stage_id, replica_id, self._epoch, addr or f"tcp://{stage_id}:{self._epoch}"
        )
        life.hub, life.die = self.hub, self._kill
        life.deterministic, life.variant = self._declares, self._epoch % 2 if stage_id == self._untrue else 0
        self.hub.listening[life.addr] = life
        self.lives.append(life)
        self.hub.list(life)
        self.clock.after(0.003, self.hub.session_up, life)

    def _ask(self, request_id: str) -> None:
        rng = self.rng
        plan = self.graph.plan(None if rng.random() < 0.7 else [rng.choice(self.graph.modalities)])
        self.plans[request_id] = plan
        inputs = {"poison": rng.random() < 0.03, "stubborn": rng.random() < 0.1, "styles": self.styles}
        params: dict[int, dict[str, Any]] = {0: {"stop": ["x"]} if inputs["stubborn"] and rng.random() < 0.5 else {}}
        machine = RequestMachine(
            RequestState(request_id, inputs, plan, params, ATTEMPTS, priority=rng.choice([0, 0, -1, 5]))
        )
        self.hub.submit(machine, self.clock.now_s + (rng.uniform(0.01, 1.0) if rng.random() < 0.1 else LONGEST_S))
        active = self.hub.requests[request_id]
        if rng.random() < 0.1:
            self.clock.after(rng.uniform(0.0, 0.5), self.hub.tell, active, ev.Cancelled())
        at_s = 0.0
        while self._paces.random() < 0.4:
            # Its client does not read for a while.
            for is_behind in (True, False):
                at_s += self._paces.uniform(0.0, 0.3)
                self.clock.after(at_s, self.hub.tell, active, ev.ClientBackpressure(is_behind))

    # ---- what goes wrong

    def _harm(self) -> None:
        life = self.rng.choice([life for life in self.lives if life.alive] or self.lives)
        if life.alive:
            harm = self.rng.choice([self._kill, self._kill, self._hang, self._cut, self._hide, self._drain])
            harm(life)

    def _kill(self, life: Life) -> None:
        """Its record goes with its lease; another process takes its place, sometimes its very address."""
        if not life.alive:
            return
        self.hub.kill(life)
        self.clock.after(self.rng.uniform(0.01, 1.0), self.hub.delist, life)
        addr = life.addr if self.rng.random() < 0.5 else ""
        self.clock.after(self.rng.choice([0.005, 0.005, 0.2, 1.5]), self._start, life.stage_id, life.replica_id, addr)

    def _hang(self, life: Life) -> None:
        """Its heartbeat stops, too; after a while it goes on where it stood."""
        life.hang()
        self.clock.after(0.3, self._heartbeat_missed, life)
        self.clock.after(self.rng.uniform(0.05, 2.0), self._wake, life)

    def _heartbeat_missed(self, life: Life) -> None:
        if life.hung and life.alive:
            life.connected = False
            self.hub.session_down(life, "no heartbeat")

    def _wake(self, life: Life) -> None:
        life.wake()
        self.hub.session_up(life)

    def _cut(self, life: Life) -> None:
        """The network between the hub and this one is gone, and comes back."""
        life.connected = False
        self.clock.after(self.rng.uniform(0.001, 0.3), self.hub.session_down, life, "its connection was lost")
        self.clock.after(self.rng.uniform(0.35, 1.5), self.hub.session_up, life)

    def _hide(self, life: Life) -> None:
        """Somebody deletes its key; it writes it again."""
        self.hub.delist(life)
        self.clock.after(self.rng.uniform(0.1, 1.0), self._show, life)

    def _show(self, life: Life) -> None:
        if life.alive and self.hub.clients.get(life.addr) is life:
            self.hub.list(life)

    def _drain(self, life: Life) -> None:
        """It takes nothing new; then it leaves."""
        life.draining = True
        self._show(life)
        self.clock.after(self.rng.uniform(0.1, 1.0), self._kill, life)

    def _heal(self) -> None:
        for life in self.lives:
            if life.alive:
                self._wake(life)
                self._show(life)

    # ---- what must be true

    def check(self) -> None:
        for request_id, active in self.hub.requests.items():
            self._check_end(active)
            self._check_shown(active)
            self._check_attempts(active)
            for pool in self.hub.pools.values():
                assert pool.bound(request_id) is None, f"{request_id} is still bound"
        for life in self.lives:
            assert not self.hub.pools[life.stage_id].members.in_flight(life.addr)
            if life.alive:
                assert not life.jobs, f"{life.addr} still works on {list(life.jobs)}"
                assert not life.kept, f"{life.addr} still keeps {life.kept}"
        retries = sum(action.is_retry for active in self.hub.requests.values() for action in active.dispatches)
        self.counts["retries"] = retries

    def _check_end(self, active: Active) -> None:
        ((at_s, finish),) = active.finishes
        assert at_s <= active.deadline_s, f"{active.request_id} ended after its deadline"
        if active.deadline_s >= LONGEST_S:
            assert not isinstance(finish.error, DeadlineExceededError), f"{active.request_id} was left lying"
        assert (finish.outcome is ev.Outcome.FAILED) == isinstance(finish.error, RequestError)
        found = [doubt for doubt in DOUBTS if doubt in str(finish.error)]
        assert not found or not self._declares or self._untrue is not None, str(finish.error)
        for doubt in found:
            self.counts[doubt] = self.counts.get(doubt, 0) + 1
        self.counts[finish.outcome] = self.counts.get(finish.outcome, 0) + 1

    def _check_shown(self, active: Active) -> None:
        request_id, plan = active.request_id, self.plans[active.request_id]
        outcome = active.finishes[0][1].outcome
        for stage_id in plan.finals:
            mine = [output for output in active.shown if output.stage_id == stage_id]
            pieces = [output.text or output.data.decode() for output in mine if output.finish_reason is None]
            # Of two answers the client gets one, never a part of each.
            variant = int("!" in "".join(pieces[:1]))
            whole = answer_of(request_id, stage_id, variant)
            assert pieces == whole[: len(pieces)], f"{request_id} stage {stage_id} showed {pieces} of {whole}"
            ends = [output for output in mine if output.finish_reason is not None]
            assert len(ends) <= 1
            if ends:
                assert mine[-1] is ends[0]
                assert pieces == whole
                assert ends[0].usage == {"completion_tokens": len(whole)}
            if outcome is ev.Outcome.OK:
                assert bool(ends) == self._is_reached(plan, request_id, stage_id)
        summaries = [output for output in active.shown if output.is_summary]
        assert len(summaries) == (outcome is not ev.Outcome.FAILED)
        assert not summaries or active.shown[-1] is summaries[0]

    def _is_reached(self, plan: RequestPlan, request_id: str, stage_id: int) -> bool:
        return all(
            self._is_reached(plan, request_id, before) and hands_over(request_id, before, stage_id)
            for before in plan.inputs[stage_id]
        )

    def _check_attempts(self, active: Active) -> None:
        """Work is begun again only where the budget was asked, or after the whole request began anew."""
        for stage_id, run in active.machine.runs.items():
            dispatches = [action for action in active.dispatches if action.stage_id == stage_id]
            assert [action.attempt for action in dispatches] == list(range(len(dispatches)))
            assert run.attempt < ATTEMPTS * len(active.machine.runs)
            begun = self.log.begun.get((active.request_id, stage_id), 0)
            retries = sum(action.is_retry for action in dispatches)
            assert begun <= 1 + retries + active.restarts + active.withdrawn
        assert self.log.killed.get(active.request_id, 0) <= ATTEMPTS * len(active.machine.runs)


def run(seed: int, documents: Sequence[str], **more: Any) -> World:
    world = World(seed, documents, **more)
    world.clock.run(END_S)
    world.check()
    return world


def add_up(total: dict[str, int], seeds: range, documents: Sequence[str], **more: Any) -> dict[str, int]:
    for seed in seeds:
        try:
            world = run(seed, documents, **more)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        for name, count in (world.counts | vars(world.log)).items():
            if isinstance(count, int):
                total[name] = total.get(name, 0) + count
    return total


@pytest.mark.parametrize("first", range(0, 1000, BLOCK))
def test_with_losses_of_all_kinds_every_invariant_holds(first: int) -> None:
    """Fifty seeds. Each request ends once, before its deadline; what is shown is a gapless beginning of what the model
    says, and all of it where the request ended well; nothing stays bound, running, paused or kept; work is begun again
    only within attempts and budget; no dispatch goes where the registry shows nobody, and no frame of another life
    counts.
    """
    total = add_up({}, range(first, first + BLOCK), (SINGLE, PAIR, BRANCHING))
    assert total["ok"] > total["failed"]
    assert all(total[name] for name in ("again", "continue", "stale frame", "retries", "paused"))


@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_stages_that_work_on_pieces_keep_every_invariant(first: int) -> None:
    """The same, with hand-offs in pieces, two of them on their way: those come in order and without a gap, and whoever
    is fed is stopped with whoever feeds it, though engines that make no pieces, and edges that take none, are among
    them.
    """
    total = add_up({}, range(first, first + BLOCK), IN_PIECES)
    assert total["ok"] > total["failed"]
    assert all(total[name] for name in ("again", "continue", "pieces", "feed", "withdrawn"))


@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_deterministic_stages_are_made_again_whatever_was_shown_and_lost(first: int) -> None:
    """The same, with replicas that declare it, and with pipelines of which the client hears the last stage alone: no
    request ends because a part of it was shown, and each that ends well is the undisturbed one.
    """
    total = add_up({}, range(first, first + BLOCK), (*SPEECH, *IN_PIECES, BRANCHING), declares=True)
    assert total["ok"] > total["failed"]
    assert all(total[name] for name in ("again", "pieces", "feed", "withdrawn"))
    assert "continue" not in total


def test_without_the_declaration_the_same_losses_end_requests() -> None:
    total = add_up({}, range(BLOCK), SPEECH)
    assert total["not sure to be made again"]


def test_a_stage_that_declares_it_and_is_not_never_mixes_two_answers() -> None:
    """Its lives answer in two ways. Every request shows one of them, gapless, or ends with the difference."""
    total: dict[str, int] = {}
    for untrue in (0, 1, 2):
        add_up(total, range(BLOCK), (*SPEECH, *IN_PIECES), declares=True, untrue=untrue)
    assert total["ok"] > total["failed"]
    assert total["is another"]
