"""The session protocol: each role alone, and both connected in memory, through anything that connections can do."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omni_discovery import wire
from omni_discovery.errors import WireError
from omni_discovery.wire.session import (
    SOCKETS,
    CloseCredits,
    CreditsGranted,
    CreditsRecalled,
    Flaw,
    ForeignIdentityError,
    HubAction,
    HubSession,
    MessageRefused,
    OpenCredits,
    Peer,
    ReplicaAction,
    ReplicaSessions,
    SendToReplica,
    SendWelcome,
    SessionClosed,
    SessionOpened,
    SocketName,
    same_security,
)

HUB = Peer("h/0123456789abcdef", "h")


def welcome(session: int = 1, epoch: int = 7) -> wire.Welcome:
    return wire.Welcome(epoch=epoch, capacity=1, queue_length=0, session=session)


def grant(session: int, epoch: int = 7, credits_: int = 2) -> wire.Grant:
    return wire.Grant(epoch=epoch, session=session, credits=credits_, queue_length=0)


def recall(session: int, credits_: int) -> wire.Recall:
    return wire.Recall(epoch=7, session=session, credits=credits_, queue_length=0)


def hello(session: int = 1, epoch: int = 7, hub_id: str = "h") -> wire.Hello:
    return wire.Hello(hub_id=hub_id, epoch=epoch, session=session, wire_version=wire.VERSION_CUT)


def new() -> HubSession:
    """A hub's session whose connections were just made."""
    session = HubSession("h", epoch=7)
    session.connected("input")
    session.connected("output")
    return session


def opened() -> HubSession:
    session = new()
    session.receive("input", welcome())
    session.receive("output", welcome())
    return session


# ---- the hub alone


def test_a_session_is_up_when_both_sockets_were_welcomed() -> None:
    session = new()
    assert not session.receive("input", welcome())
    assert not session.receive("input", welcome())
    assert session.receive("output", welcome()) == [SessionOpened(0, is_gated=True)]
    assert session.is_open
    assert session.is_gated
    assert session.knows_epoch(7)


def test_a_hub_greets_each_connection_as_it_is_made_and_repeats_only_what_was_not_answered() -> None:
    session = HubSession("h", epoch=7)
    assert session.repeat_hellos() == []
    assert session.connected("output") == [SendToReplica("output", hello())]
    assert session.connected("input") == [SendToReplica("input", hello())]
    session.receive("input", welcome())
    assert session.repeat_hellos() == [SendToReplica("output", hello())]
    session.receive("output", welcome())
    assert session.repeat_hellos() == []


def test_a_replica_that_names_no_session_grants_no_credits() -> None:
    session = new()
    session.receive("input", welcome(session=0))
    assert session.receive("output", welcome(session=0)) == [SessionOpened(0, is_gated=False)]
    assert not session.is_gated


def test_a_welcome_for_an_earlier_session_or_another_life_is_nothing() -> None:
    session = opened()
    session.disconnected("input")
    session.connected("input")
    session.receive("input", welcome(session=1))
    assert not session.receive("output", welcome(session=1))
    refused = [MessageRefused(Flaw.EPOCH, 8)]
    assert session.receive("input", welcome(session=2, epoch=8)) == refused
    assert session.receive("output", welcome(session=2, epoch=8)) == refused
    session.receive("input", welcome(session=2))
    assert session.receive("output", welcome(session=2)) == [SessionOpened(0, is_gated=True)]


def test_credits_of_an_earlier_session_are_void() -> None:
    session = opened()
    assert session.receive("output", grant(1)) == [CreditsGranted(2, 0)]
    session.disconnected("output")
    void = [MessageRefused(Flaw.SESSION, 7)]
    assert session.receive("output", grant(1)) == void
    assert session.receive("output", grant(2)) == []
    assert session.receive("output", grant(2, epoch=8)) == [MessageRefused(Flaw.SESSION, 8)]


def test_credits_that_come_before_the_session_is_up_wait_for_it() -> None:
    session = new()
    session.receive("output", welcome())
    assert session.receive("output", grant(1, credits_=3)) == []
    assert session.receive("input", welcome()) == [SessionOpened(0, is_gated=True), CreditsGranted(3, 0)]
    assert session.receive("input", welcome()) == []


def test_a_recall_that_comes_before_the_session_is_up_is_answered_once_it_is() -> None:
    """1. three credits, then recalls of two and of five; 2. the session opens: two and one go back, nothing is left"""
    session = new()
    session.receive("output", welcome())
    session.receive("output", grant(1, credits_=3))
    assert session.receive("output", recall(1, 2)) == session.receive("output", recall(1, 5)) == []
    returned = [wire.ReturnCredits(epoch=7, session=1, credits=count) for count in (2, 1)]
    *sent, last = session.receive("input", welcome())
    assert (sent, last) == ([SendToReplica("input", each) for each in returned], SessionOpened(0, is_gated=True))
    assert session.receive("output", recall(1, 4)) == [CreditsRecalled(1, 4)]


@pytest.mark.attack("Q20")
def test_recalls_without_end_before_the_session_is_up_are_answered_by_a_few_messages() -> None:
    """1. a replica that holds its Welcome back lends 5000 credits, and recalls them one by one
    2. it then lends and recalls as many as a message can name, again and again
    3. at the Welcome at most 16 messages leave; they return every credit, and each can be encoded
    """
    session = new()
    session.receive("output", welcome())
    session.receive("output", grant(1, credits_=5000))
    for _ in range(5000):
        assert session.receive("output", recall(1, 1)) == []
    *sent, last = session.receive("input", welcome())
    assert last == SessionOpened(0, is_gated=True)
    returns = [each.message for each in sent if isinstance(each, SendToReplica)]
    assert len(returns) == len(sent) <= 16
    assert sum(each.credits for each in returns if isinstance(each, wire.ReturnCredits)) == 5000

    session = new()
    session.receive("output", welcome())
    most = (1 << 53) - 1
    for _ in range(5000):
        session.receive("output", grant(1, credits_=most))
        session.receive("output", recall(1, most))
    for _ in range(5000):
        session.receive("output", grant(1, credits_=most))
    *sent, granted = session.receive("input", welcome())
    assert granted == CreditsGranted(most, 0)
    for each in sent[:-1]:
        assert isinstance(each, SendToReplica)
        assert wire.decode_to_replica([wire.encode(each.message)]) == [each.message]


def test_credits_are_wanted_and_returned_in_the_present_session_only() -> None:
    session = new()
    assert session.want_credits(3, 0.5) == session.return_credits(1, 1) == []
    session = opened()
    want = wire.WantCredits(epoch=7, session=1, waiting=3, oldest_wait_s=0.5)
    assert session.want_credits(3, 0.5) == [SendToReplica("input", want)]
    returned = wire.ReturnCredits(epoch=7, session=1, credits=2)
    assert session.return_credits(1, 2) == [SendToReplica("input", returned)]
    session.disconnected("input")
    assert session.return_credits(1, 2) == session.want_credits(1, 0.0) == []


def test_a_loss_is_news_once_and_also_after_a_change_of_epoch() -> None:
    session = opened()
    first, *_ = session.begin_epoch(8)
    assert isinstance(first, SessionClosed)
    assert not first.lost
    assert [type(action) for action in session.disconnected("input")] == [SessionClosed]
    assert session.disconnected("output") == []


def test_a_change_of_epoch_greets_again_on_what_is_connected_and_knows_the_earlier_one() -> None:
    session = opened()
    closed, *greetings = session.begin_epoch(9)
    assert closed == SessionClosed("its lease was renewed under another epoch", lost=False)
    assert greetings == [SendToReplica(socket, hello(session=2, epoch=9)) for socket in SOCKETS]
    done = wire.StageDone(epoch=7, request_id="r", seq=0, finish_reason="stop", queue_length=0)
    assert session.flaw_of("output", done) is None


@pytest.mark.attack("H2")
def test_the_epoch_that_a_replica_names_is_known_while_the_connection_stands() -> None:
    """Whatever the hub has greeted it with; of the output socket, so that what comes late on the other is nothing."""
    session = new()
    session.begin_epoch(12)
    session.receive("input", welcome(epoch=7))
    assert session.named_epoch == 0
    session.receive("output", welcome(epoch=7))
    assert (session.named_epoch, session.is_open) == (7, False)
    session.receive("output", grant(1, epoch=9))
    session.receive("output", welcome(epoch=0))
    assert session.named_epoch == 9
    session.disconnected("input")
    assert session.named_epoch == 0


def test_a_replica_that_has_given_us_up_is_greeted_again() -> None:
    session = opened()
    (closed,) = session.receive("output", welcome(session=0))
    assert closed == SessionClosed("the replica has given us up", lost=True, given_up=True)
    assert session.repeat_hellos() == [SendToReplica(socket, hello(session=2)) for socket in SOCKETS]


@pytest.mark.parametrize("socket", SOCKETS)
def test_every_message_of_a_replica_has_one_socket(socket: SocketName) -> None:
    session, named = opened(), {"epoch": 7, "request_id": "r", "queue_length": 0}
    accepted, done = wire.Accepted(**named), wire.StageDone(**named, seq=0, finish_reason="stop")
    right, wrong = (accepted, done) if socket == "input" else (done, accepted)
    assert session.flaw_of(socket, right) is None
    assert session.flaw_of(socket, wrong) is Flaw.MISPLACED
    assert session.flaw_of(socket, type(right)(**{**named, "epoch": 8}, **_rest(right))) is Flaw.EPOCH
    assert session.receive("input", grant(1)) == [MessageRefused(Flaw.MISPLACED, 7)]


def _rest(message: wire.Accepted | wire.StageDone) -> dict[str, object]:
    return {"seq": 0, "finish_reason": "stop"} if isinstance(message, wire.StageDone) else {}


# ---- the replica alone


def test_a_replica_answers_the_epoch_it_has_and_remembers_the_one_it_will_have() -> None:
    replica = ReplicaSessions()
    assert replica.receive_hello("input", HUB, hello()) == []
    assert replica.begin_epoch(7) == [SendWelcome("input", HUB, 7, 1)]
    assert replica.begin_epoch(7) == []
    assert replica.receive_hello("output", HUB, hello(epoch=9)) == [MessageRefused(Flaw.EPOCH, 9)]
    assert replica.begin_epoch(9) == [SendWelcome("output", HUB, 9, 1), OpenCredits(HUB.name, 1)]


def test_a_replica_cuts_only_for_a_connection_whose_hub_has_said_that_it_takes_that() -> None:
    """1. it has; 2. given up, it may still stand, and is known to; 3. it says so no more, or is gone"""
    replica = ReplicaSessions()
    assert not replica.takes_cut(HUB.name)
    replica.receive_hello("input", HUB, hello())
    assert replica.takes_cut(HUB.name)
    replica.give_up(HUB, is_gone=False)
    assert replica.takes_cut(HUB.name)
    for version in (msgspec.UNSET, 1):
        replica.receive_hello("input", HUB, msgspec.structs.replace(hello(), wire_version=version))
        assert not replica.takes_cut(HUB.name)
    replica.receive_hello("input", HUB, hello())
    replica.give_up(HUB, is_gone=True)
    assert not replica.takes_cut(HUB.name)


@pytest.mark.attack("H2")
def test_a_replica_under_a_new_epoch_tells_it_to_the_hubs_of_the_former_one() -> None:
    """Their registry may hold a copy of its record: only its own word says which epoch counts. No credits with it."""
    replica = ReplicaSessions()
    replica.begin_epoch(7)
    for socket in SOCKETS:
        replica.receive_hello(socket, HUB, hello())
    assert replica.begin_epoch(9) == [SendWelcome("output", HUB, 9, 1)]
    replica.revoke_hubs([HUB.hub_id])
    assert replica.begin_epoch(11) == []


def test_a_hub_can_not_greet_under_another_name() -> None:
    replica = ReplicaSessions()
    with pytest.raises(ForeignIdentityError):
        replica.receive_hello("input", HUB, hello(hub_id="other"))


def test_work_begins_under_the_present_epoch_and_may_end_under_an_earlier_one() -> None:
    replica = ReplicaSessions()
    submit, abort = wire.Submit(epoch=7, request_id="r"), wire.Abort(epoch=7, request_id="r")
    assert replica.flaw_of("input", submit) is replica.flaw_of("input", abort) is Flaw.EPOCH
    replica.begin_epoch(7)
    assert replica.flaw_of("input", submit) is replica.flaw_of("input", abort) is None
    replica.begin_epoch(9)
    assert (replica.flaw_of("input", submit), replica.flaw_of("input", abort)) == (Flaw.EPOCH, None)
    assert replica.flaw_of("output", abort) is Flaw.MISPLACED


@pytest.mark.attack("Q24")
def test_one_connection_of_a_hub_too_many_ends_the_oldest_of_the_same_hub() -> None:
    """1. a hub has 16 connections, and another hub one that is older; 2. a 17th: the first one's credits are void
    3. it is told by the next probe; one that greets again is the newest
    """
    replica = ReplicaSessions()
    replica.begin_epoch(7)
    replica.receive_hello("output", HUB, hello())
    peers = [Peer(f"e/{number:016x}", "e") for number in range(18)]
    for peer in peers[:16]:
        assert CloseCredits(peer.name) not in replica.receive_hello("output", peer, hello(hub_id="e"))
    replica.receive_hello("output", peers[0], hello(hub_id="e"))
    for came, ended in ((peers[16], peers[1]), (peers[17], peers[2])):
        assert replica.receive_hello("output", came, hello(hub_id="e")) == [
            CloseCredits(ended.name),
            SendWelcome("output", came, 7, 1),
            OpenCredits(came.name, 1),
        ]
        assert replica.probe(ended) == [SendWelcome("output", ended, 7, 0)]
    assert set(replica.peers()) == {HUB, peers[0], *peers[3:]}
    assert set(replica.probed_peers()) == {HUB.name, *(peer.name for peer in peers)}


@pytest.mark.attack("Q24")
def test_what_is_remembered_of_given_up_connections_is_bounded_by_hub() -> None:
    replica = ReplicaSessions()
    replica.begin_epoch(7)
    replica.receive_hello("output", HUB, hello())
    replica.give_up(HUB, is_gone=False)
    for number in range(5000):
        replica.receive_hello("input", Peer(f"e/{number:016x}", "e"), hello(hub_id="e"))
    assert len(replica.connections_of({"e"})) == 32
    assert replica.connections_of({"h"}) == [HUB]


def test_of_more_hubs_than_there_can_be_the_one_goes_that_greeted_longest_ago() -> None:
    """Without encryption a hub's id is whatever it says."""
    replica = ReplicaSessions()
    replica.begin_epoch(7)
    for number in range(4097):
        actions = replica.receive_hello("output", Peer(f"{number}/t", str(number)), hello(hub_id=str(number)))
    assert actions[0] == CloseCredits("0/t")
    assert len(replica.peers()) == 4096


def test_a_hub_that_is_given_up_is_probed_until_it_greets_again_unless_it_is_gone() -> None:
    replica = ReplicaSessions()
    replica.begin_epoch(7)
    replica.receive_hello("output", HUB, hello())
    assert replica.probe(HUB) == [SendWelcome("output", HUB, 7, 1)]
    assert replica.give_up(HUB, is_gone=False) == [CloseCredits(HUB.name)]
    assert (replica.peers(), replica.probed_peers()) == ([], {HUB.name: HUB})
    assert replica.probe(HUB) == [SendWelcome("output", HUB, 7, 0)]
    replica.receive_hello("output", HUB, hello(2))
    assert replica.probe(HUB) == [SendWelcome("output", HUB, 7, 2)]
    replica.give_up(HUB, is_gone=True)
    assert replica.probed_peers() == {}


def test_a_revoked_hub_is_not_answered_and_its_revocation_can_be_taken_back() -> None:
    replica = ReplicaSessions()
    replica.receive_hello("input", HUB, hello())
    assert replica.revoke_hubs({"h"}) == {"h"}
    assert replica.revoke_hubs({"h", "other"}) == {"other"}
    assert replica.begin_epoch(7) == replica.probe(HUB) == []
    assert replica.receive_hello("output", HUB, hello()) == [MessageRefused(Flaw.REVOKED, 7)]
    assert replica.revoke_hubs(()) == frozenset()
    assert replica.receive_hello("output", HUB, hello()) == [SendWelcome("output", HUB, 7, 1), OpenCredits(HUB.name, 1)]


def test_both_encrypt_or_neither() -> None:
    assert same_security("ours", "theirs")
    assert same_security("", "")
    assert not same_security("ours", "")
    assert not same_security("", "theirs")


def test_what_a_debugger_shows() -> None:
    assert repr(opened()) == "HubSession(epoch=7, number=1, open, gated, welcomed=input+output)"
    assert repr(new()) == "HubSession(epoch=7, number=1, closed, welcomed=none)"
    assert repr(ReplicaSessions()) == "ReplicaSessions(epoch=0, connections=0, given_up=0, revoked=0)"


# ---- both, connected in memory


class HubProcess:
    """The hub's role with a driver that does nothing but keep books."""

    def __init__(self, number: int, epoch: int) -> None:
        self.peer = Peer(f"h/{number:016}", "h")
        self.session = HubSession("h", epoch)
        self.credits = 0
        #: Whether the session was opened as one whose replica lends credits.
        self.is_gated = False
        #: The number of the session during which a Welcome first named a session; None before.
        self.lent_since: int | None = None

    def note_lender(self, message: wire.Welcome | wire.Grant | wire.Recall) -> None:
        if isinstance(message, wire.Welcome) and message.session and message.epoch == self.session.epoch:
            self.lent_since = self.session.number if self.lent_since is None else self.lent_since


class Pair:
    """One hub process and one replica process; every message travels as the bytes that it has on the wire.

    A connection is two queues of frames, one each way. Both lose what is in them when the connection is lost.
    """

    def __init__(self, *, our_key: str = "", their_key: str = "", version: int = wire.VERSION) -> None:
        self.can_talk = same_security(our_key, their_key)
        self.version = version
        #: The epoch that the registry has, and what each side knows of it.
        self.registered = 1
        self.processes = 0
        self.hub = self._new_hub()
        self.replica = ReplicaSessions()
        #: The sessions that the replica has named in a Welcome, by socket and connection: (epoch, number).
        self.named: dict[tuple[SocketName, str], set[tuple[int, int]]] = defaultdict(set)
        #: What the replica has lent, by connection: (session, credits).
        self.accounts: dict[str, tuple[int, int]] = {}
        #: None: not connected.
        self.to_replica: dict[SocketName, deque[bytes] | None] = dict.fromkeys(SOCKETS)
        self.to_hub: dict[SocketName, deque[bytes] | None] = dict.fromkeys(SOCKETS)
        self.replica.begin_epoch(self.registered)

    def _new_hub(self) -> HubProcess:
        self.processes += 1
        return HubProcess(self.processes, self.registered)

    # ---- connections

    def connect(self, socket: SocketName) -> None:
        if self.can_talk and self.to_replica[socket] is None:
            self.to_replica[socket], self.to_hub[socket] = deque(), deque()
            self.hub_does(self.hub.session.connected(socket))

    def disconnect(self, socket: SocketName) -> None:
        """The connection breaks, with everything on its way; the replica finds its hub unreachable."""
        if self.to_replica[socket] is not None:
            self.to_replica[socket] = self.to_hub[socket] = None
            if socket == "output":
                self.accounts.pop(self.hub.peer.name, None)
            self.hub_does(self.hub.session.disconnected(socket))

    def send(self, queue: deque[bytes] | None, message: wire.ToReplica | wire.FromReplica) -> None:
        if queue is not None:
            queue.append(wire.encode(message))

    def deliver(self, socket: SocketName, *, to_hub: bool) -> None:
        queue = (self.to_hub if to_hub else self.to_replica)[socket]
        if queue:
            self.arrive(socket, queue.popleft(), to_hub=to_hub)

    def arrive(self, socket: SocketName, frame: bytes, *, to_hub: bool) -> None:
        if to_hub:
            messages, _ = wire.decode_from_replica([frame])
            for message in messages:
                assert isinstance(message, wire.Welcome | wire.Grant | wire.Recall)
                self.hub.note_lender(message)
                self.hub_does(self.hub.session.receive(socket, message))
            return
        for order in wire.decode_to_replica([frame]):
            if self.version != wire.VERSION:
                continue
            if isinstance(order, wire.Hello):
                self.replica_does(self.replica.receive_hello(socket, self.hub.peer, order))
            else:
                assert self.replica.flaw_of(socket, order) in (None, Flaw.EPOCH)

    # ---- drivers

    def hub_does(self, actions: Iterable[HubAction]) -> None:
        for action in actions:
            match action:
                case SendToReplica(socket, message):
                    self.send(self.to_replica[socket], message)
                case SessionOpened(is_gated=is_gated):
                    assert self.hub.session.is_open
                    self.hub.is_gated = is_gated
                    if self.hub.lent_since is not None and self.hub.session.number > self.hub.lent_since:
                        opened_as = self.hub.session.epoch, self.hub.session.number
                        assert all(opened_as in self.named[each, self.hub.peer.name] for each in SOCKETS)
                case SessionClosed():
                    assert not self.hub.session.is_open
                    self.hub.credits = 0
                case CreditsGranted(credits_, _):
                    self.hub.credits += credits_
                case CreditsRecalled() | MessageRefused():
                    pass

    def replica_does(self, actions: Iterable[ReplicaAction]) -> None:
        for action in actions:
            match action:
                case SendWelcome(socket, peer, epoch, session):
                    self.named[socket, peer.name].add((epoch, session))
                    if peer == self.hub.peer:
                        message = wire.Welcome(epoch=epoch, capacity=1, queue_length=0, session=session)
                        self.send(self.to_hub[socket], message)
                case OpenCredits(peer_name, session):
                    if self.accounts.get(peer_name, (0, 0))[0] != session:
                        self.accounts[peer_name] = session, 1
                        granted = grant(session, self.replica.epoch, credits_=1)
                        self.send(self.to_hub["output"], granted)
                case CloseCredits(peer_name):
                    self.accounts.pop(peer_name, None)
                case MessageRefused():
                    pass

    # ---- what happens to processes

    def restart_hub(self) -> None:
        """Another process of the hub: other connections under another routing id, sessions from 1."""
        old = self.hub.peer
        for socket in SOCKETS:
            self.to_replica[socket] = self.to_hub[socket] = None
        self.hub = self._new_hub()
        self.replica_does(self.replica.give_up(old, is_gone=True))

    def restart_replica(self) -> None:
        """Another process of the replica, whose epoch the registry has at once, and both sides by and by."""
        for socket in SOCKETS:
            self.disconnect(socket)
        self.registered += 1
        self.replica, self.accounts = ReplicaSessions(), {}

    def renew_lease(self) -> None:
        """The same process gets another epoch."""
        self.registered += 1

    def hub_reads_registry(self) -> None:
        if self.hub.session.epoch != self.registered:
            self.hub_does(self.hub.session.begin_epoch(self.registered))

    def replica_reads_registry(self) -> None:
        self.replica_does(self.replica.begin_epoch(self.registered))

    def give_up_hub(self) -> None:
        """The hub reads too slowly: what waits for it is dropped, and its connection stands."""
        queue = self.to_hub["output"]
        if queue is not None:
            queue.clear()
        self.replica_does(self.replica.give_up(self.hub.peer, is_gone=False))

    def revoke(self) -> None:
        for hub_id in self.replica.revoke_hubs({"h"}):
            assert hub_id == "h"
            self.give_up_hub()

    def unrevoke(self) -> None:
        self.replica.revoke_hubs(())

    # ---- timers

    def tick_hub(self) -> None:
        if not self.hub.session.is_open:
            self.hub_does(self.hub.session.repeat_hellos())

    def tick_replica(self) -> None:
        for peer in self.replica.probed_peers().values():
            self.replica_does(self.replica.probe(peer))

    def settle(self, turns: int = 4) -> None:
        """From now on nothing is lost: everything sent arrives, and all timers run a few times."""
        for _ in range(turns):
            self.hub_reads_registry()
            self.replica_reads_registry()
            for socket in SOCKETS:
                self.connect(socket)
            self.tick_hub()
            self.tick_replica()
            while any([*self.to_hub.values(), *self.to_replica.values()]):
                for socket in SOCKETS:
                    self.deliver(socket, to_hub=False)
                    self.deliver(socket, to_hub=True)

    @property
    def is_agreed(self) -> bool:
        """Whether both sides have one and the same session."""
        session, account = self.hub.session, self.accounts.get(self.hub.peer.name)
        return (
            session.is_open
            and session.epoch == self.replica.epoch
            and account == (session.number, 1)
            and self.hub.is_gated
        )


def test_two_that_can_talk_have_a_session_after_one_exchange() -> None:
    pair = Pair()
    pair.settle(turns=1)
    assert pair.is_agreed
    assert (pair.hub.session.number, pair.hub.credits) == (1, 1)


@pytest.mark.parametrize(("socket", "to_hub"), [(socket, to_hub) for socket in SOCKETS for to_hub in (False, True)])
def test_a_hello_or_a_welcome_that_is_lost_is_made_up_for(socket: SocketName, to_hub: bool) -> None:
    pair = Pair()
    for each in SOCKETS:
        pair.connect(each)
    if to_hub:
        for each in SOCKETS:
            pair.deliver(each, to_hub=False)
    queue = (pair.to_hub if to_hub else pair.to_replica)[socket]
    assert queue
    queue.popleft()
    pair.settle()
    assert pair.is_agreed


def test_a_hello_that_comes_twice_makes_one_session_and_lends_once() -> None:
    pair = Pair()
    for socket in SOCKETS:
        pair.connect(socket)
    for socket in SOCKETS:
        queue = pair.to_replica[socket]
        assert queue
        queue.append(queue[0])
    pair.settle()
    assert pair.is_agreed
    assert (pair.hub.session.number, pair.hub.credits) == (1, 1)


def test_a_welcome_of_the_session_before_opens_nothing() -> None:
    """1. the answers to the first Hellos are under way; 2. the epoch changes: they open no session; 3. the next do"""
    pair = Pair()
    for socket in SOCKETS:
        pair.connect(socket)
        pair.deliver(socket, to_hub=False)
    pair.renew_lease()
    pair.hub_reads_registry()
    for socket in SOCKETS:
        pair.deliver(socket, to_hub=True)
    assert not pair.hub.session.is_open
    pair.settle()
    assert pair.is_agreed


@pytest.mark.parametrize("first", ["hub", "replica"])
def test_a_new_epoch_makes_a_new_session_whoever_learns_of_it_first(first: str) -> None:
    pair = Pair()
    pair.settle()
    pair.renew_lease()
    pair.hub_reads_registry() if first == "hub" else pair.replica_reads_registry()
    for socket in SOCKETS:
        pair.deliver(socket, to_hub=False)
        pair.deliver(socket, to_hub=True)
    assert not pair.is_agreed
    pair.settle()
    assert pair.is_agreed
    assert pair.hub.session.number == 2
    assert pair.hub.session.knows_epoch(1)


def test_a_replica_that_restarts_is_another_session_under_another_epoch() -> None:
    pair = Pair()
    pair.settle()
    pair.restart_replica()
    assert not pair.hub.session.is_open
    pair.settle()
    assert pair.is_agreed
    assert pair.hub.session.epoch == 2


def test_a_hub_that_restarts_begins_anew_beside_what_its_dead_connection_left() -> None:
    pair = Pair()
    pair.settle()
    old = pair.hub.peer.name
    pair.restart_hub()
    pair.settle()
    assert pair.is_agreed
    assert old not in pair.accounts


def test_a_half_open_session_is_found_out_by_the_probe() -> None:
    """1. the replica gives the hub up, whose connection stands; 2. the probe says so; 3. they have another session"""
    pair = Pair()
    pair.settle()
    pair.give_up_hub()
    assert pair.hub.session.is_open
    pair.settle()
    assert pair.is_agreed
    assert pair.hub.session.number == 2


def test_a_probe_that_crosses_a_hello_is_not_taken_for_its_answer() -> None:
    """1. the replica has given the hub up, which greets again; 2. the next probe, with number 0, comes before the
    answer to Hello on that socket; 3. the session opens by the answer, as one whose replica lends credits
    """
    session = opened()
    session.receive("output", welcome(session=0))
    session.receive("input", welcome(session=2))
    assert session.receive("output", welcome(session=0)) == []
    assert session.receive("output", welcome(session=2)) == [SessionOpened(0, is_gated=True)]


def test_a_second_probe_before_any_answer_opens_and_closes_nothing() -> None:
    """1. a probe with number 0 ends the session; 2. another comes before either socket has answered the next Hello
    3. input answers, and output does not yet: the session stays closed; 4. one more probe: no loss; 5. output answers
    """
    session = opened()
    (closed,) = session.receive("output", welcome(session=0))
    assert closed == SessionClosed("the replica has given us up", lost=True, given_up=True)
    assert session.receive("output", welcome(session=0)) == []
    assert session.repeat_hellos() == [SendToReplica(socket, hello(session=2)) for socket in SOCKETS]
    assert session.receive("input", welcome(session=2)) == []
    assert session.receive("output", welcome(session=0)) == []
    assert session.repeat_hellos() == [SendToReplica("output", hello(session=2))]
    assert session.receive("output", welcome(session=2)) == [SessionOpened(0, is_gated=True)]


def test_a_late_probe_under_the_next_epoch_is_no_answer_either() -> None:
    session = opened()
    session.begin_epoch(8)
    session.receive("output", welcome(session=0, epoch=8))
    assert session.receive("input", welcome(session=2, epoch=8)) == []
    assert session.receive("output", welcome(session=2, epoch=8)) == [SessionOpened(0, is_gated=True)]


def test_a_revoked_hub_has_no_session_until_it_is_revoked_no_more() -> None:
    pair = Pair()
    pair.revoke()
    pair.settle()
    assert not pair.hub.session.is_open
    assert not pair.accounts
    pair.unrevoke()
    pair.settle()
    assert pair.is_agreed


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"), [("k", "k2", True), ("", "", True), ("k", "", False), ("", "k", False)]
)
def test_one_that_encrypts_and_one_that_does_not_never_make_a_session(ours: str, theirs: str, agreed: bool) -> None:
    pair = Pair(our_key=ours, their_key=theirs)
    pair.settle()
    assert pair.is_agreed is agreed
    assert pair.hub.session.was_ever_open is agreed


def test_another_version_of_the_protocol_never_makes_a_session() -> None:
    """1. the other side's frames have another version byte: none is read; 2. the hub goes on greeting all the same"""
    frame = bytes([wire.VERSION + 1]) + wire.encode(hello())[1:]
    with pytest.raises(WireError, match="version"):
        wire.decode_to_replica([frame])
    pair = Pair(version=wire.VERSION + 1)
    pair.settle()
    assert not pair.hub.session.is_open
    pair.tick_hub()
    assert all(pair.to_replica.values())


class SessionMachine(RuleBasedStateMachine):
    """Anything that processes, connections and the registry can do, in any order; after that, both sides agree."""

    @initialize()
    def begin(self) -> None:
        self.pair = Pair()

    @rule(socket=st.sampled_from(SOCKETS))
    def connect(self, socket: SocketName) -> None:
        self.pair.connect(socket)

    @rule(socket=st.sampled_from(SOCKETS))
    def disconnect(self, socket: SocketName) -> None:
        self.pair.disconnect(socket)

    @rule(socket=st.sampled_from(SOCKETS), to_hub=st.booleans())
    def deliver(self, socket: SocketName, to_hub: bool) -> None:
        self.pair.deliver(socket, to_hub=to_hub)

    @rule(socket=st.sampled_from(SOCKETS), to_hub=st.booleans())
    def lose_part_of_the_handshake(self, socket: SocketName, to_hub: bool) -> None:
        """A full queue: grants that are lost so end with the hub given up, which give_up_hub does."""
        queue = (self.pair.to_hub if to_hub else self.pair.to_replica)[socket]
        if queue and not isinstance(_read(queue[0], to_hub=to_hub), wire.Grant):
            queue.popleft()

    @rule()
    def probe_a_hub_that_was_given_up(self) -> None:
        """The hub reads so late that several probes are on their way at once."""
        self.pair.settle()
        self.pair.give_up_hub()
        for _ in range(3):
            self.pair.tick_replica()
        self.pair.deliver("output", to_hub=True)
        self.pair.tick_hub()

    @rule(socket=st.sampled_from(SOCKETS))
    def repeat_a_hello(self, socket: SocketName) -> None:
        queue = self.pair.to_replica[socket]
        if queue:
            queue.append(queue[-1])

    @rule(what=st.sampled_from(["restart_hub", "restart_replica", "renew_lease", "give_up_hub", "revoke", "unrevoke"]))
    def change_a_process(self, what: str) -> None:
        change: Callable[[], None] = getattr(self.pair, what)
        change()

    @rule(what=st.sampled_from(["hub_reads_registry", "replica_reads_registry", "tick_hub", "tick_replica"]))
    def time_passes(self, what: str) -> None:
        change: Callable[[], None] = getattr(self.pair, what)
        change()

    @rule()
    def nothing_is_lost_for_a_while(self) -> None:
        self.pair.settle()

    @invariant()
    def an_open_session_is_of_the_present_epoch_and_on_connected_sockets(self) -> None:
        session = self.pair.hub.session
        if session.is_open:
            assert session.knows_epoch(session.epoch)
            assert all(queue is not None for queue in self.pair.to_replica.values())

    @invariant()
    def a_hub_never_holds_more_credits_than_the_replica_has_lent_it(self) -> None:
        hub = self.pair.hub
        assert hub.credits <= 1

    def teardown(self) -> None:
        """Both wait forever: never. Once nothing is lost any more, a few turns of both timers make one session."""
        if hasattr(self, "pair"):
            self.pair.unrevoke()
            self.pair.settle()
            assert self.pair.is_agreed


def _read(frame: bytes, *, to_hub: bool) -> wire.ToReplica | wire.FromReplica:
    return wire.decode_from_replica([frame])[0][0] if to_hub else wire.decode_to_replica([frame])[0]


SessionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSessionMachine = SessionMachine.TestCase


def test_nobody_is_greeted_on_a_connection_that_is_lost() -> None:
    session = new()
    session.disconnected("output")
    assert [each.socket for each in session.repeat_hellos() if isinstance(each, SendToReplica)] == ["input"]
    session.connected("output")
    assert [each.socket for each in session.repeat_hellos() if isinstance(each, SendToReplica)] == ["input", "output"]
