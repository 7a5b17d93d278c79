"""Trials: holds the dispatches of suspects until their stage's probation lets them go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from hub.pool.probation import GiveUp, Healthy, Suspect, Together, Try
from hub.request import events as ev

if TYPE_CHECKING:
    from hub.orchestrator.active import Active
    from hub.pool.stage_pool import StagePool

#: How often the stages are looked at while suspects wait, in seconds.
_REVIEW_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class TrialDue:
    """The wait of a suspect's dispatch is over; or it was sent, and others have joined it."""

    request_id: str
    dispatch: ev.Dispatch
    step: Try | GiveUp | Together


@dataclass(frozen=True, slots=True)
class _Held:
    pool: StagePool
    dispatch: ev.Dispatch
    suspect: Suspect


class Trials:
    """Part of the orchestrator's task; ``post`` brings what is due back into it."""

    def __init__(self, post: Callable[[TrialDue], None]) -> None:
        self._post = post
        #: By request and stage, until the trial is over. Others may look whether there are any: mostly there are none.
        self.held: dict[tuple[str, int], _Held] = {}
        self._timer: asyncio.Handle | None = None
        #: When the timer ends, monotonic.
        self._due_s = 0.0

    def __len__(self) -> int:
        """How many suspects wait or are on trial."""
        return len(self.held)

    def hold(self, active: Active, dispatch: ev.Dispatch) -> None:
        """Let a suspect's dispatch wait for its trial."""
        request_id, pool = active.request.request_id, active.pools[dispatch.stage_id]
        run = active.machine.runs[dispatch.stage_id]
        now_s, healthy = pool.now(), pool.core.healthy_addrs
        left_s = max(0.0, active.deadline_s - time.perf_counter())
        suspect = Suspect(
            request_id,
            tuple(map(_name_of_life, dispatch.blamed_for)),
            dispatch.avoid,
            since_s=now_s,
            # In the worst case half of the time is left for the last replica.
            until_s=now_s + left_s / 2,
            wanted=min(2, len(healthy) + 1),
            lost_after_s=run.dispatched_at_s - run.sent_at_s,
            must_be_alone=run.deaths > 1,
        )
        self._hold(_Held(pool, dispatch, suspect))

    def hold_again(self, request_id: str, stage_id: int) -> bool:
        """No replica was found for a trial: let it wait again. Return False if there is none that is being picked."""
        held = self.held.get((request_id, stage_id))
        if held is None or not held.pool.probation.is_on_trial(request_id):
            return False
        self._hold(held)
        return True

    def placed(self, request_id: str, stage_id: int, addr: str) -> None:
        """The work is sent to this replica. Requests without a trial are fine."""
        held = self.held.get((request_id, stage_id))
        if held is not None:
            for each in held.pool.probation.placed(request_id, addr):
                self._post(TrialDue(each.request_id, self.held[each.request_id, stage_id].dispatch, each))
            self._review_soon()

    def forget(self, request_id: str, stage_id: int) -> ev.Dispatch | None:
        """The trial, or the wait for it, is over; return the dispatch that it was for. Others are fine."""
        held = self.held.pop((request_id, stage_id), None)
        if held is None:
            return None
        held.pool.probation.ended(request_id)
        self._review_soon()
        return held.dispatch

    def take_back(self, request_id: str, stage_id: int) -> ev.Dispatch | None:
        """As ``forget``, but work that was sent stays on trial, and None is returned for it."""
        held = self.held.get((request_id, stage_id))
        is_sent = held is not None and held.pool.probation.is_placed(request_id)
        return None if is_sent else self.forget(request_id, stage_id)

    def explain(self, pool: StagePool, deaths: Collection[ev.ReplicaRef]) -> None:
        """The cause of these deaths was found: others that are suspects only for them are none any more."""
        pool.probation.explain([*map(_name_of_life, deaths)])
        self._review_soon()

    def close(self) -> None:
        """Drop all. Idempotent."""
        self.held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hold(self, held: _Held) -> None:
        self.held[held.suspect.request_id, held.pool.stage_id] = held
        held.pool.probation.hold(held.suspect)
        self._review_soon()

    def _review_soon(self) -> None:
        # In a turn of its own: all requests of a replica that has ended are suspects before the first one is tried.
        self._set_timer(0.0)

    def _set_timer(self, delay_s: float) -> None:
        due_s = time.monotonic() + delay_s
        if self._timer is not None:
            if self._due_s <= due_s:
                return
            self._timer.cancel()
        self._due_s = due_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._review)

    def _review(self) -> None:
        self._timer = None
        pools = {id(held.pool): held.pool for held in self.held.values()}
        for pool in pools.values():
            ejected = frozenset(addr for addr, each in pool.core.outliers.ejected.items() if each.pickable)
            healthy = Healthy(pool.core.healthy_addrs, pool.core.members.is_one_starting, ejected)
            for step in pool.probation.due(healthy, pool.now()):
                self._pass_on(pool, step)
        if any(len(pool.probation) for pool in pools.values()):
            self._set_timer(_REVIEW_S)

    def _pass_on(self, pool: StagePool, step: Try | GiveUp) -> None:
        held = self.held[step.request_id, pool.stage_id]
        if not (isinstance(step, Try) and step.is_trial):
            del self.held[step.request_id, pool.stage_id]
        self._post(TrialDue(step.request_id, held.dispatch, step))


def tried(dispatch: ev.Dispatch, step: Try) -> ev.Dispatch:
    """The dispatch as it goes to a replica."""
    return replace(dispatch, blamed_for=(), avoid=dispatch.avoid | step.avoid)


def _name_of_life(replica: ev.ReplicaRef) -> str:
    return f"{replica} {replica.epoch}"
