"""The replica's sessions with all hubs: admission of requests, numbering of answers, aborts, giving hubs up.

Runs in the ZMQ thread, which owns everything here; sockets, clocks and threads are its caller's. Messages and jobs wait
until ``flush_messages``. Outcomes of the engine become messages here, to the hub whose request they belong to.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Final

from msgspec import UNSET, structs

from omni_discovery import wire
from omni_discovery.errors import WireError
from omni_discovery.failure_log import Failure, FailureLog, trace_id
from omni_discovery.log_once import LogOnce
from omni_discovery.wire import MAX_ATTACHMENT_BYTES, FailureKind
from omni_discovery.wire.session import Peer, SocketName
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import (
    Called,
    Cancel,
    Finished,
    HandedPiece,
    HoldBack,
    Job,
    Outcome,
    OutputChunk,
    Parked,
    ReleaseHub,
    ReleasePayload,
    Report,
    RequestFailed,
    SegmentEnded,
    TookPiece,
)
from stage_runtime.lifecycle import Refusal, admit
from stage_runtime.server.control import ControlCalls
from stage_runtime.server.credits import NO_LOST_SLOTS
from stage_runtime.server.handshake import Handshake, ReplicaState
from stage_runtime.server.ledger import MOST_BYTES_OF_HUB, Ledger, Ticket, work_of
from stage_runtime.server.outbox import Outbox
from stage_runtime.server.updates import Order, jobs_of
from stage_runtime.server.waiting_pieces import MOST_WAITING_BYTES, WaitingPieces

logger = logging.getLogger(__name__)


def head_of(ticket: Ticket, outcome: Report, queue_length: int) -> bytes:
    """The head frame that reports an outcome. Raise WireError for what no message can hold."""
    return wire.encode(_message(ticket, outcome, queue_length))


def rejection_of(submit: wire.Submit, refusal: Refusal, queue_length: int) -> wire.Rejected:
    """The message that refuses a request."""
    return wire.Rejected(
        epoch=submit.epoch,
        request_id=submit.request_id,
        attempt=submit.attempt,
        kind=refusal.kind,
        reason=wire.shortened(refusal.reason),
        queue_length=queue_length,
    )


def _message(ticket: Ticket, outcome: Report, queue_length: int) -> wire.FromReplica:
    # Patterns that bind fields by position would double what each token costs here.
    match outcome:
        case OutputChunk():
            size_bytes = len(outcome.attachment or b"")
            if size_bytes > MAX_ATTACHMENT_BYTES:
                raise WireError(f"an attachment of {size_bytes} bytes, where a message may have {MAX_ATTACHMENT_BYTES}")
            return wire.Chunk(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                seq=ticket.next_seq,
                modality=outcome.modality,
                queue_length=queue_length,
                attempt=ticket.attempt,
                text=outcome.text,
                token_ids=outcome.token_ids,
                mime=outcome.mime,
                logprobs=outcome.logprobs or UNSET,
                prompt_logprobs=outcome.prompt_logprobs or UNSET,
                prompt_token_ids=outcome.prompt_token_ids or UNSET,
                partial_image=UNSET if outcome.partial_image is None else outcome.partial_image,
            )
        case HandedPiece():
            return wire.HandOffPiece(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                number=outcome.number,
                payloads=outcome.payloads,
                queue_length=queue_length,
            )
        case TookPiece():
            return wire.PieceTaken(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                from_stage=outcome.from_stage,
                number=outcome.number,
                queue_length=queue_length,
            )
        case Finished():
            return wire.StageDone(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                seq=ticket.next_seq,
                finish_reason=wire.shortened(outcome.finish_reason, 256),
                queue_length=queue_length,
                attempt=ticket.attempt,
                payloads=outcome.payloads,
                usage=dict(outcome.usage),
                timings_s=dict(outcome.timings_s),
                pieces=ticket.pieces,
                stop_reason=UNSET if outcome.stop_reason is None else outcome.stop_reason,
                called=UNSET if outcome.called is None else outcome.called,
            )
        case SegmentEnded():
            return wire.SegmentDone(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                seq=ticket.next_seq,
                segment=ticket.segment or 0,
                finish_reason=wire.shortened(outcome.finish_reason, 256),
                queue_length=queue_length,
                payloads=outcome.payloads,
                usage=dict(outcome.usage),
            )
        case RequestFailed():
            return wire.StageFailed(
                epoch=ticket.epoch,
                request_id=ticket.request_id,
                kind=outcome.kind,
                reason=wire.shortened(outcome.reason),
                queue_length=queue_length,
                attempt=ticket.attempt,
                status=UNSET if outcome.status == 400 else outcome.status,
                from_stage=UNSET if outcome.from_stage is None else outcome.from_stage,
            )


#: A connection that was sent nothing for so long is probed with our load, and how often that is checked. Together
#: they make sure that a hub hears from the replica at least once a second.
_SILENT_S: Final = 0.75
_PROBE_INTERVAL_S: Final = 0.2
#: Why a hub is given up whose connection is gone. Others are given up though their connection may stand.
_GONE: Final = "is gone"
_READS_NOTHING: Final = "reads nothing"
#: Seconds between two log lines about the same hub that is behind.
_BEHIND_LOG_S: Final = 60.0
#: As of a hub of which a connection is given up.
_GIVEN_UP_LOG_S: Final = 60.0
#: How attempts end that do not fail.
OK: Final = "ok"
CANCELLED: Final = "cancelled"
#: An Abort that names no attempt names them all.
_ALL_ATTEMPTS: Final = (1 << 53) - 1
#: Hub and replica both end a request at its deadline, which the replica counts from when the Submit came. An Abort that
#: comes this close to it, or in the second half of a shorter time, is taken for the hub's doing so.
_DEADLINE_SLACK_S: Final = 1.0
#: An engine may work on what it has taken, and say nothing: a request of which nothing is heard for so long is idle.
_QUIET_S: Final = 5.0
#: A request ends after so many times ``keep_slot_s`` that its hub has only beyond its share as that is rounded up.
_ROUNDING_FACTOR: Final = 3
#: Heads up to this count for nothing, and those up to the next for what they are; what is made of longer ones is
#: measured.
_SMALL_BYTES: Final = 16 << 10
_LARGE_BYTES: Final = 64 << 10
#: What an object takes, about: a number 32 bytes, an empty mapping 80.
_OBJECT_BYTES: Final = 64
_NO_ROOM: Final = Refusal(
    FailureKind.OVERLOADED,
    f"the inputs of its hub's requests take all of the {MOST_BYTES_OF_HUB >> 20} MiB that they may take here together",
)


def _decode_large(head: bytes) -> tuple[list[wire.ToReplica], int]:
    """The messages of a long head, and about how much memory each with inputs takes, in bytes.

    Pictures and texts take what their frame does, numbers and mappings up to 70 times as much.
    """
    before = sys.getallocatedblocks()
    messages = wire.decode_to_replica((head,))
    # Other threads may have freed theirs meanwhile.
    objects = max(0, sys.getallocatedblocks() - before)
    return messages, (len(head) + objects * _OBJECT_BYTES) // _inputs_in(messages)


def _inputs_in(messages: Sequence[wire.ToReplica]) -> int:
    """How many messages have inputs, which are kept; at least 1. The others are short, however many come with them."""
    return sum(isinstance(message, (wire.Submit, wire.Update)) for message in messages) or 1


class Sessions:
    """The sessions with all hubs, their requests in flight, and their control calls."""

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
        self._counters = counters
        self._jobs = jobs
        #: Jobs that the engine's thread gets at the next flush.
        self._to_do: list[Job] = []
        self._acks = acks
        self._replies = replies
        self.ledger = Ledger()
        #: About how much memory the message takes that is being handled, in bytes; 0 for a small one.
        self._size_bytes = 0
        self.calls = ControlCalls(state.life_state, lambda: len(self.ledger), counters, self._answer_call)
        self._state = state = ReplicaState(self.calls.life_state, state.capacity)
        self.handshake = Handshake(state, self.ledger, counters, acks, replies)
        self._credits = self.handshake.credits
        self._next_probe_s = 0.0
        #: The moment of the last flush, at most a tick ago.
        self._now_s = 0.0
        #: Connections whose requests are held back in the engine until they have read what waits for them.
        self._held_back: set[str] = set()
        #: Connections of which some request's output is held, to be joined.
        self._holding: set[str] = set()
        self._log_once = LogOnce(time.monotonic)
        self._pieces = WaitingPieces()
        #: ``<stage>/<replica id>`` as log lines name this replica; empty before it is registered.
        self.replica_name = ""
        #: Attempts that ended here, by ``ok``, ``cancelled`` or the failure kind.
        self.outcomes = Counter(dict.fromkeys((OK, CANCELLED, *FailureKind), 0))
        #: Replaced as a whole, so that any thread may read it.
        self.lost_slots = NO_LOST_SLOTS
        #: A line for each failed request in the replica's log.
        self.failures = FailureLog(logger.log, time.monotonic)

    def __repr__(self) -> str:
        return f"Sessions({self.handshake!r}, {self.ledger!r}, jobs={len(self._to_do)})"

    # ---- what comes from hubs

    def on_input(self, peer: Peer, head: bytes, now_s: float) -> None:
        """Handle one frame that a hub sent to the input socket. Raise WireError if it can't be decoded."""
        self._receive("input", peer, head, now_s)

    def on_output(self, peer: Peer, head: bytes, now_s: float) -> None:
        """Handle one frame that a hub sent to the output socket. Raise WireError for anything but Hello."""
        self._receive("output", peer, head, now_s)
        self._replies.flush_peer(peer.name, now_s)

    def _receive(self, socket: SocketName, peer: Peer, head: bytes, now_s: float) -> None:
        size_bytes = len(head)
        if size_bytes <= _LARGE_BYTES:
            messages = wire.decode_to_replica((head,))
            self._size_bytes = 0 if size_bytes <= _SMALL_BYTES else size_bytes // _inputs_in(messages)
        elif self.handshake.admits_any(wire.epochs_of(head)):
            messages, self._size_bytes = _decode_large(head)
        else:
            return
        for message in messages:
            if self.handshake.admits(socket, message):
                self._handle(socket, peer, message, now_s)

    def _handle(self, socket: SocketName, peer: Peer, message: wire.ToReplica, now_s: float) -> None:
        match message:
            case wire.Submit():
                self._submit(peer, message, now_s)
            case wire.Abort():
                self._abort(peer, message, now_s)
            case wire.ReleasePayloads() | wire.Feed() | wire.PieceRoom() | wire.Pause() | wire.Update():
                self._handle_order(peer, message)
            case wire.WantCredits() | wire.ReturnCredits():
                self._take_credits(peer, message, now_s)
            case wire.Hello():
                self.handshake.greet(socket, peer, message)
            case wire.Control():
                self._to_do += self.calls.accept_call(peer, message, now_s)

    def _handle_order(self, peer: Peer, order: Order) -> None:
        if isinstance(order, wire.Feed):
            counted = self._count_piece(peer, order)
            if counted is None:
                return
            order = counted
        if isinstance(order, wire.Update) and not self.ledger.has_room(peer.hub_id, self._size_bytes):
            self._reject_update(peer, order)
            return
        answer, jobs = jobs_of(self.ledger, peer, order)
        self._to_do += jobs
        if jobs and isinstance(order, wire.Update | wire.Pause):
            self._note_order(peer, order)
        if answer is not None:
            self._acknowledge(peer, answer)

    def _note_order(self, peer: Peer, order: wire.Update | wire.Pause) -> None:
        ticket = self.ledger.current_ticket(peer.hub_id, order.request_id)
        if ticket is None or (isinstance(order, wire.Pause) and order.paused):
            return
        # What the engine says from now on does not show that it was at work before.
        ticket.quiet_s = 0.0
        if isinstance(order, wire.Update):
            ticket.active_at_s = self._now_s
            self.ledger.resize_ticket(ticket, max(ticket.size_bytes, self._size_bytes))

    def _reject_update(self, peer: Peer, update: wire.Update) -> None:
        rejected = wire.Rejected(
            epoch=update.epoch,
            request_id=update.request_id,
            attempt=update.attempt,
            kind=_NO_ROOM.kind,
            reason=_NO_ROOM.reason,
            queue_length=len(self.ledger),
        )
        self._counters[f"rejected_{_NO_ROOM.kind}"] += 1
        self._acknowledge(peer, rejected)

    def _count_piece(self, peer: Peer, feed: wire.Feed) -> wire.Feed | None:
        """The piece as the engine is to hear of it; None if its request has ended, since too much waits for engines.

        For one of which the engine has heard, the number is enough: it says again what it has taken. One of a stage of
        which none are awaited counts for nothing: no engine would ever take it, and the request would look at work.
        """
        ticket = self.ledger.current_ticket(peer.hub_id, feed.request_id)
        if ticket is None or ticket.attempt != feed.attempt:
            return feed
        is_awaited = feed.from_stage in ticket.open_streams and not feed.is_last
        if not is_awaited or self._pieces.is_known(ticket.key, feed):
            return structs.replace(feed, payload=None)
        while not self._pieces.add(peer.hub_id, ticket.key, feed):
            largest = self.ledger.tickets.get(self._pieces.largest_with(peer.hub_id, ticket.key, feed), ticket)
            mib = MOST_WAITING_BYTES >> 20
            told = (
                f"its hub has announced more pieces than can wait here, {mib} MiB for all requests; it has most of them"
            )
            self._end_early(largest, FailureKind.OVERLOADED, told)
            if largest is ticket:
                return None
        return feed

    def _take_credits(self, peer: Peer, message: wire.WantCredits | wire.ReturnCredits, now_s: float) -> None:
        name, session = peer.name, message.session
        if isinstance(message, wire.WantCredits):
            is_present = self._credits.record_demand(name, session, message.waiting, message.oldest_wait_s, now_s)
        else:
            is_present = self._credits.take_back(name, session, message.credits)
        self._counters["old_session"] += not is_present

    def _submit(self, peer: Peer, submit: wire.Submit, now_s: float) -> None:
        if self.ledger.has_seen_attempt(peer, submit.request_id, submit.attempt):
            self._counters["replayed"] += 1
            return
        limit = self._state.capacity() + self._config.max_waiting
        # A parked request waits for its client and for no slot, so it must not keep others out.
        refusal = admit(self._state.life_state(), len(self.ledger) - self.ledger.parked_count, limit)
        spends_voided = refusal is None and self._spends_voided(peer, submit, now_s)
        if self._size_bytes and refusal is None and not self.ledger.has_room(peer.hub_id, self._size_bytes):
            refusal = _NO_ROOM
        if refusal is None and not (spends_voided or self._may_take_slot(peer, submit)):
            told = "it came without a credit, and its hub has its share of the slots; other hubs want theirs"
            refusal = Refusal(FailureKind.OVERLOADED, told)
        if refusal is not None:
            self._reject(peer, submit, refusal)
            return
        earlier = self.ledger.current_ticket(peer.hub_id, submit.request_id)
        if earlier is not None:
            # The hub has given the earlier attempt up, and drops its frames by their attempt's number.
            self._to_do.append(Cancel(earlier.key))
        ticket = self.ledger.open_ticket(peer, submit.request_id, submit.attempt, submit.epoch)
        if self._size_bytes:
            self.ledger.resize_ticket(ticket, self._size_bytes)
        ticket.is_covered = self._credits.begin_request(peer.name, credit=submit.credit) or spends_voided
        ticket.active_at_s = now_s
        ticket.open_streams.update(submit.stream_from)
        self._acknowledge(
            peer,
            wire.Accepted(
                epoch=submit.epoch,
                request_id=submit.request_id,
                attempt=submit.attempt,
                queue_length=len(self.ledger.tickets),
            ),
        )
        ticket.label = "" if submit.label is UNSET else submit.label
        ticket.trace = trace_id(submit.trace)
        ticket.segment = 0 if submit.segmented else None
        ticket.overdue_at_s = now_s + max(submit.remaining_s - _DEADLINE_SLACK_S, submit.remaining_s / 2)
        self._to_do.append(work_of(ticket, submit, now_s))
        if peer.name in self._held_back:
            self._to_do.append(HoldBack(ticket.key, held=True))

    def _may_take_slot(self, peer: Peer, submit: wire.Submit) -> bool:
        has_credit = submit.credit and self._credits.unspent_of(peer.name) > 0
        return has_credit or self._credits.has_room_without_credit(peer.name)

    def _spends_voided(self, peer: Peer, submit: wire.Submit, now_s: float) -> bool:
        """Whether a request was sent with a credit that was lent, and void before the request came."""
        if submit.credit and self._credits.unspent_of(peer.name):
            return False
        is_owed = submit.credit or not self._credits.has_room_without_credit(peer.name)
        return is_owed and self._credits.use_voided(peer.name, now_s)

    def _reject(self, peer: Peer, submit: wire.Submit, refusal: Refusal) -> None:
        self._counters[f"rejected_{refusal.kind}"] += 1
        if submit.credit:
            self._credits.spend_credit(peer.name)
        self._acknowledge(peer, rejection_of(submit, refusal, len(self.ledger)))

    def _abort(self, peer: Peer, abort: wire.Abort, now_s: float) -> None:
        if abort.attempt < _ALL_ATTEMPTS:
            # The Submit may still be on its way, through a connection that broke meanwhile.
            self.ledger.bar_attempts(peer, abort.request_id, abort.attempt)
        ticket = self.ledger.current_ticket(peer.hub_id, abort.request_id)
        if ticket is None or ticket.attempt > abort.attempt:
            self._acknowledge_abort(peer, abort.epoch, abort.request_id, abort.attempt, was_running=False)
            return
        if ticket.abort is None:
            ticket.is_overdue = now_s >= ticket.overdue_at_s
            self._to_do.append(Cancel(ticket.key))
        # Answered when the engine has let go of the request: one that hangs never does.
        ticket.abort = peer, abort.epoch, abort.attempt

    def _acknowledge_abort(self, peer: Peer, epoch: int, request_id: str, attempt: int, *, was_running: bool) -> None:
        queue_length = len(self.ledger)
        aborted = wire.Aborted(
            epoch=epoch, request_id=request_id, attempt=attempt, running=was_running, queue_length=queue_length
        )
        self._acknowledge(peer, aborted)

    def _acknowledge(self, peer: Peer, message: wire.Accepted | wire.Rejected | wire.Aborted) -> None:
        if not self._acks.push_message(peer.name, wire.encode(message)):
            self._counters["dropped_acknowledgements"] += 1

    # ---- what comes from the engine

    def deliver_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Send outcomes of the engine, numbered, to the hubs whose requests they belong to."""
        tickets = self.ledger.tickets
        for outcome in outcomes:
            ticket = tickets.get(outcome.key)
            if isinstance(outcome, Called):
                self.calls.finish_call(outcome)
            elif ticket is None:
                continue
            elif isinstance(outcome, Parked):
                self._park(ticket, is_parked=outcome.is_parked)
            else:
                self._report(ticket, outcome)

    def _park(self, ticket: Ticket, *, is_parked: bool) -> None:
        # The slot of a request is free while the engine has parked it.
        self.ledger.park(ticket, is_parked=is_parked)
        ticket.active_at_s, ticket.quiet_s = self._now_s, 0.0
        if not is_parked:
            self._credits.begin_request(ticket.peer.name, credit=False)
            return
        self._credits.end_request(ticket.peer.name)
        longest, most = self.ledger.longest_parked, self._config.max_parked
        if longest is not None and self.ledger.parked_count > most:
            self._end_unread(longest, f"its client reads too slowly: more than {most} requests wait for theirs here")

    def _answer_call(self, peer: Peer, message: wire.ControlResult) -> None:
        if not self._replies.push_message(peer.name, wire.encode(message)):
            self._give_up(peer, _READS_NOTHING)

    def _report(self, ticket: Ticket, outcome: Report) -> None:
        if ticket.quiet_s:
            if isinstance(outcome, (OutputChunk, HandedPiece)):
                # The engine was at work, and had nothing to say.
                ticket.kept_s = max(0.0, ticket.kept_s - ticket.quiet_s)
            ticket.quiet_s = 0.0
        ticket.active_at_s = self._now_s
        name, blocked = ticket.peer.name, self._replies.blocked
        if name in self._replies.behind and name not in blocked:
            # The engine has said much at once. What can't be sent now shows that the hub does not read.
            self._replies.flush_peer(name, self._now_s)
        if name in blocked and isinstance(outcome, OutputChunk) and ticket.held.add(outcome):
            self._holding.add(name)
            return
        if ticket.held:
            self._push_held(ticket)
            if ticket.key not in self.ledger.tickets:
                return
            if isinstance(outcome, OutputChunk):
                self._report(ticket, outcome)
                return
        self._push_report(ticket, outcome)

    def _push_held(self, ticket: Ticket) -> None:
        held = ticket.held.take()
        if held is not None:
            self._push_report(ticket, held)

    def _push_report(self, ticket: Ticket, outcome: Report) -> None:
        if isinstance(outcome, (Finished, RequestFailed)):
            self._close(ticket)
            self._log_end(ticket, outcome)
        queue_length = len(self.ledger.tickets)
        try:
            head = head_of(ticket, outcome, queue_length)
            attachment = outcome.attachment if isinstance(outcome, OutputChunk) else None
        except WireError as error:
            self._counters["unsendable_outputs"] += 1
            self._close(ticket)
            self._to_do += (Cancel(ticket.key), ReleasePayload(ticket.owner))
            broken = RequestFailed(ticket.key, FailureKind.ENGINE, f"the output can't be sent: {error}")
            self._log_end(ticket, broken)
            head, attachment = head_of(ticket, broken, len(self.ledger)), None
        ticket.is_idle = ticket.is_idle or isinstance(outcome, SegmentEnded)
        ticket.next_seq += not isinstance(outcome, (HandedPiece, TookPiece))
        if isinstance(outcome, HandedPiece):
            # Those that may have been lost with a session are announced again.
            ticket.pieces = max(ticket.pieces, outcome.number + 1)
        elif isinstance(outcome, TookPiece):
            self._pieces.take(ticket.peer.hub_id, ticket.key, outcome.from_stage, outcome.number)
        self._push_output(ticket, head, attachment)

    def _push_output(self, ticket: Ticket, head: bytes, attachment: bytes | None) -> None:
        """Queue an output for its hub. Where that is full, the request ends that takes most of it, and no other."""
        name, push = ticket.peer.name, self._replies.push_message
        if push(name, head, attachment, ticket):
            return
        while not push(name, head, attachment, ticket):
            largest = self._replies.drop_largest(name)
            if not isinstance(largest, Ticket):
                self._give_up(ticket.peer, _READS_NOTHING)
                return
            self._end_unread(largest, "the hub does not read its outputs fast enough")
            if largest is ticket:
                return

    def _end_unread(self, ticket: Ticket, why: str) -> None:
        """End a request whose outputs are not read; it may have ended before, with outputs that were dropped since."""
        self._counters["unread_requests"] += 1
        self._end_early(ticket, FailureKind.OVERLOADED, why)

    def _end_early(self, ticket: Ticket, kind: FailureKind, why: str) -> None:
        end = RequestFailed(ticket.key, kind, why)
        if ticket.key in self.ledger.tickets:
            self._close(ticket)
            self._log_end(ticket, end)
            self._to_do += (Cancel(ticket.key), ReleasePayload(ticket.owner))
        # Not counted as its output: there is room.
        self._replies.push_message(ticket.peer.name, head_of(ticket, end, len(self.ledger)))

    def _log_end(self, ticket: Ticket, end: Finished | RequestFailed) -> None:
        """Count the end of a request, and log it if it is a failure.

        One that the hub has cancelled is none, but for its deadline.
        """
        if isinstance(end, RequestFailed):
            kind, cause = end.kind, end.reason
        elif ticket.is_overdue and end.finish_reason == "abort":
            kind, cause = FailureKind.DEADLINE, "the hub stopped the request at its deadline"
        else:
            self.outcomes[CANCELLED if end.finish_reason == "abort" else OK] += 1
            return
        self.outcomes[kind] += 1
        stage, name = self.replica_name.partition("/")[0], self.replica_name
        failure = Failure(
            ticket.request_id,
            stage,
            name,
            ticket.attempt,
            kind.value,
            cause,
            label=ticket.label,
            epoch=ticket.epoch,
            trace=ticket.trace,
        )
        self.failures.add(failure, logging.INFO if kind is FailureKind.INVALID else logging.WARNING)

    # ---- timers

    def flush_messages(self, now_s: float) -> None:
        """Send acknowledgements, give the engine its jobs, lend and recall credits, and send what else waits."""
        self._now_s = now_s
        # Before the engine has the requests: one that ends this process was then known to have been accepted.
        self._acks.flush_all(now_s)
        for job in self._to_do:
            self._jobs(job)
        self._to_do.clear()
        self.handshake.settle_credits(now_s)
        self._replies.flush_all(now_s)
        if self._holding:
            self._send_held(now_s)
        if self._replies.behind != self._held_back:
            self._hold_back()

    def _send_held(self, now_s: float) -> None:
        for name in self._holding - self._replies.blocked:
            self._holding.discard(name)
            for ticket in self.ledger.tickets_of_peer(name):
                self._push_held(ticket)
            self._replies.flush_peer(name, now_s)

    def _hold_back(self) -> None:
        """Pause the requests of hubs that have fallen behind, and let those of hubs that have caught up go on."""
        behind = set(self._replies.behind)
        for ticket in self.ledger.tickets.values():
            name = ticket.peer.name
            if (name in behind) != (name in self._held_back):
                self._jobs(HoldBack(ticket.key, held=name in behind))
        for name in sorted(behind - self._held_back):
            self._counters["hubs_held_back"] += 1
            hub_id = name.partition("/")[0]
            if self._log_once.should(hub_id, _BEHIND_LOG_S):
                text = "server.hub_behind hub=%s: it reads its outputs too slowly; its requests here pause until it has"
                logger.warning(text, hub_id)
        self._held_back = behind

    def run_timers(self, now_s: float) -> None:
        """Retry what could not be sent, give up hubs that stay unreachable, and probe connections without traffic."""
        self.failures.write_due()
        self.lost_slots = self._credits.lost_slots(len(self.ledger) - self.ledger.parked_count, now_s)
        self._acks.retry_all(now_s)
        self._replies.retry_all(now_s)
        for name in self._replies.unreachable_peers(0.0, now_s):
            # A hub that reconnects begins another session.
            self._credits.close_account(name)
        for name in self._replies.unreachable_peers(self._config.hub_grace_s, now_s):
            self._give_up(Peer(name, name.partition("/")[0]), _GONE)
        for name in self._replies.blocked_peers(self._config.hub_grace_s, now_s):
            self._give_up(Peer(name, name.partition("/")[0]), _READS_NOTHING)
        for name in self._acks.unreachable_peers(self._config.hub_grace_s, now_s):
            self._acks.drop_peer(name)
        if now_s < self._next_probe_s:
            return
        self._next_probe_s = now_s + _PROBE_INTERVAL_S
        self._end_kept(now_s)
        waiting = {ticket.peer.name: ticket.peer for ticket in self.ledger.tickets.values()}
        for name, peer in (waiting | self.handshake.probed_peers()).items():
            if not (self._replies.has_waiting(name) or self._replies.was_sent_since(name, now_s - _SILENT_S)):
                self.handshake.probe(peer)

    def _end_kept(self, now_s: float) -> None:
        """End requests that have long kept slots unused, of hubs with more than their share, while others wait."""
        excess, rounding_excess = self._credits.excess(), self._credits.rounding_excess()
        keeping = self._count_kept(excess.keys() | rounding_excess.keys(), now_s)
        limit_s = self._config.keep_slot_s
        for hub_id, tickets in keeping.items():
            late = sorted((each for each in tickets if each.kept_s >= limit_s), key=lambda each: -each.kept_s)
            longest = sum(each.kept_s >= limit_s * _ROUNDING_FACTOR for each in late)
            for ticket in late[: max(excess.get(hub_id, 0), min(rounding_excess.get(hub_id, 0), longest))]:
                told = (
                    f"it kept a slot unused for {ticket.kept_s:.0f} s in all, where other hubs waited for their share"
                )
                self._end_early(ticket, FailureKind.OVERLOADED, told)

    def _count_kept(self, contested: Set[str], now_s: float) -> dict[str, list[Ticket]]:
        """Count for how long requests of these hubs keep slots unused; return those that do so now.

        Requests of all hubs pay for that by the time for which they are at work.
        """
        capacity, requests = self._state.capacity(), Counter[str]()
        keeping: defaultdict[str, list[Ticket]] = defaultdict(list)
        for ticket in self.ledger.tickets.values():
            if ticket.is_parked:
                continue
            hub_id = ticket.peer.hub_id
            requests[hub_id] += 1
            # What a hub has here beyond all slots takes others' turns in the engine's queue.
            is_queued = requests[hub_id] > capacity and not ticket.is_covered
            if not (is_queued or self._waits_for_input(ticket)) or now_s - ticket.active_at_s < _QUIET_S:
                ticket.kept_s = max(0.0, ticket.kept_s - _PROBE_INTERVAL_S)
            elif hub_id in contested:
                ticket.kept_s += _PROBE_INTERVAL_S
                ticket.quiet_s += _PROBE_INTERVAL_S
                keeping[hub_id].append(ticket)
        return keeping

    def _waits_for_input(self, ticket: Ticket) -> bool:
        """Whether a request waits for input, or for its client, so that the engine may have nothing to do for it."""
        lacks_pieces = bool(ticket.open_streams) and not self._pieces.has_any(ticket.key)
        return ticket.is_idle or ticket.is_paused or lacks_pieces

    def revoke_hubs(self, hub_ids: frozenset[str]) -> None:
        """Revoke exactly these hubs: their requests and calls here end, and their hand-offs are freed."""
        added = self.handshake.revoke_hubs(hub_ids)
        if not added:
            return
        names = {
            *self._acks.waiting_peers(),
            *self._replies.waiting_peers(),
            *(peer.name for peer in self.handshake.connections_of(added)),
        }
        names |= {ticket.peer.name for ticket in self.ledger.tickets.values()}
        names |= {peer.name for peer in self.calls.calling_peers()}
        for name in sorted(names):
            peer = Peer(name, name.partition("/")[0])
            if peer.hub_id in added:
                self._give_up(peer, "is revoked")
        self._to_do += (ReleaseHub(hub_id) for hub_id in sorted(added))

    def _give_up(self, peer: Peer, why: str) -> None:
        tickets = self.ledger.tickets_of_peer(peer.name)
        self.handshake.give_up(peer, is_gone=why == _GONE)
        self._acks.drop_peer(peer.name)
        self._to_do += (Cancel(key) for key in self.calls.drop_calls(peer.name))
        dropped = self._replies.drop_peer(peer.name)
        self._counters["hubs_given_up"] += 1
        if self._log_once.should((peer.hub_id, why), _GIVEN_UP_LOG_S):
            text = (
                "server.hub_given_up hub=%s %s requests=%d messages=%d (within a minute others of it are only counted)"
            )
            logger.warning(text, peer.hub_id, why, len(tickets), dropped)
        self.outcomes[CANCELLED] += len(tickets)
        for ticket in tickets:
            # Nobody is there to hear of it.
            ticket.abort = None
            self._close(ticket)
            self._to_do += (Cancel(ticket.key), ReleasePayload(ticket.owner))
        if not any(other.hub_id == peer.hub_id for other in self.handshake.greeted_peers()):
            # No connection of the hub is left to release its hand-offs by.
            self._to_do.append(ReleaseHub(peer.hub_id))

    def _close(self, ticket: Ticket) -> None:
        if not self.ledger.close_ticket(ticket):
            return
        self._pieces.forget_request(ticket.peer.hub_id, ticket.key)
        if not ticket.is_parked:
            self._credits.end_request(ticket.peer.name)
        if ticket.abort is not None:
            peer, epoch, attempt = ticket.abort
            self._acknowledge_abort(peer, epoch, ticket.request_id, attempt, was_running=True)
