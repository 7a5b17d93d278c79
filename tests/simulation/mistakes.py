"""Mistakes that are made on purpose, to see whether the judge finds them: each replaces a piece of the packages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

from msgspec.structs import replace

from hub.orchestrator.dispatcher import Dispatcher
from hub.orchestrator.requests import Requests
from hub.pool.probation import Probation
from hub.replicas.pending import PendingAborts, PendingDispatches
from hub.replicas.stage_client import StageClient
from hub.request.machine import RequestMachine
from hub.request.state import StageRun
from omni_discovery.kv import PutEvent, WatchBatch
from omni_discovery.registration import leased_key
from omni_discovery.registration.lease import Lease, ServerForgot
from omni_discovery.view.table import ReplicaTable
from omni_discovery.wire.session import _Role
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.server.credits import CreditBook
from stage_runtime.server.handshake import Handshake
from stage_runtime.server.ledger import Ledger
from stage_runtime.server.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Mistake:
    """``owner.name`` becomes ``make(what it was)``."""

    owner: Any
    name: str
    make: Callable[[Any], Any]


def _drop_deletes(apply: Any) -> Any:
    def wrong(table: Any, batch: WatchBatch, at_s: float) -> Any:
        kept = tuple(event for event in batch.events if isinstance(event, PutEvent))
        return apply(table, WatchBatch(batch.revision, kept), at_s)

    return wrong


def _any_epoch(_flaw_of: Any) -> Any:
    return lambda role, socket, message: None


def _output_twice(report: Any) -> Any:
    def wrong(sessions: Any, ticket: Any, outcome: Any) -> None:
        report(sessions, ticket, outcome)
        if type(outcome).__name__ == "OutputChunk" and ticket.next_seq == 3:
            report(sessions, ticket, outcome)

    return wrong


def _forgets(_method: Any) -> Any:
    return lambda *args, **options: None


def _keeps_lost_lease(handle: Any) -> Any:
    return lambda lease, event: [] if isinstance(event, ServerForgot) else handle(lease, event)


def _two_attempts(begin: Any) -> Any:
    def wrong(run: Any, now_s: float) -> Any:
        if run.attempt >= 0:
            run.attempt += 1
        return begin(run, now_s)

    return wrong


def _released_early(hand_over: Any) -> Any:
    def wrong(payloads: Any, work: Any, handoff: Any, to_stages: Any, number: Any = None) -> Any:
        refs = hand_over(payloads, work, handoff, to_stages, number)
        payloads.release(work.owner)
        return refs

    return wrong


def _lends_more(set_capacity: Any) -> Any:
    return lambda book, capacity: set_capacity(book, capacity + 1 if capacity else 0)


def _resumes_late(begin: Any) -> Any:
    def wrong(run: Any, now_s: float) -> Any:
        resume = begin(run, now_s)
        if resume is None or not resume.token_ids:
            return resume
        words = resume.text.split()
        return replace(resume, token_ids=resume.token_ids[:-1], text=" ".join(words[:-1]) + " ")

    return wrong


def _leaky_slots(end_request: Any) -> Any:
    count = [0]

    def wrong(book: Any, peer: str) -> None:
        count[0] += 1
        if count[0] % 5:
            end_request(book, peer)

    return wrong


def _tells_the_prompt(describe: Any) -> Any:
    def wrong(loop: Any, work: Any, *rest: Any) -> Any:
        from tests.simulation.replica import current_process, current_world

        for each in current_world().live_replicas():
            if each.process is current_process():
                each._describe(reason=str(work.inputs.get("prompt", ""))[:50])
        return describe(loop, work, *rest)

    return wrong


def _keeps_ended(finish: Any) -> Any:
    def wrong(requests: Any, active: Any, outcome: Any, error: Any) -> None:
        finish(requests, active, outcome, error)
        requests.states[active.request.request_id] = active.machine.state.public

    return wrong


def _every_change(_next_write_s: Any) -> Any:
    return lambda pace, written_at_s, now_s, chance: now_s


def _does_not_move(_can_move: Any) -> Any:
    return lambda machine, stage_id: False


def _never_hopeless(hopeless: Any) -> Any:
    return lambda probation, healthy, now_s: [] if healthy.addrs else hopeless(probation, healthy, now_s)


#: The name of each mistake, and what it is.
MISTAKES: Final[dict[str, Mistake]] = {
    "drop the deletes of a watch": Mistake(ReplicaTable, "apply", _drop_deletes),
    "skip the epoch check": Mistake(_Role, "flaw_of", _any_epoch),
    "send an output twice": Mistake(Sessions, "_push_report", _output_twice),
    "forget an abort's acknowledgement": Mistake(PendingAborts, "acknowledge_abort", _forgets),
    "forget to acknowledge requests": Mistake(Sessions, "_acknowledge", _forgets),
    "keep a lease that the server has lost": Mistake(Lease, "handle", _keeps_lost_lease),
    "count an attempt twice": Mistake(StageRun, "begin_attempt", _two_attempts),
    "release a hand-off early": Mistake(Payloads, "hand_over", _released_early),
    "never release a hand-off": Mistake(Dispatcher, "release_payload", _forgets),
    "lend one slot too many": Mistake(CreditBook, "set_capacity", _lends_more),
    "lose a slot now and then": Mistake(CreditBook, "end_request", _leaky_slots),
    "repeat a token when resuming": Mistake(StageRun, "begin_attempt", _resumes_late),
    "keep requests that have ended": Mistake(Requests, "_finish", _keeps_ended),
    "tell etcd the prompt": Mistake(EngineLoop, "_start", _tells_the_prompt),
    "write every change of the load": Mistake(leased_key.LoadPace, "next_write_s", _every_change),
    "never find a dispatch unanswered": Mistake(PendingDispatches, "add_dispatch", _forgets),
    "leave requests where their replica was lost": Mistake(RequestMachine, "can_move", _does_not_move),
    "accept an attempt again": Mistake(Ledger, "has_seen_attempt", lambda _: lambda *args: False),
    "ignore deadlines": Mistake(Requests, "apply_item", _forgets),
    "close no account of a lost hub": Mistake(CreditBook, "close_account", _forgets),
    "keep no promise to release": Mistake(StageClient, "release_payloads", _forgets),
    "lend no slots": Mistake(Handshake, "settle_credits", _forgets),
    "try a suspect that may go nowhere": Mistake(Probation, "_hopeless", _never_hopeless),
}


@contextlib.contextmanager
def made(name: str) -> Iterator[None]:
    """The packages with that mistake; empty: as they are."""
    if not name:
        yield
        return
    mistake = MISTAKES[name]
    with mock.patch.object(mistake.owner, mistake.name, mistake.make(getattr(mistake.owner, mistake.name))):
        yield
