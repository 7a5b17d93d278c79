"""What the replica answers to hubs: epochs, admission, numbering, giving up. No sockets, no threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from omni_discovery import wire
from omni_discovery.errors import WireError
from omni_discovery.wire import FailureKind
from omni_discovery.wire.session import Peer
from stage_runtime.config import ServerConfig
from stage_runtime.engine_loop.jobs import (
    Cancel,
    Finished,
    HandedPiece,
    HoldBack,
    Job,
    Outcome,
    OutputChunk,
    Parked,
    Pause,
    PieceArrived,
    ReleaseHub,
    ReleasePayload,
    RequestFailed,
    SegmentEnded,
    TookPiece,
    Work,
)
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.handshake import ReplicaState
from stage_runtime.server.outbox import Frames, Outbox, SendResult
from stage_runtime.server.sessions import Sessions
from stage_runtime.server.waiting_pieces import WaitingPieces


class Replica:
    """Sessions with everything around them in lists."""

    def __init__(self, **config: Any) -> None:
        self.life_state = LifeState.READY
        self.jobs: list[Job] = []
        self.said: list[tuple[str, str, wire.FromReplica, Sequence[bytes | memoryview]]] = []
        self.reachable = SendResult.SENT
        #: Connections that are not there.
        self.gone: set[str] = set()
        self.multiparts = 0
        self.counters: Counter[str] = Counter()
        self.sessions = Sessions(
            ServerConfig(**config),
            ReplicaState(lambda: self.life_state, lambda: 2),
            self.counters,
            self.jobs.append,
            Outbox(lambda hub, frames: self._send("input", hub, frames), 10, 10_000),
            Outbox(lambda hub, frames: self._send("output", hub, frames), 10, 10_000),
        )
        self.set_epoch(7)

    def _send(self, socket: str, hub_id: str, frames: Frames) -> SendResult:
        if hub_id in self.gone:
            return SendResult.GONE
        if self.reachable is SendResult.SENT:
            self.multiparts += 1
            messages, attachments = wire.decode_from_replica(frames)
            self.said += [(socket, hub_id, message, attachments) for message in messages]
        return self.reachable

    def set_epoch(self, epoch: int) -> None:
        self.sessions.handshake.registered_epoch = epoch
        self.sessions.handshake.follow_epoch()
        self.sessions.flush_messages(0.0)

    def hears(self, hub_id: str, message: wire.ToReplica, now_s: float = 0.0) -> list[wire.FromReplica]:
        """Give it a frame on the input socket; return what it says to that."""
        before = len(self.said)
        self.sessions.on_input(Peer(hub_id, hub_id.partition("/")[0]), wire.encode(message), now_s)
        self.sessions.flush_messages(now_s)
        return [said[2] for said in self.said[before:]]

    def hears_on_output(self, hub_id: str, message: wire.ToReplica, now_s: float = 0.0) -> list[wire.FromReplica]:
        """Give it a frame on the output socket; return what it says to that."""
        before = len(self.said)
        self.sessions.on_output(Peer(hub_id, hub_id.partition("/")[0]), wire.encode(message), now_s)
        self.sessions.flush_messages(now_s)
        return [said[2] for said in self.said[before:]]

    def delivers(self, *outcomes: Outcome, now_s: float = 0.0) -> list[wire.FromReplica]:
        """The engine has said these; return what it says to that."""
        before = len(self.said)
        self.sessions.deliver_outcomes(outcomes)
        self.sessions.flush_messages(now_s)
        return [said[2] for said in self.said[before:]]

    def tick(self, now_s: float) -> None:
        self.sessions.run_timers(now_s)
        self.sessions.flush_messages(now_s)

    def submit(self, request_id: str = "r", hub_id: str = "h", epoch: int = 7, **fields: Any) -> list[wire.FromReplica]:
        return self.hears(hub_id, wire.Submit(epoch=epoch, request_id=request_id, **fields))

    def works(self) -> list[Work]:
        return [job for job in self.jobs if isinstance(job, Work)]


def test_a_hub_that_names_our_life_is_welcomed_on_both_sockets() -> None:
    replica = Replica()
    hello = wire.Hello(hub_id="h", epoch=7)
    assert replica.hears("h", hello) == [wire.Welcome(epoch=7, capacity=2, queue_length=0)]
    replica.hears_on_output("h", hello, 0.0)
    assert [socket for socket, *_ in replica.said] == ["input", "output"]


def test_a_hub_that_knows_our_new_life_before_we_do_is_welcomed_when_we_learn_of_it() -> None:
    """1. the hub has read epoch 9 from the registry, our own answer is still on its way
    2. as it comes, the hub gets its welcome without asking again
    """
    replica = Replica()
    assert replica.hears("h", wire.Hello(hub_id="h", epoch=9)) == []
    assert replica.counters["wrong_epoch"] == 1
    replica.set_epoch(9)
    assert replica.said[-1][2] == wire.Welcome(epoch=9, capacity=2, queue_length=0)


def test_work_for_another_life_is_dropped_and_counted() -> None:
    replica = Replica()
    assert replica.submit(epoch=6) == []
    assert (replica.jobs, replica.counters["wrong_epoch"]) == ([], 1)


def test_of_many_messages_for_another_life_the_first_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica()
    for _ in range(3):
        assert replica.submit(epoch=6) == []
    assert replica.counters["wrong_epoch"] == 3
    (line,) = [each.getMessage() for each in caplog.records]
    assert line == "server.wrong_epoch got=6 ours=7 (others are only counted)"


def test_before_the_first_life_nothing_is_taken() -> None:
    replica = Replica()
    replica.set_epoch(0)
    assert replica.submit(epoch=7) == []
    assert replica.jobs == []


def test_accepted_work_reaches_the_engine_with_its_deadline() -> None:
    replica = Replica()
    submit = wire.Submit(epoch=7, request_id="r", remaining_s=5.0, trace="00-7-7-01")
    (accepted,) = replica.hears("h", submit, now_s=100.0)
    assert accepted == wire.Accepted(epoch=7, request_id="r", queue_length=1)
    (work,) = replica.works()
    assert (work.request_id, work.owner, work.accepted_at_s, work.deadline_s) == ("r", "h/r", 100.0, 105.0)
    assert work.trace == "00-7-7-01"


def test_a_pause_reaches_the_engine_and_is_answered_where_its_request_is_here() -> None:
    """So that whoever says it again, after a connection was lost, knows that the work was not."""
    replica = Replica()
    replica.submit(attempt=1)
    (work,) = replica.works()
    about = {"epoch": 7, "request_id": "r", "paused": True}
    accepted = wire.Accepted(epoch=7, request_id="r", queue_length=1, attempt=1)
    for _ in range(2):
        assert replica.hears("h", wire.Pause(attempt=1, **about)) == [accepted]
    assert replica.jobs[1:] == [Pause(work.key, True)] * 2
    assert replica.hears("h", wire.Pause(attempt=0, **about)) == []
    assert replica.hears("h", wire.Pause(attempt=1, **{**about, "request_id": "x"})) == []
    assert replica.hears("other", wire.Pause(attempt=1, **about)) == []
    assert replica.hears("h", wire.Pause(attempt=1, **{**about, "epoch": 6})) == []
    assert len(replica.jobs) == 3


def test_the_bound_is_what_runs_and_what_may_wait_together() -> None:
    """Capacity 2, one may wait: the fourth is refused, and after an end the next is taken."""
    replica = Replica(max_waiting=1)
    for name in "abc":
        assert isinstance(replica.submit(name)[0], wire.Accepted)
    (rejected,) = replica.submit("d")
    assert isinstance(rejected, wire.Rejected)
    assert (rejected.kind, rejected.queue_length) == (FailureKind.OVERLOADED, 3)
    replica.delivers(Finished(replica.works()[0].key, "stop"))
    assert isinstance(replica.submit("d")[0], wire.Accepted)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (LifeState.STARTING, FailureKind.OVERLOADED),
        (LifeState.DRAINING, FailureKind.DRAINING),
        (LifeState.FAILED, FailureKind.ENGINE),
    ],
)
def test_a_replica_that_is_not_ready_says_why(stage: LifeState, kind: FailureKind) -> None:
    replica = Replica()
    replica.life_state = stage
    (rejected,) = replica.submit()
    assert isinstance(rejected, wire.Rejected)
    assert (rejected.kind, replica.jobs) == (kind, [])


def test_frames_are_numbered_without_a_gap_and_carry_the_epoch_of_their_submit() -> None:
    """1. a request begins in life 7; 2. the replica is registered anew as 9; 3. the request's frames still say 7."""
    replica = Replica()
    replica.submit(attempt=4)
    (key,) = [work.key for work in replica.works()]
    replica.delivers(OutputChunk(key, "text", text="a"))
    replica.set_epoch(9)
    replica.delivers(OutputChunk(key, "image", mime="image/png", attachment=b"p"), Finished(key, "stop"))
    frames = [said for said in replica.said if said[0] == "output"]
    assert [
        (said[2].seq, said[2].epoch, said[2].attempt) for said in frames if not isinstance(said[2], wire.Welcome)
    ] == [
        (0, 7, 4),
        (1, 7, 4),
        (2, 7, 4),
    ]
    assert [bytes(part) for part in frames[1][3]] == [b"p"]
    assert frames[-1][2].queue_length == 0


def test_nothing_follows_an_end() -> None:
    replica = Replica()
    replica.submit()
    key = replica.works()[0].key
    replica.delivers(RequestFailed(key, FailureKind.ENGINE, "x"), Finished(key, "stop"), OutputChunk(key, "text"))
    assert [type(said[2]) for said in replica.said if said[0] == "output"] == [wire.StageFailed]


def test_the_same_request_twice_runs_once_but_a_later_attempt_replaces_the_earlier() -> None:
    """1. attempt 1 runs; 2. attempts 0 and 1 come again: nothing; 3. attempt 2 cancels attempt 1 and is taken."""
    replica = Replica()
    replica.submit(attempt=1)
    assert [replica.submit(attempt=attempt) for attempt in (0, 1)] == [[], []]
    assert replica.counters["replayed"] == 2
    assert isinstance(replica.submit(attempt=2)[0], wire.Accepted)
    first, second = replica.works()
    assert replica.jobs == [first, Cancel(first.key), second]


def test_two_hubs_may_use_the_same_request_id() -> None:
    replica = Replica()
    replica.submit("r", "h1")
    replica.submit("r", "h2")
    one, other = replica.works()
    replica.hears("h2", wire.Abort(epoch=7, request_id="r"))
    assert replica.jobs[-1] == Cancel(other.key)
    replica.delivers(Finished(one.key, "stop"))
    assert replica.said[-1][1] == "h1"


def test_aborts_and_releases_work_across_lives_of_the_same_process_and_for_no_other() -> None:
    replica = Replica()
    replica.submit()
    replica.set_epoch(9)
    replica.hears("h", wire.Abort(epoch=8, request_id="r"))
    assert len(replica.jobs) == 1
    replica.hears("h", wire.Abort(epoch=7, request_id="r"))
    replica.hears("h", wire.ReleasePayloads(epoch=7, request_id="r"))
    assert replica.jobs[1:] == [Cancel(replica.works()[0].key), ReleasePayload("h/r")]


def test_every_abort_is_answered_and_stops_no_later_attempt() -> None:
    """1. nothing runs: the answer says so; 2. attempt 5 runs: an abort of attempt 4 leaves it, one of attempt 5 not
    3. that one, repeated or not, is answered once the engine has let go of the request
    """
    replica = Replica()
    answers = replica.hears("h", wire.Abort(epoch=7, request_id="r", attempt=4))
    replica.submit(attempt=5)
    answers += replica.hears("h", wire.Abort(epoch=7, request_id="r", attempt=4))
    (key,) = [work.key for work in replica.works()]
    assert len(replica.jobs) == 1
    for _ in range(2):
        assert replica.hears("h", wire.Abort(epoch=7, request_id="r", attempt=5)) == []
    assert replica.jobs[1:] == [Cancel(key)]
    answers += replica.delivers(Finished(key, "abort"))
    assert [(answer.attempt, answer.running) for answer in answers if isinstance(answer, wire.Aborted)] == [
        (4, False),
        (4, False),
        (5, True),
    ]


def test_a_hub_that_is_away_for_a_moment_misses_nothing() -> None:
    replica = Replica(hub_grace_s=10.0)
    replica.submit()
    key = replica.works()[0].key
    replica.reachable = SendResult.GONE
    replica.delivers(OutputChunk(key, "text", text="a"), OutputChunk(key, "text", text="b"), now_s=100.0)
    replica.tick(105.0)
    replica.reachable = SendResult.SENT
    replica.hears_on_output("h", wire.Hello(hub_id="h", epoch=7), 106.0)
    chunks = [said[2] for said in replica.said if isinstance(said[2], wire.Chunk)]
    assert [(chunk.seq, chunk.text) for chunk in chunks] == [(0, "a"), (1, "b")]


def test_a_hub_that_stays_away_has_its_requests_stopped_also_those_that_say_nothing() -> None:
    """1. a request waits in the engine's queue and makes no output; 2. its hub is gone; 3. a probe finds that out."""
    replica = Replica(hub_grace_s=10.0)
    replica.submit()
    replica.reachable = SendResult.GONE
    replica.tick(100.0)
    replica.tick(111.0)
    assert replica.jobs[1:] == [Cancel(replica.works()[0].key), ReleasePayload("h/r"), ReleaseHub("h")]
    assert (len(replica.sessions.ledger), replica.counters["hubs_given_up"]) == (0, 1)


def words(replica: Replica, hub_id: str) -> list[wire.Chunk]:
    return [said[2] for said in replica.said if said[1] == hub_id and isinstance(said[2], wire.Chunk)]


@pytest.mark.attack("I5")
def test_requests_that_wait_for_their_clients_keep_nobody_out_and_are_bounded() -> None:
    """Capacity 2, one may wait, two may be parked:
    1. three run, two of them are parked: two more are accepted, and a third is refused
    2. a third is parked: that which was parked first ends, and not by the replica's fault
    3. one that goes on counts again, and can be parked again behind the others
    """
    replica = Replica(max_waiting=1, max_parked=2)
    for name in "abc":
        replica.submit(name)
    first, second, third = replica.works()
    replica.delivers(Parked(first.key, is_parked=True), Parked(second.key, is_parked=True))
    assert isinstance(replica.submit("d")[0], wire.Accepted)
    assert isinstance(replica.submit("e")[0], wire.Accepted)
    assert isinstance(replica.submit("f")[0], wire.Rejected)
    replica.delivers(Parked(first.key, is_parked=False), Parked(first.key, is_parked=True))
    said = replica.delivers(Parked(third.key, is_parked=True))
    (failed,) = [message for message in said if isinstance(message, wire.StageFailed)]
    assert (failed.request_id, failed.kind) == ("b", FailureKind.OVERLOADED)
    assert "reads too slowly" in failed.reason
    assert [job for job in replica.jobs if isinstance(job, Cancel)] == [Cancel(second.key)]
    assert isinstance(replica.submit("f")[0], wire.Accepted)
    replica.delivers(Parked(first.key, is_parked=False))
    assert isinstance(replica.submit("g")[0], wire.Rejected)
    replica.delivers(Finished(first.key, "stop"), Finished(third.key, "stop"))
    assert replica.sessions.ledger.parked_count == 0


@pytest.mark.attack("I1")
def test_a_hub_that_reads_too_slowly_loses_what_takes_most_of_its_queue_and_nothing_else() -> None:
    """1. a hub reads nothing; one request there fills the queue with what can't be joined, another says a word
    2. it reads: the first has failed, and not by the replica's fault; the other is whole, and no session has ended
    """
    replica = Replica()
    replica.submit("much", "h1")
    replica.submit("little", "h1")
    replica.submit("fine", "h2")
    much, little, fine = replica.works()
    replica.reachable = SendResult.FULL
    replica.delivers(OutputChunk(little.key, "text", text="word"))
    png = [OutputChunk(much.key, "image", mime="image/png", attachment=b"x" * 2000) for _ in range(20)]
    replica.delivers(*png)
    replica.reachable = SendResult.SENT
    replica.tick(1.0)
    replica.delivers(Finished(little.key, "stop"), Finished(fine.key, "stop"))
    assert [job for job in replica.jobs if isinstance(job, Cancel)] == [Cancel(much.key)]
    (failed,) = [said[2] for said in replica.said if isinstance(said[2], wire.StageFailed)]
    assert (failed.request_id, failed.kind) == ("much", FailureKind.OVERLOADED)
    assert {said[2].request_id for said in replica.said if isinstance(said[2], wire.StageDone)} == {"little", "fine"}
    assert [(chunk.request_id, chunk.text) for chunk in words(replica, "h1")] == [("little", "word")]
    assert (replica.counters["hubs_given_up"], replica.counters["unread_requests"]) == (0, 1)


@pytest.mark.attack("I1")
def test_the_requests_of_a_hub_that_is_behind_are_held_back_and_go_on_when_it_has_read() -> None:
    """1. half of what may wait for a hub waits: its requests are held back, one that comes then too, no other hub's
    2. it reads: all of them go on; 3. no word is missing, in order, without a gap
    """
    replica = Replica()
    replica.submit("a", "h1")
    replica.submit("b", "h2")
    first, _ = replica.works()
    replica.reachable = SendResult.FULL
    replica.delivers(*(OutputChunk(first.key, "image", mime="image/png", attachment=b"x") for _ in range(5)))
    assert [job for job in replica.jobs if isinstance(job, HoldBack)] == [HoldBack(first.key, held=True)]
    replica.submit("late", "h1")
    late = replica.works()[-1]
    assert replica.jobs[-1] == HoldBack(late.key, held=True)
    replica.reachable = SendResult.SENT
    before = len(replica.jobs)
    replica.tick(1.0)
    assert replica.jobs[before:] == [HoldBack(first.key, held=False), HoldBack(late.key, held=False)]
    assert [chunk.seq for chunk in words(replica, "h1")] == list(range(5))
    assert replica.counters["hubs_held_back"] == 1


@pytest.mark.attack("I1")
def test_what_is_said_while_a_hub_reads_nothing_is_joined_and_its_end_comes_behind_it() -> None:
    """1. a hub has not read what was sent: 500 more words of a request wait as one message; 2. it reads; 3. it ends"""
    replica = Replica()
    replica.submit("a", "h1")
    (work,) = replica.works()
    replica.reachable = SendResult.FULL
    for number in range(500):
        replica.delivers(OutputChunk(work.key, "text", text=f"w{number} ", token_ids=(number,)))
    replica.reachable = SendResult.SENT
    replica.tick(1.0)
    replica.delivers(OutputChunk(work.key, "text", text="more ", token_ids=(500,)), Finished(work.key, "stop"))
    came = words(replica, "h1")
    assert [chunk.seq for chunk in came] == [0, 1, 2]
    assert "".join(chunk.text for chunk in came) == "".join(f"w{number} " for number in range(500)) + "more "
    assert [token for chunk in came for token in chunk.token_ids] == list(range(501))
    (done,) = [said[2] for said in replica.said if isinstance(said[2], wire.StageDone)]
    assert done.seq == 3
    assert replica.counters["hubs_held_back"] == 0


def test_a_request_that_ends_while_its_hub_reads_nothing_has_said_everything_before() -> None:
    replica = Replica()
    replica.submit("a", "h1")
    (work,) = replica.works()
    replica.reachable = SendResult.FULL
    replica.delivers(*(OutputChunk(work.key, "text", text=f"w{number} ") for number in range(3)))
    replica.delivers(*(OutputChunk(work.key, "text", text=f"w{number} ") for number in range(3, 6)))
    replica.delivers(Finished(work.key, "stop"))
    replica.reachable = SendResult.SENT
    replica.tick(1.0)
    assert "".join(chunk.text for chunk in words(replica, "h1")) == "w0 w1 w2 w3 w4 w5 "
    assert isinstance(replica.said[-1][2], wire.StageDone)


def test_a_hub_that_reads_nothing_for_long_is_given_up() -> None:
    replica = Replica()
    replica.submit("a", "h1")
    (work,) = replica.works()
    replica.reachable = SendResult.FULL
    replica.delivers(OutputChunk(work.key, "text", text="word"), now_s=100.0)
    replica.tick(109.0)
    assert replica.counters["hubs_given_up"] == 0
    replica.tick(111.0)
    assert (len(replica.sessions.ledger), replica.counters["hubs_given_up"]) == (0, 1)
    assert Cancel(work.key) in replica.jobs


def test_a_reason_of_megabytes_is_told_by_its_beginning_and_its_end() -> None:
    replica = Replica()
    replica.submit("a")
    replica.submit("b")
    failed, done = replica.works()
    replica.delivers(RequestFailed(failed.key, FailureKind.ENGINE, "begin" + "x" * 5_000_000 + "end"))
    replica.delivers(Finished(done.key, "r" * 1000))
    failure, end = (said[2] for said in replica.said[-2:])
    assert isinstance(failure, wire.StageFailed)
    assert isinstance(end, wire.StageDone)
    assert (failure.reason[:5], failure.reason[-3:], len(failure.reason)) == ("begin", "end", wire.MAX_REASON)
    assert len(end.finish_reason) == 256


def test_an_output_that_can_not_be_written_fails_its_request_and_no_other() -> None:
    replica = Replica()
    replica.submit()
    key = replica.works()[0].key
    replica.delivers(OutputChunk(key, "text", token_ids=(2**70,)))
    assert isinstance(replica.said[-1][2], wire.StageFailed)
    assert replica.jobs[-2:] == [Cancel(key), ReleasePayload("h/r")]


def test_a_hub_speaks_only_in_its_own_name_and_each_socket_has_its_words() -> None:
    replica = Replica()
    with pytest.raises(WireError, match="says that it is"):
        replica.hears("h", wire.Hello(hub_id="other", epoch=7))
    with pytest.raises(WireError, match="on the output socket"):
        replica.hears_on_output("h", wire.Abort(epoch=7, request_id="r"), 0.0)


def test_only_a_hub_that_heard_nothing_for_a_while_is_probed() -> None:
    """1. for five seconds "busy" gets output each 100 ms, "idle" gets nothing
    2. "idle" hears from the replica at least once a second, "busy" never unasked
    3. "busy" hears nothing more: it is probed, too
    """
    replica = Replica()
    for hub_id in ("busy", "idle"):
        replica.hears_on_output(hub_id, wire.Hello(hub_id=hub_id, epoch=7), 0.0)
    replica.submit("r", "busy")
    (work,) = replica.works()
    del replica.said[:]
    heard_at_s = [0.0]
    for tenth in range(1, 51):
        before = len(replica.said)
        replica.delivers(OutputChunk(work.key, "text", text="a"), now_s=tenth / 10)
        replica.tick(tenth / 10)
        heard_at_s += [tenth / 10 for said in replica.said[before:] if said[1] == "idle"]
    pauses_s = [later - earlier for earlier, later in pairwise(heard_at_s)]
    assert max(pauses_s) <= 1.0
    assert len(pauses_s) <= 7
    assert {type(said[2]) for said in replica.said if said[1] == "busy"} == {wire.Chunk}
    for tenth in range(51, 62):
        replica.tick(tenth / 10)
    assert replica.said[-1][1:3] in [
        (hub_id, wire.Welcome(epoch=7, capacity=2, queue_length=1)) for hub_id in ("busy", "idle")
    ]
    assert [type(said[2]) for said in replica.said if said[1] == "busy"][-1] is wire.Welcome


def test_a_failed_request_leaves_a_line_and_a_cancelled_one_only_at_its_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. an engine fails one request; 2. a hub cancels a second one early, and a third one at its deadline
    3. a fourth one was wrong: that is no warning
    """
    caplog.set_level("INFO")
    replica = Replica()
    replica.sessions.replica_name = "0/3"
    for request_id in ("a", "b"):
        replica.submit(request_id, remaining_s=10.0)
    first, second = (work.key for work in replica.works())
    replica.delivers(RequestFailed(first, FailureKind.PAYLOAD, "the hand-off\nis gone"))
    replica.hears("h", wire.Abort(epoch=7, request_id="b", attempt=0), now_s=5.0)
    replica.delivers(Finished(second, "abort"))
    replica.submit("c", remaining_s=10.0)
    replica.hears("h", wire.Abort(epoch=7, request_id="c", attempt=0), now_s=9.95)
    replica.delivers(Finished(replica.works()[-1].key, "abort"))
    replica.submit("d", attempt=1)
    replica.delivers(RequestFailed(replica.works()[-1].key, FailureKind.INVALID, "no such voice"))
    where, late = "stage=0 replica=0/3 epoch=7", "the hub stopped the request at its deadline"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"request.failed request=a {where} attempt=0 kind=payload cause=the hand-off is gone"),
        ("WARNING", f"request.failed request=c {where} attempt=0 kind=deadline cause={late}"),
        ("INFO", f"request.failed request=d {where} attempt=1 kind=invalid cause=no such voice"),
    ]


def test_a_storm_of_failures_in_a_replica_is_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    replica = Replica(max_waiting=100)
    replica.sessions.replica_name = "0/3"
    for number in range(50):
        replica.submit(f"r{number}")
        replica.delivers(RequestFailed(replica.works()[-1].key, FailureKind.ENGINE, "it broke"))
    assert len(caplog.messages) == 20
    replica.sessions.failures.close()
    assert caplog.messages[20].startswith("requests.failed count=30 kinds={engine:30} stages={0:30} in_s=")


def test_a_piece_that_is_announced_again_counts_once() -> None:
    """As all are that the next stage has not taken when a session was lost: the hub would miss pieces at the end."""
    replica = Replica()
    replica.submit(next_stages=(1,), stream_to=(1,))
    (work,) = replica.works()
    replica.delivers(*(HandedPiece(work.key, number, ()) for number in (0, 1, 0, 1, 2)))
    *_, done = replica.delivers(Finished(work.key, "stop"))
    assert isinstance(done, wire.StageDone)
    assert done.pieces == 3


@pytest.mark.attack("P32")
def test_a_hub_that_announces_more_pieces_than_can_wait_loses_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica()
    monkeypatch.setattr(replica.sessions, "_pieces", WaitingPieces(10_000))
    replica.submit(stream_from=(0,))
    (work,) = replica.works()
    ref = wire.PayloadRef(
        from_stage=0, to_stage=1, key="k", connector="c", size_bytes=0, metadata={"junk": b"x" * 6_000}
    )
    feed = wire.Feed(epoch=7, request_id="r", attempt=0, from_stage=0, number=0, payload=ref)
    replica.hears("h", feed)
    replica.delivers(TookPiece(work.key, 0, 0))
    replica.hears("h", msgspec.structs.replace(feed, number=1))
    assert len(replica.sessions.ledger) == 1
    replica.hears("h", msgspec.structs.replace(feed, number=2))
    failed = replica.said[-1][2]
    assert isinstance(failed, wire.StageFailed)
    assert failed.kind is FailureKind.OVERLOADED
    assert replica.jobs[-2:] == [Cancel(work.key), ReleasePayload(work.owner)]
    assert len(replica.sessions.ledger) == 0
    replica.submit("again", stream_from=(0,))
    replica.hears("h", msgspec.structs.replace(feed, request_id="again"))
    assert len(replica.sessions.ledger) == 1


def contested(replica: Replica, hub_id: str = "h", **fields: Any) -> None:
    """Hub ``h`` has both slots with requests of that kind, and hub ``g`` waits for one."""
    for each in ("h", "g"):
        hello = wire.Hello(hub_id=each, epoch=7, session=1)
        replica.hears(each, hello)
        replica.hears_on_output(each, hello, 0.0)
    for request_id in ("r0", "r1"):
        replica.submit(request_id, credit=True, **fields)
    replica.hears("g", wire.WantCredits(epoch=7, session=1, waiting=1))


def pass_time(replica: Replica, from_s: float, to_s: float) -> None:
    for step in range(int((to_s - from_s) * 4)):
        replica.tick(from_s + step / 4)


def failures(replica: Replica) -> list[str]:
    return [said[2].request_id for said in replica.said if isinstance(said[2], wire.StageFailed)]


@pytest.mark.attack("P30")
@pytest.mark.parametrize("kind", ["segments", "pieces", "paused"])
def test_a_hub_does_not_keep_more_than_its_share_of_the_slots_unused_while_another_waits(kind: str) -> None:
    """1. h has both slots, and sends no more input for its requests, or never lets them go on; 2. g waits;
    3. one of h's requests ends, and its slot goes to g; the other one stays: h has its share.
    """
    replica = Replica(keep_slot_s=10.0)
    contested(replica, segmented=kind == "segments", stream_from=(0,) if kind == "pieces" else ())
    for work in replica.works():
        if kind == "segments":
            replica.delivers(SegmentEnded(work.key, "stop"))
        if kind == "paused":
            replica.hears("h", wire.Pause(epoch=7, request_id=work.request_id, attempt=0, paused=True))
    pass_time(replica, 1.0, 9.0)
    assert failures(replica) == []
    pass_time(replica, 9.0, 60.0)
    assert failures(replica) == ["r0"]
    grants = [said[1] for said in replica.said if isinstance(said[2], wire.Grant)]
    assert grants[-1] == "g"
    assert len(replica.sessions.ledger) == 1


@pytest.mark.parametrize("what", ["works", "nobody waits", "its share", "parked"])
def test_requests_are_left_alone_that_use_their_slots_or_keep_nobody_waiting(what: str) -> None:
    replica = Replica(keep_slot_s=10.0)
    contested(replica, segmented=what != "works")
    works = replica.works()
    if what == "nobody waits":
        replica.hears("g", wire.WantCredits(epoch=7, session=1, waiting=0))
    if what == "its share":
        replica.delivers(Finished(works[1].key, "stop"))
        replica.submit("g0", hub_id="g", credit=True)
    if what != "works":
        replica.delivers(*(SegmentEnded(work.key, "stop") for work in works))
    if what == "parked":
        replica.delivers(*(Parked(work.key, True) for work in works))
    pass_time(replica, 1.0, 60.0)
    assert failures(replica) == []


@pytest.mark.attack("P30")
def test_a_request_without_a_credit_is_refused_beyond_the_hubs_share_while_another_waits() -> None:
    replica = Replica()
    contested(replica)
    (refused,) = replica.submit("r2")
    assert isinstance(refused, wire.Rejected)
    assert refused.kind is FailureKind.OVERLOADED
    (taken,) = replica.submit("g0", hub_id="g")
    assert isinstance(taken, wire.Accepted)


def test_a_hub_alone_may_queue_requests_without_credits() -> None:
    replica = Replica()
    assert all(isinstance(replica.submit(f"r{n}")[0], wire.Accepted) for n in range(20))


def greet(replica: Replica, hub_id: str, session: int = 1, now_s: float = 0.0) -> None:
    hello = wire.Hello(hub_id=hub_id.partition("/")[0], epoch=7, session=session)
    replica.hears(hub_id, hello, now_s)
    replica.hears_on_output(hub_id, hello, now_s)


def piece_of(request_id: str, number: int, size_bytes: int = 0) -> wire.Feed:
    ref = wire.PayloadRef(
        from_stage=0, to_stage=1, key="k", connector="c", size_bytes=0, metadata={"inline": b"x" * size_bytes}
    )
    return wire.Feed(epoch=7, request_id=request_id, attempt=0, from_stage=0, number=number, payload=ref)


@pytest.mark.parametrize("every_s", [1, 8])
def test_a_request_is_at_work_whose_engine_takes_each_piece_as_it_comes(every_s: int) -> None:
    """The engine says at once that it has a piece, and works on it until the next comes: no piece waits."""
    replica = Replica(keep_slot_s=10.0)
    contested(replica, stream_from=(0,))
    for number in range(200 // every_s):
        now_s = 1.0 + number * every_s
        for work in replica.works():
            replica.hears("h", piece_of(work.request_id, number), now_s)
            replica.delivers(TookPiece(work.key, 0, number), now_s=now_s)
        pass_time(replica, now_s, now_s + every_s)
    assert failures(replica) == []


@pytest.mark.parametrize("is_paused", [False, True])
def test_an_output_shows_that_its_request_was_at_work_before(is_paused: bool) -> None:
    """The engine says something every 12 s, on pieces that it took together, or though its hub asked it to pause."""
    replica = Replica(keep_slot_s=10.0)
    contested(replica, stream_from=() if is_paused else (0,))
    for work in replica.works():
        if is_paused:
            replica.hears("h", wire.Pause(epoch=7, request_id=work.request_id, attempt=0, paused=True))
    for turn in range(20):
        replica.delivers(*(OutputChunk(work.key, "text", text="a") for work in replica.works()), now_s=turn * 12.0)
        pass_time(replica, turn * 12.0, turn * 12.0 + 12.0)
    assert failures(replica) == []


@pytest.mark.attack("P30")
def test_a_piece_now_and_then_does_not_keep_a_slot() -> None:
    replica = Replica(keep_slot_s=10.0)
    contested(replica, stream_from=(0,))
    for number in range(10):
        now_s = 1.0 + number * 13
        for work in replica.works():
            replica.hears("h", piece_of(work.request_id, number), now_s)
            replica.delivers(TookPiece(work.key, 0, number), now_s=now_s)
        pass_time(replica, now_s, now_s + 13)
    assert failures(replica) == ["r0"]


@pytest.mark.attack("P30")
@pytest.mark.parametrize("kind", ["unknown stage", "ended stage"])
def test_pieces_that_no_engine_will_take_keep_no_slot(kind: str) -> None:
    """1. a request awaits pieces of two stages, of which none comes; 2. others come for it, or one stage's end."""
    replica = Replica(keep_slot_s=10.0)
    contested(replica, stream_from=(0, 3))
    for work in replica.works():
        if kind == "ended stage":
            replica.hears("h", msgspec.structs.replace(piece_of(work.request_id, 0), is_last=True))
        else:
            replica.hears("h", msgspec.structs.replace(piece_of(work.request_id, 0), from_stage=9))
    pass_time(replica, 1.0, 30.0)
    assert failures(replica) == ["r0"]


@pytest.mark.attack("P30")
def test_output_behind_a_pause_does_not_pay_for_it() -> None:
    """Its hub lets a request go on for a moment now and then, and the engine says something each time."""
    replica = Replica(keep_slot_s=20.0)
    contested(replica)
    for turn in range(6):
        now_s = turn * 20.0
        for paused in (False, True):
            for work in replica.works():
                order = wire.Pause(epoch=7, request_id=work.request_id, attempt=0, paused=paused)
                replica.hears("h", order, now_s)
                if not paused:
                    replica.delivers(OutputChunk(work.key, "text", text="a"), now_s=now_s)
        pass_time(replica, now_s, now_s + 20.0)
    assert failures(replica) == ["r0"]


def test_a_session_that_speaks_more_than_it_is_silent_keeps_its_slot() -> None:
    """Segments of 20 s each, with 20 s of silence between them: 15 s idle, and then 20 s that pay for them."""
    replica = Replica(keep_slot_s=20.0)
    contested(replica, segmented=True)
    for turn in range(8):
        now_s = turn * 40.0
        for work in replica.works():
            if turn:
                update = wire.Update(epoch=7, request_id=work.request_id, attempt=0, segment=turn)
                replica.hears("h", update, now_s)
        pass_time(replica, now_s, now_s + 20.0)
        replica.delivers(*(SegmentEnded(work.key, "stop") for work in replica.works()), now_s=now_s + 20.0)
        pass_time(replica, now_s + 20.0, now_s + 40.0)
    assert failures(replica) == []


@pytest.mark.attack("P30")
def test_a_hub_with_a_single_slot_keeps_it_unused_for_longer_but_not_for_ever() -> None:
    """1. h and k have one slot each, and h does not use its own; 2. g waits: h has no more than one; 3. g gets it."""
    replica = Replica(keep_slot_s=10.0)
    for hub_id in ("h", "k", "g"):
        greet(replica, hub_id)
    replica.submit("r0", credit=True, segmented=True)
    replica.delivers(SegmentEnded(replica.works()[0].key, "stop"))
    replica.submit("r1", hub_id="k")
    replica.hears("g", wire.WantCredits(epoch=7, session=1, waiting=1))
    pass_time(replica, 1.0, 30.0)
    assert failures(replica) == []
    pass_time(replica, 30.0, 60.0)
    assert failures(replica) == ["r0"]
    assert [said[1] for said in replica.said if isinstance(said[2], wire.Grant)][-1] == "g"


@pytest.mark.attack("P30")
def test_of_a_hubs_queue_those_end_that_wait_and_not_those_that_run() -> None:
    replica = Replica(keep_slot_s=10.0)
    for number in range(5):
        replica.submit(f"r{number}")
    for hub_id in ("h", "g"):
        greet(replica, hub_id)
    replica.hears("g", wire.WantCredits(epoch=7, session=1, waiting=1))
    pass_time(replica, 1.0, 60.0)
    assert failures(replica) == ["r2", "r3", "r4"]


def test_what_a_hub_sent_with_credits_that_were_forfeited_meanwhile_is_taken() -> None:
    """1. h has a credit; 2. it stalls, and does not hear the recall; 3. its request comes when g has the slot.

    What it was not lent is refused, and so is what comes long after.
    """
    replica = Replica()
    greet(replica, "h")
    replica.submit("r0", credit=True)
    greet(replica, "g")
    replica.hears("g", wire.WantCredits(epoch=7, session=1, waiting=3), 1.0)
    pass_time(replica, 1.0, 2.0)
    (taken, *_) = replica.hears("h", wire.Submit(epoch=7, request_id="r1", credit=True), 2.0)
    assert isinstance(taken, wire.Accepted)
    (refused, *_) = replica.hears("h", wire.Submit(epoch=7, request_id="r2", credit=True), 2.0)
    assert isinstance(refused, wire.Rejected)


@pytest.mark.parametrize("late_s", [9.0, 11.0])
def test_a_request_that_a_lost_session_brought_too_late_is_taken_for_a_while(late_s: float) -> None:
    replica = Replica()
    greet(replica, "h")
    replica.submit("r0", credit=True)
    greet(replica, "g")
    replica.hears("g", wire.WantCredits(epoch=7, session=1, waiting=2))
    greet(replica, "h", session=2)
    (answer, *_) = replica.hears("h", wire.Submit(epoch=7, request_id="r1", credit=True), late_s)
    assert isinstance(answer, wire.Accepted if late_s < 10 else wire.Rejected)


def test_pieces_that_are_announced_again_reach_the_engine_without_their_content() -> None:
    replica = Replica()
    replica.submit(stream_from=(0,))
    for _ in range(2):
        replica.hears("h", piece_of("r", 0, 100))
    first, again = (job for job in replica.jobs if isinstance(job, PieceArrived))
    assert first.payload is not None
    assert (again.number, again.payload) == (0, None)


@pytest.mark.attack("P32")
def test_where_a_hub_announces_too_much_the_request_ends_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica()
    monkeypatch.setattr(replica.sessions, "_pieces", WaitingPieces(10_000))
    for request_id, size_bytes in (("large", 7_000), ("small", 1_000)):
        replica.submit(request_id, stream_from=(0,))
        replica.hears("h", piece_of(request_id, 0, size_bytes))
    replica.hears("h", piece_of("small", 1, 3_000))
    assert failures(replica) == ["large"]
    arrived = [(job.key.split("/")[1], job.number) for job in replica.jobs if isinstance(job, PieceArrived)]
    assert arrived == [("large", 0), ("small", 0), ("small", 1)]


def test_a_frame_that_is_wrong_counts_as_what_is_wrong_with_it() -> None:
    replica = Replica()
    replica.hears("h", wire.Hello(hub_id="h", epoch=9))
    replica.sessions.revoke_hubs(frozenset({"gone"}))
    replica.hears("gone/1", wire.Hello(hub_id="gone", epoch=7))
    assert (replica.counters["wrong_epoch"], replica.counters["revoked"]) == (1, 1)


def large(request_id: str, epoch: int = 7, *, is_whole: bool = True) -> bytes:
    """The head of a Submit with 200 000 empty maps."""
    head = wire.encode(wire.Submit(epoch=epoch, request_id=request_id, inputs={"x": 0}))
    place = head.index(b"\xa1x\x00") + 2
    maps = b"\xdd" + (200_000).to_bytes(4, "big") + b"\x80" * 200_000
    return head[:place] + (maps if is_whole else b"\xc1" + maps) + head[place + 1 :]


@pytest.mark.attack("Q22")
def test_a_large_message_for_another_life_is_dropped_before_it_is_decoded() -> None:
    """The bytes are no valid message: for the present life they are refused, for another they are not looked at."""
    replica = Replica()
    peer = Peer("h", "h")
    with pytest.raises(WireError):
        replica.sessions.on_input(peer, large("r", is_whole=False), 0.0)
    for _ in range(3):
        replica.sessions.on_input(peer, large("r", epoch=6, is_whole=False), 0.0)
    assert replica.counters["wrong_epoch"] == 3


@pytest.mark.attack("Q23")
def test_the_inputs_of_a_hubs_requests_take_a_bounded_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. two requests of 14 MB each, where a hub may have 20 MiB: the second is refused, as overloaded
    2. a small one of that hub, and a large one of another hub, are accepted
    3. the first ends: there is room again
    4. what comes in one frame with a hundred releases of hand-offs takes no less
    """
    monkeypatch.setattr("stage_runtime.server.ledger.MOST_BYTES_OF_HUB", 20 << 20)
    replica = Replica()

    releases = [wire.encode(wire.ReleasePayloads(epoch=7, request_id=f"old{number}")) for number in range(100)]

    def submit(request_id: str, hub_id: str = "h", before_it: Sequence[bytes] = ()) -> list[wire.FromReplica]:
        before = len(replica.said)
        replica.sessions.on_input(Peer(hub_id, hub_id), wire.join([*before_it, large(request_id)]), 0.0)
        replica.sessions.flush_messages(0.0)
        return [said[2] for said in replica.said[before:]]

    assert isinstance(submit("a")[0], wire.Accepted)
    (rejected,) = submit("b")
    assert isinstance(rejected, wire.Rejected)
    assert (rejected.kind, "512 MiB" in rejected.reason) == (FailureKind.OVERLOADED, True)
    assert isinstance(replica.submit("small")[0], wire.Accepted)
    assert isinstance(submit("c", "other")[0], wire.Accepted)
    for work in replica.works():
        replica.delivers(Finished(work.key, "stop"))
    assert isinstance(submit("d", before_it=releases)[0], wire.Accepted)
    assert isinstance(submit("e", before_it=releases)[0], wire.Rejected)


@pytest.mark.attack("Q23")
def test_a_segment_takes_of_its_hubs_memory_as_a_request_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_runtime.server.ledger.MOST_BYTES_OF_HUB", 30_000)
    replica = Replica()
    for name in "ab":
        replica.submit(name, segmented=True)
    for work in replica.works():
        replica.delivers(SegmentEnded(work.key, "stop"))
    first = wire.Update(epoch=7, request_id="a", attempt=0, segment=1, inputs={"text": "x" * 20_000})
    assert isinstance(replica.hears("h", first)[0], wire.Accepted)
    update = msgspec.structs.replace(first, request_id="b")
    (rejected,) = replica.hears("h", update)
    assert isinstance(rejected, wire.Rejected)
    assert rejected.kind is FailureKind.OVERLOADED
    assert isinstance(replica.hears("h", msgspec.structs.replace(update, inputs={"text": "x"}))[0], wire.Accepted)


def accounts(replica: Replica) -> set[str]:
    """The connections that credits may be lent to."""
    return set(replica.sessions.handshake.credits._accounts)


@pytest.mark.attack("Q24")
def test_connections_of_one_hub_that_come_and_go_cost_no_other_hub_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """1. 300 honest hubs have greeted, then one hub connects 5000 times, and each connection goes
    2. the honest ones are all known, with an account each; of the hostile one there are 16
    3. it is revoked: none of its accounts is left; 4. the log has few lines of all that
    """
    replica = Replica()
    for number in range(300):
        greet(replica, f"good{number}/{number:016x}")
    for number in range(5000):
        name = f"evil/{number:016x}"
        greet(replica, name, now_s=number / 100)
        if number >= 100:
            replica.gone.add(f"evil/{number - 100:016x}")
        if number % 100 == 99:
            replica.tick(number / 100)
    known = {peer.name for peer in replica.sessions.handshake.greeted_peers()}
    good = {f"good{number}/{number:016x}" for number in range(300)}
    assert good < known
    assert known == accounts(replica) == good | {f"evil/{number:016x}" for number in range(4984, 5000)}
    replica.sessions.revoke_hubs(frozenset({"evil"}))
    assert accounts(replica) == good
    assert sum("server.hub_given_up" in line for line in caplog.messages) <= 4


@pytest.mark.attack("Q24")
def test_a_revoked_hub_has_no_account_and_no_connection_left_whichever_socket_it_greeted_on() -> None:
    replica = Replica()
    for number in range(40):
        replica.hears(f"evil/{number:016x}", wire.Hello(epoch=7, hub_id="evil", session=1))
        if number % 2:
            greet(replica, f"evil/{number:016x}")
    assert len(replica.sessions.handshake.connections_of({"evil"})) <= 32
    replica.sessions.revoke_hubs(frozenset({"evil"}))
    assert accounts(replica) == set()
    assert replica.sessions.handshake.greeted_peers() == []
