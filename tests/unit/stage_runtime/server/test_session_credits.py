"""Credits, aborts, replays and revocations as the hubs see them: frames in, frames out."""

from __future__ import annotations

from random import Random

import pytest

from omni_discovery import wire
from omni_discovery.wire import FailureKind
from stage_runtime.engine_loop.jobs import (
    Cancel,
    Finished,
    OutputChunk,
    Parked,
    ReleaseHub,
    ReleasePayload,
    RequestFailed,
)
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.outbox import SendResult
from tests.unit.stage_runtime.server.test_sessions import Replica


def hello(session: int = 1, hub_id: str = "h") -> wire.Hello:
    return wire.Hello(hub_id=hub_id, epoch=7, session=session)


def grant(count: int, queue_length: int = 0, session: int = 1) -> wire.Grant:
    return wire.Grant(epoch=7, session=session, credits=count, queue_length=queue_length)


def credits_of(said: list[wire.FromReplica]) -> list[wire.FromReplica]:
    return [message for message in said if isinstance(message, wire.Grant | wire.Recall)]


def test_a_session_brings_credits_and_an_end_brings_one_back_with_it() -> None:
    """1. the hub greets with session 1: two credits; 2. it spends one; 3. the request ends: a new one, same frame."""
    replica = Replica()
    welcome, granted = replica.hears_on_output("h", hello())
    assert welcome == wire.Welcome(epoch=7, capacity=2, queue_length=0, session=1)
    assert granted == grant(2)
    replica.submit(credit=True)
    before = replica.multiparts
    replica.delivers(Finished(replica.works()[0].key, "stop"))
    assert [type(said[2]) for said in replica.said[-2:]] == [wire.StageDone, wire.Grant]
    assert replica.said[-1][2] == grant(1)
    assert replica.multiparts == before + 1


def test_a_request_that_is_put_aside_gives_its_slot_back_until_it_goes_on() -> None:
    """1. a hub has spent both of its credits, and one of its requests is put aside: it gets a credit more
    2. it spends that, and the first goes on: three run, no credit is left
    3. one that rests ends, and then one that runs: only the latter's slot is free; 4. as the last does: the second
    """
    replica = Replica()
    replica.hears_on_output("h", hello())
    replica.submit("a", credit=True)
    replica.submit("b", credit=True)
    keys = [work.key for work in replica.works()]
    replica.delivers(Parked(keys[0], True))
    assert replica.said[-1][2] == grant(1, queue_length=2)
    replica.submit("c", credit=True)
    replica.delivers(Parked(keys[0], False))
    assert replica.sessions._credits.free == -1
    replica.delivers(Parked(keys[0], True))
    assert replica.sessions._credits.free == 0
    replica.delivers(Finished(keys[0], "stop"))
    assert replica.sessions._credits.free == 0
    replica.delivers(Finished(keys[1], "stop"))
    assert replica.said[-1][2] == grant(1, queue_length=1)
    replica.delivers(Finished(replica.works()[-1].key, "stop"))
    assert replica.said[-1][2] == grant(1)
    assert replica.sessions._credits.unspent == 2


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_counted_right_whatever_becomes_of_requests_that_rest(seed: int) -> None:
    """1. requests of three hubs rest, go on, end, fail and are aborted, in any order, while hubs vanish, come back and
    begin other sessions, and the replica drains and stops draining: what does not rest takes a slot, and nothing else
    2. all of that is over: a new hub gets every slot
    """
    random, replica, now_s = Random(seed), Replica(hub_grace_s=5.0, max_waiting=6), 0.0
    book, tickets = replica.sessions.handshake.credits, replica.sessions.ledger.tickets
    #: What the engine has, and whether it has put it aside.
    aside: dict[str, bool] = {}
    taken = 0
    for number in range(200):
        now_s += random.choice((0.0, 0.05, 0.3, 1.0))
        hub, key = random.choice(("a/1", "a/2", "b")), random.choice([*aside, ""])
        match random.choice(("hello", "submit", "submit", "rest", "rest", "end", "abort", "leave", "drain", "tick")):
            case "hello":
                session = random.randint(1, 3)
                replica.hears_on_output(hub, wire.Hello(hub_id=hub[0], epoch=7, session=session), now_s)
            case "submit":
                replica.submit(f"r{number}", hub, credit=random.random() < 0.8)
            case "rest" if key:
                aside[key] = not aside[key]
                replica.delivers(Parked(key, aside[key]), now_s=now_s)
            case "end" if key:
                # Told in one breath, and of a request that nobody waits for any more.
                rests = [] if aside.pop(key) else [Parked(key, True)]
                replica.delivers(*rests, random.choice((Finished(key, "stop"), broken(key))), now_s=now_s)
            case "abort":
                replica.hears(hub, wire.Abort(epoch=7, request_id=f"r{random.randrange(number + 1)}"), now_s)
            case "leave":
                replica.gone ^= {hub}
            case "drain":
                replica.life_state = random.choice((LifeState.READY, LifeState.READY, LifeState.DRAINING))
            case _:
                pass
        replica.tick(now_s)
        works = replica.works()
        aside |= {work.key: False for work in works[taken:]}
        taken = len(works)
        running = sum(not ticket.is_parked for ticket in tickets.values())
        assert book.free == (2 if replica.life_state is LifeState.READY else 0) - running - book.unspent
        assert book.unspent >= 0
    replica.gone = {"a/1", "a/2", "b"}
    replica.life_state = LifeState.READY
    replica.delivers(*(broken(key) for key in aside), now_s=now_s)
    for later_s in (10.0, 20.0, 30.0):
        replica.tick(now_s + later_s)
    assert (len(tickets), book.free, book.unspent) == (0, 2, 0)
    assert credits_of(replica.hears_on_output("z", hello(9, "z"), now_s + 30.0)) == [grant(2, session=9)]


def broken(key: str) -> RequestFailed:
    return RequestFailed(key, FailureKind.ENGINE, "x")


def test_a_hub_that_names_no_session_gets_no_credits() -> None:
    replica = Replica()
    assert [type(message) for message in replica.hears_on_output("h", hello(0))] == [wire.Welcome]


def test_the_same_hello_again_brings_nothing_more_and_another_session_everything_anew() -> None:
    replica = Replica()
    replica.hears_on_output("h", hello())
    assert credits_of(replica.hears_on_output("h", hello())) == []
    assert credits_of(replica.hears_on_output("h", hello(2))) == [grant(2, session=2)]


def test_nothing_is_granted_before_the_replica_is_ready_nor_while_it_drains() -> None:
    """1. loading: no credits; 2. ready: two; 3. draining: both are asked back, and a freed slot goes to nobody."""
    replica = Replica()
    replica.life_state = LifeState.STARTING
    assert credits_of(replica.hears_on_output("h", hello())) == []
    replica.life_state = LifeState.READY
    replica.tick(0.0)
    assert replica.said[-1][2] == grant(2)
    replica.submit(credit=True)
    replica.life_state = LifeState.DRAINING
    replica.tick(0.0)
    assert replica.said[-1][2] == wire.Recall(epoch=7, session=1, credits=1, queue_length=1)
    replica.delivers(Finished(replica.works()[0].key, "stop"))
    assert isinstance(replica.said[-1][2], wire.StageDone)


def test_a_hub_that_waits_gets_what_another_leaves_unspent() -> None:
    """1. a holds both credits, b waits; 2. a is asked and gives one back; 3. b has it."""
    replica = Replica()
    replica.hears_on_output("a", hello(hub_id="a"))
    replica.hears_on_output("b", hello(hub_id="b"))
    said = replica.hears("b", wire.WantCredits(epoch=7, session=1, waiting=1, oldest_wait_s=0.2))
    assert said == [wire.Recall(epoch=7, session=1, credits=1, queue_length=0)]
    assert replica.said[-1][1] == "a"
    assert replica.hears("a", wire.ReturnCredits(epoch=7, session=1, credits=1)) == [grant(1)]
    assert replica.said[-1][1] == "b"


def test_a_recall_that_is_not_answered_is_not_waited_for() -> None:
    replica = Replica()
    replica.hears_on_output("a", hello(hub_id="a"))
    replica.hears_on_output("b", hello(hub_id="b"))
    replica.hears("b", wire.WantCredits(epoch=7, session=1, waiting=1), now_s=10.0)
    replica.tick(10.6)
    assert [(said[1], said[2]) for said in replica.said if isinstance(said[2], wire.Grant)][-1] == ("b", grant(1))


def test_words_of_an_earlier_session_change_nothing_and_are_counted() -> None:
    replica = Replica()
    replica.hears_on_output("h", hello(2))
    assert replica.hears("h", wire.WantCredits(epoch=7, session=1, waiting=5)) == []
    assert replica.hears("h", wire.ReturnCredits(epoch=7, session=1, credits=2)) == []
    assert replica.counters["old_session"] == 2


def test_a_refused_request_gives_its_credit_back() -> None:
    replica = Replica(max_waiting=0)
    replica.hears_on_output("h", hello())
    for name in "ab":
        replica.submit(name, "other")
    said = replica.submit("c", credit=True)
    assert any(isinstance(message, wire.Rejected) for message in said)
    replica.delivers(*(Finished(work.key, "stop") for work in replica.works()))
    assert [said[2] for said in replica.said if said[1] == "h"][-1] == grant(1)


def test_a_hub_that_can_not_be_reached_loses_its_credits_at_once_and_its_requests_after_the_grace() -> None:
    """1. a holds credits and is gone; 2. the next probe shows it; 3. b, which waits, gets them."""
    replica = Replica(hub_grace_s=10.0)
    replica.hears_on_output("a", hello(hub_id="a"))
    replica.hears_on_output("b", hello(hub_id="b"))
    replica.submit("r", "a", credit=True)
    replica.gone.add("a")
    replica.tick(100.0)
    replica.tick(100.1)
    assert [(said[1], said[2]) for said in replica.said if isinstance(said[2], wire.Grant)][-1] == ("b", grant(1, 1))
    assert len(replica.sessions.ledger) == 1
    replica.tick(110.3)
    assert len(replica.sessions.ledger) == 0


@pytest.mark.parametrize("ended", [False, True])
def test_a_submit_that_comes_twice_runs_once(ended: bool) -> None:
    replica = Replica()
    replica.submit()
    if ended:
        replica.delivers(Finished(replica.works()[0].key, "stop"))
    assert replica.submit() == []
    assert (len(replica.works()), replica.counters["replayed"]) == (1, 1)
    assert isinstance(replica.submit(attempt=1)[0], wire.Accepted)


def test_an_attempt_that_was_aborted_before_it_came_does_not_begin() -> None:
    replica = Replica()
    replica.hears("h", wire.Abort(epoch=7, request_id="r", attempt=2))
    assert replica.submit(attempt=2) == []
    assert isinstance(replica.submit(attempt=3)[0], wire.Accepted)


def test_an_abort_that_names_no_attempt_stops_what_runs_and_nothing_that_comes_later() -> None:
    replica = Replica()
    replica.submit(attempt=1)
    assert replica.hears("h", wire.Abort(epoch=7, request_id="r")) == []
    said = replica.delivers(Finished(replica.works()[0].key, "abort"))
    assert [each.running for each in said if isinstance(each, wire.Aborted)] == [True]
    assert isinstance(replica.submit(attempt=2)[0], wire.Accepted)


def test_an_attachment_that_no_message_can_hold_ends_its_request_and_says_why() -> None:
    replica = Replica()
    replica.submit()
    (work,) = replica.works()
    huge = bytes(wire.MAX_ATTACHMENT_BYTES + 1)
    replica.delivers(OutputChunk(work.key, "image", mime="image/png", attachment=huge), Finished(work.key, "stop"))
    failed = [said[2] for said in replica.said if said[0] == "output"]
    assert [type(message) for message in failed] == [wire.StageFailed]
    assert isinstance(failed[0], wire.StageFailed)
    assert failed[0].kind is FailureKind.ENGINE
    assert "attachment" in failed[0].reason
    assert (len(replica.sessions.ledger), replica.jobs[-2:]) == (0, [Cancel(work.key), ReleasePayload("h/r")])


def test_a_revoked_hub_loses_its_work_its_credits_its_hand_offs_and_what_waits_for_it() -> None:
    """1. a runs one request, and its output can't leave just now; 2. a is revoked: b gets all, and a nothing ever."""
    replica = Replica()
    replica.hears_on_output("a", hello(hub_id="a"))
    replica.hears_on_output("b", hello(hub_id="b"))
    replica.submit("r", "a", credit=True)
    (work,) = replica.works()
    replica.reachable = SendResult.FULL
    replica.delivers(OutputChunk(work.key, "text", text="secret"))
    replica.reachable = SendResult.SENT
    replica.sessions.revoke_hubs(frozenset("a"))
    replica.tick(1.0)
    replica.delivers(RequestFailed(work.key, FailureKind.ENGINE, "x"))
    assert all(job in replica.jobs for job in (Cancel(work.key), ReleaseHub("a")))
    assert not [said for said in replica.said if isinstance(said[2], wire.Chunk | wire.StageFailed)]
    assert [(said[1], said[2]) for said in replica.said if isinstance(said[2], wire.Grant)][-1] == ("b", grant(2))
    assert replica.sessions.handshake.credits.unspent_of("a") == 0


def test_the_hand_offs_of_a_hub_stay_while_another_connection_of_it_lives() -> None:
    """1. a hub comes back under another routing id; 2. its old connection is given up: its hand-offs stay."""
    replica = Replica(hub_grace_s=10.0)
    replica.hears_on_output("h/old", hello())
    replica.hears_on_output("h/new", hello())
    replica.gone.add("h/old")
    replica.tick(100.0)
    replica.tick(111.0)
    assert ReleaseHub("h") not in replica.jobs
    replica.gone.add("h/new")
    replica.tick(120.0)
    replica.tick(131.0)
    assert replica.jobs[-1] == ReleaseHub("h")


def test_what_a_debugger_shows() -> None:
    replica = Replica()
    replica.hears_on_output("h", hello())
    replica.submit(credit=True)
    assert repr(replica.sessions.ledger) == "Ledger(in_flight=1, ended=0, accepted=1)"
    book = "CreditBook(capacity=2, running=1, unspent=1, hubs=1, wanting=0, recalling=0)"
    assert repr(replica.sessions.handshake.credits) == book
    handshake = f"Handshake(ReplicaSessions(epoch=7, connections=1, given_up=0, revoked=0), {book})"
    assert repr(replica.sessions.handshake) == handshake
    assert repr(replica.sessions) == f"Sessions({handshake}, Ledger(in_flight=1, ended=0, accepted=1), jobs=0)"
