"""What the replica says to hubs and what it makes of what they say: epochs, admission, numbering, giving up.

Runs in the ZMQ thread, which owns everything here; sockets, clocks and threads are its caller's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from omni_discovery import wire
from omni_discovery.errors import WireError
from omni_discovery.wire import FailureKind
from stage_runtime.config import ServerConfig
from stage_runtime.credits import CreditBook, GrantCredits
from stage_runtime.jobs import Broken, Cancel, Finished, Job, Outcome, Piece, Release, Work
from stage_runtime.ledger import Ledger, Ticket
from stage_runtime.lifecycle import Refusal, Stage, admit
from stage_runtime.outbox import Outbox

logger = logging.getLogger(__name__)

#: How many hubs' greetings are remembered, and how many earlier epochs of this process.
_MAX_HELLOS: Final = 1024
_MAX_LIVES: Final = 64
#: How often a hub that waits for something hears from us at least.
_PROBE_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What the ZMQ thread has to know of the rest; read anew for every request."""

    stage: Callable[[], Stage]
    capacity: Callable[[], int]


class Sessions:
    """The talk with all hubs."""

    def __init__(
        self,
        config: ServerConfig,
        state: ReplicaState,
        counters: Counter[str],
        jobs: Callable[[Job], None],
        acks: Outbox,
        replies: Outbox,
    ) -> None:
        self._config = config
        self._state = state
        self._counters = counters
        self._jobs = jobs
        self._acks = acks
        self._replies = replies
        self.ledger = Ledger()
        self.credits = CreditBook()
        #: The life that the registry knows; 0 before the first. Set from the lease's thread.
        self.epoch = 0
        #: All lives of this process, the present one last.
        self._lives: dict[int, None] = {}
        #: Who greeted which life, by socket and hub; answered again when the life becomes true.
        self._hellos: dict[tuple[str, str], wire.Hello] = {}
        self._logged_errors: set[str] = set()
        self._next_probe_s = 0.0

    def on_input(self, hub_id: str, frames: Sequence[bytes], now_s: float) -> None:
        """Handle what a hub sent to the input socket. Raise WireError if it can't be read."""
        for message in wire.decode_to_replica(frames):
            self._take(hub_id, message, now_s)

    def on_output(self, hub_id: str, frames: Sequence[bytes], now_s: float) -> None:
        """Handle what a hub sent to the output socket. Raise WireError for anything but Hello."""
        for message in wire.decode_to_replica(frames):
            if not isinstance(message, wire.Hello):
                raise WireError(f"{type(message).__name__} on the output socket")
            self._greet("output", hub_id, message, now_s)
            self._replies.flush(hub_id, now_s)

    def greet_waiting(self, now_s: float) -> None:
        """After a change of epoch: welcome the hubs that knew of the new life before we did."""
        epoch = self.epoch
        if not epoch or epoch in self._lives:
            return
        self._lives[epoch] = None
        while len(self._lives) > _MAX_LIVES:
            del self._lives[next(iter(self._lives))]
        for (socket, hub_id), wanted in list(self._hellos.items()):
            if wanted.epoch == epoch:
                self._begin(socket, hub_id, wanted.session, now_s)

    def deliver(self, outcomes: Sequence[Outcome], now_s: float) -> None:
        """Number what came out of the engine and send it to the hubs that asked."""
        for outcome in outcomes:
            ticket = self.ledger.get(outcome.key)
            if ticket is None:
                continue
            seq = self.ledger.take_seq(outcome.key)
            if not isinstance(outcome, Piece):
                self._close(ticket)
            frames = self._frames(ticket, seq, outcome)
            if not self._replies.push(ticket.hub_id, frames, now_s):
                self._give_up(ticket.hub_id, "reads too slowly")

    def tick(self, now_s: float) -> None:
        """Try again what could not be sent; give up hubs that stay away; look after those that wait in silence."""
        self._acks.retry(now_s)
        self._replies.retry(now_s)
        for hub_id in self._replies.gone_for(self._config.hub_grace_s, now_s):
            self._give_up(hub_id, "is gone")
        for hub_id in self._acks.gone_for(self._config.hub_grace_s, now_s):
            self._acks.drop(hub_id)
        if now_s < self._next_probe_s:
            return
        self._next_probe_s = now_s + _PROBE_INTERVAL_S
        # Only a send tells whether a hub is still there; a request that waits in the queue sends nothing by itself.
        for hub_id in self.ledger.hubs() | set(self.credits.holders()):
            if not self._replies.has_waiting(hub_id):
                self._welcome("output", hub_id, now_s)

    def count_bad_frame(self, reason: str) -> None:
        """A frame was dropped."""
        self._counters["bad_frames"] += 1
        self._log_once("wire", "server.bad_frame reason=%s (others are only counted)", reason)

    def _take(self, hub_id: str, message: wire.ToReplica, now_s: float) -> None:
        match message:
            case wire.Hello():
                self._greet("input", hub_id, message, now_s)
            case wire.Submit():
                self._submit(hub_id, message, now_s)
            case wire.Abort():
                self._abort(hub_id, message, now_s)
            case wire.ReleasePayloads():
                if self._is_a_life(message.epoch):
                    self._jobs(Release(f"{hub_id}/{message.request_id}"))
            case wire.WantCredits(session=session, waiting=waiting, oldest_wait_s=oldest_wait_s):
                if self._is_a_life(message.epoch):
                    self.credits.want(hub_id, session, waiting, oldest_wait_s, now_s)
            case wire.ReturnCredits(session=session):
                if self._is_a_life(message.epoch):
                    self.credits.give_back(hub_id, session, message.credits)

    def _abort(self, hub_id: str, abort: wire.Abort, now_s: float) -> None:
        if not self._is_a_life(abort.epoch):
            return
        ticket = self.ledger.current(hub_id, abort.request_id)
        running = ticket is not None and ticket.attempt <= abort.attempt
        if ticket is not None and running:
            self._jobs(Cancel(ticket.key))
        aborted = wire.Aborted(
            epoch=abort.epoch,
            request_id=abort.request_id,
            attempt=abort.attempt,
            running=running,
            queue_length=len(self.ledger),
        )
        self._acknowledge(hub_id, aborted, now_s)

    def settle_credits(self, now_s: float) -> None:
        """Lend what is free, ask back what others wait for."""
        is_ready = self._state.stage() is Stage.READY
        self.credits.set_capacity(self._state.capacity() if is_ready else 0)
        for action in self.credits.settle(now_s):
            kind = wire.Grant if isinstance(action, GrantCredits) else wire.Recall
            message = kind(
                epoch=self.epoch, session=action.session, credits=action.credits, queue_length=len(self.ledger)
            )
            self._replies.push(action.peer, (wire.encode(message),), now_s)

    def _submit(self, hub_id: str, submit: wire.Submit, now_s: float) -> None:
        if submit.epoch != self.epoch:
            self._refuse_epoch(submit.epoch)
            return
        refusal = self._verdict(hub_id, submit)
        if refusal is not None:
            if submit.credit:
                self.credits.spend(hub_id)
            self._counters[f"rejected_{refusal.kind}"] += 1
            self._acknowledge(
                hub_id,
                wire.Rejected(
                    epoch=submit.epoch,
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    kind=refusal.kind,
                    reason=refusal.reason,
                    queue_length=len(self.ledger),
                ),
                now_s,
            )
            return
        ticket = self.ledger.open(hub_id, submit.request_id, submit.attempt, submit.epoch)
        self.credits.began(hub_id, credit=submit.credit)
        accepted = wire.Accepted(
            epoch=submit.epoch,
            request_id=submit.request_id,
            attempt=submit.attempt,
            queue_length=len(self.ledger),
        )
        self._acknowledge(hub_id, accepted, now_s)
        self._jobs(_work(ticket, submit, now_s))

    def _verdict(self, hub_id: str, submit: wire.Submit) -> Refusal | None:
        running = self.ledger.current(hub_id, submit.request_id)
        if running is not None and submit.attempt <= running.attempt:
            return Refusal(FailureKind.INVALID, f"attempt {running.attempt} of this request is running here")
        limit = self._state.capacity() + self._config.max_waiting
        refusal = admit(self._state.stage(), len(self.ledger), limit)
        if refusal is None and running is not None:
            # The hub has given the earlier attempt up; its frames carry its own number and harm nobody.
            self._jobs(Cancel(running.key))
        return refusal

    def _greet(self, socket: str, hub_id: str, hello: wire.Hello, now_s: float) -> None:
        if hello.hub_id != hub_id:
            raise WireError(f"hub {hub_id!r} says that it is {hello.hub_id!r}")
        self._hellos.pop((socket, hub_id), None)
        self._hellos[socket, hub_id] = hello
        while len(self._hellos) > _MAX_HELLOS:
            del self._hellos[next(iter(self._hellos))]
        if hello.epoch == self.epoch:
            self._begin(socket, hub_id, hello.session, now_s)
        elif self.epoch:
            self._refuse_epoch(hello.epoch)

    def _begin(self, socket: str, hub_id: str, session: int, now_s: float) -> None:
        self._welcome(socket, hub_id, now_s, session)
        if socket == "output" and session:
            self.credits.open(hub_id, session)

    def _welcome(self, socket: str, hub_id: str, now_s: float, session: int = 0) -> None:
        message = wire.Welcome(
            epoch=self.epoch, capacity=self._state.capacity(), queue_length=len(self.ledger), session=session
        )
        outbox = self._acks if socket == "input" else self._replies
        outbox.push(hub_id, (wire.encode(message),), now_s)

    def _acknowledge(self, hub_id: str, message: wire.Accepted | wire.Rejected | wire.Aborted, now_s: float) -> None:
        if not self._acks.push(hub_id, (wire.encode(message),), now_s):
            self._counters["dropped_acknowledgements"] += 1

    def _frames(self, ticket: Ticket, seq: int, outcome: Outcome) -> tuple[bytes, ...]:
        try:
            head = wire.encode(_message(ticket, seq, outcome, len(self.ledger)))
        except WireError as error:
            broken = Broken(ticket.key, FailureKind.ENGINE, f"the output can't be sent: {error}")
            if isinstance(outcome, Piece):
                self._jobs(Cancel(ticket.key))
                self._close(ticket)
            return (wire.encode(_message(ticket, seq, broken, len(self.ledger))),)
        return (head, outcome.attachment) if isinstance(outcome, Piece) and outcome.attachment else (head,)

    def _give_up(self, hub_id: str, why: str) -> None:
        tickets = self.ledger.of_hub(hub_id)
        dropped = self._replies.drop(hub_id)
        self.credits.close(hub_id)
        self._counters["hubs_given_up"] += 1
        logger.warning("server.hub_given_up hub=%s %s requests=%d messages=%d", hub_id, why, len(tickets), dropped)
        for ticket in tickets:
            self._close(ticket)
            self._jobs(Cancel(ticket.key))
            self._jobs(Release(f"{hub_id}/{ticket.request_id}"))

    def _close(self, ticket: Ticket) -> None:
        if self.ledger.get(ticket.key) is not None:
            self.ledger.close(ticket.key)
            self.credits.ended(ticket.hub_id)

    def _is_a_life(self, epoch: int) -> bool:
        # What began in an earlier life of this same process may be ended in this one.
        if epoch in self._lives:
            return True
        self._refuse_epoch(epoch)
        return False

    def _refuse_epoch(self, epoch: int) -> None:
        self._counters["wrong_epoch"] += 1
        self._log_once("epoch", "server.wrong_epoch got=%d ours=%d (others are only counted)", epoch, self.epoch)

    def _log_once(self, kind: str, text: str, *values: object) -> None:
        if kind not in self._logged_errors:
            self._logged_errors.add(kind)
            logger.warning(text, *values)


def _work(ticket: Ticket, submit: wire.Submit, now_s: float) -> Work:
    return Work(
        key=ticket.key,
        owner=f"{ticket.hub_id}/{ticket.request_id}",
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        inputs=submit.inputs,
        params=submit.params,
        payloads=submit.payloads,
        next_stages=submit.next_stages,
        accepted_at_s=now_s,
        deadline_s=now_s + submit.remaining_s,
        resume=submit.resume,
        priority=submit.priority,
    )


def _message(ticket: Ticket, seq: int, outcome: Outcome, queue_length: int) -> wire.FromReplica:
    common: dict[str, Any] = {
        "epoch": ticket.epoch,
        "request_id": ticket.request_id,
        "attempt": ticket.attempt,
        "queue_length": queue_length,
    }
    match outcome:
        case Piece(_, modality, text, token_ids, mime, _):
            return wire.Chunk(seq=seq, modality=modality, text=text, token_ids=token_ids, mime=mime, **common)
        case Finished(_, reason, payloads, usage, timings_s):
            return wire.StageDone(
                seq=seq,
                finish_reason=reason,
                payloads=payloads,
                usage=dict(usage),
                timings_s=dict(timings_s),
                **common,
            )
        case Broken(_, kind, reason):
            return wire.StageFailed(kind=kind, reason=reason, **common)
