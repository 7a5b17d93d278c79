"""The session between a hub and one replica process: its rules, for both roles. Pure.

A replica has two sockets, ``input`` and ``output``, and a hub one connection to each. A session is named by the
replica's epoch (one life of its key in the registry) and by a number that the hub counts up. The rules:

1.  The hub says Hello on both sockets, as soon as each is connected, and repeats it until it is answered.
2.  The replica answers Welcome if Hello names its present epoch. A Hello for another epoch is refused and remembered,
    and answered if that epoch becomes the present one, since the hub may learn of an epoch before the replica does.
3.  The session is open for the hub once both sockets were welcomed under the present epoch and number. It is open for
    the replica, which then lends credits, once Hello came on ``output``, where credits travel.
4.  A lost connection or another epoch begins the next number. Credits belong to one epoch and number, and are void in
    the next. Number 0 stands for none: a hub that says it wants no credits, a replica that says it lends none.
5.  Work begins only under the present epoch; what began under an earlier epoch of the same process may go on and end.
6.  Half-open: a replica that gives up a hub whose connection may still stand repeats a Welcome with number 0 to it. A
    hub whose session is open then knows that the replica has forgotten it, and begins the next number; one whose Hello
    is still on its way does not take that Welcome for the answer, if this process has named a session before.
7.  A revoked hub is neither listened to nor answered, until it is revoked no more.
8.  Both sides encrypt or neither does (``same_security``); a record shows what its process does.
9.  A frame of another protocol version never gets here: it does not decode, so its Hello stays unanswered. A message
    that was cut is put together before; the replica cuts only where Hello has said that the hub takes that.

Each role is one class. Its methods take what has happened and return actions; the driver carries them out in order.
Neither role waits for a message that only one message of the other would bring: the hub repeats Hello by its timer, the
replica probes silent hubs by its own, so a lost message delays a session and never prevents it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, get_args

from omni_discovery.errors import WireError
from omni_discovery.wire.frames import takes_cut
from omni_discovery.wire.messages import (
    VERSION_CUT,
    Aborted,
    Accepted,
    Control,
    FromReplica,
    Grant,
    Hello,
    Recall,
    Rejected,
    ReturnCredits,
    Submit,
    ToReplica,
    WantCredits,
    Welcome,
)

SocketName = Literal["input", "output"]
SOCKETS: Final[tuple[SocketName, ...]] = ("input", "output")

#: Bounds of what is remembered: connections of one hub that have greeted, as many that were given up, and epochs of one
#: process. A process of a hub has one connection to each socket; more are those of its earlier lives.
_MAX_CONNECTIONS: Final = 16
_MAX_EPOCHS: Final = 64
#: Hubs that a replica remembers: no encrypted one comes near that, since each has a record.
_MAX_HUBS: Final = 4096
#: Answers to Recalls that wait for a session to open. A replica sends a Recall each half second at most, and counts the
#: answers; what further Recalls take back goes into the last one.
_MAX_EARLY_RETURNS: Final = 16
#: No message names more credits.
_MAX_CREDITS: Final = (1 << 53) - 1

#: The handshake travels on both sockets, orders and their acknowledgements on ``input``, all else on ``output``.
_ON_BOTH: Final = frozenset[type]({Hello, Welcome})
_ON_INPUT: Final = frozenset[type]({*get_args(ToReplica), Accepted, Rejected, Aborted}) - _ON_BOTH
#: What begins work in the replica (rule 5).
_BEGINS_WORK: Final = frozenset[type]({Submit, Control})


class MisplacedError(WireError):
    """A message came on the wrong socket."""


class ForeignIdentityError(WireError):
    """A frame came under a routing id, or a Hello under a hub id, that its connection has no right to."""


class Flaw(StrEnum):
    """Why a message is refused."""

    MISPLACED = "misplaced"
    EPOCH = "epoch"
    SESSION = "session"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Peer:
    """One connection of a hub to a replica. ``name`` is its routing id: ``<hub_id>/<token>``."""

    name: str
    hub_id: str


# ---- actions: what the driver has to do


@dataclass(frozen=True, slots=True)
class SendToReplica:
    """Hub: send the message on that socket. If it can't be sent now, the session repeats what matters."""

    socket: SocketName
    message: ToReplica


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Hub: work may be sent. ``is_gated``: the replica lends credits, and wants work only on them."""

    queue_length: int
    is_gated: bool


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """Hub: no work may be sent. ``lost``: answers that were on their way may be lost with the connection.

    ``given_up``: the replica lives, and has ended the session because this hub read nothing.
    """

    reason: str
    lost: bool
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class CreditsGranted:
    """Hub: so many more requests may be sent, each to run at once."""

    credits: int
    queue_length: int


@dataclass(frozen=True, slots=True)
class CreditsRecalled:
    """Hub: answer by ReturnCredits of that session, with up to so many unspent credits."""

    session: int
    credits: int


@dataclass(frozen=True, slots=True)
class SendWelcome:
    """Replica: send Welcome, with the present load, to one connection."""

    socket: SocketName
    peer: Peer
    epoch: int
    session: int


@dataclass(frozen=True, slots=True)
class OpenCredits:
    """Replica: lend credits to the connection, under that session; those of another session of it are void."""

    peer: str
    session: int


@dataclass(frozen=True, slots=True)
class CloseCredits:
    """Replica: the connection has no session, and its credits are void."""

    peer: str


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """Either role: the message was dropped; only to be counted. ``epoch`` is the one that it named."""

    flaw: Flaw
    epoch: int


HubAction = SendToReplica | SessionOpened | SessionClosed | CreditsGranted | CreditsRecalled | MessageRefused
ReplicaAction = SendWelcome | OpenCredits | CloseCredits | MessageRefused


def same_security(our_public_key: str, their_public_key: str) -> bool:
    """Whether two processes can talk: both have a CURVE key or neither has. A key is empty where none is used."""
    return bool(our_public_key) is bool(their_public_key)


class _Role:
    """The state of both roles: the replica's present epoch, and the epochs of its process that messages may name."""

    def __init__(self, epoch: int) -> None:
        #: The life of the replica that the registry knows, as far as this side knows; 0 before the first.
        self.epoch = epoch
        #: Epochs under which this side has had, or could have had, a session with the other; oldest first.
        self._epochs: dict[int, None] = {}

    def knows_epoch(self, epoch: int) -> bool:
        """Whether messages may name the epoch: what began under it may still go on."""
        return epoch in self._epochs

    def flaw_of(self, socket: SocketName, message: ToReplica | FromReplica) -> Flaw | None:
        """Why a message that is not part of the handshake is refused; None if it is to be handled."""
        kind = type(message)
        if kind in _ON_BOTH:
            return None
        if (kind in _ON_INPUT) is not (socket == "input"):
            return Flaw.MISPLACED
        if message.epoch not in self._epochs or (kind in _BEGINS_WORK and message.epoch != self.epoch):
            return Flaw.EPOCH
        return None

    def _remember_epoch(self, epoch: int) -> None:
        self._epochs[epoch] = None
        if len(self._epochs) > _MAX_EPOCHS:
            del self._epochs[next(iter(self._epochs))]


class HubSession(_Role):
    """The hub's role, towards one replica process."""

    def __init__(self, hub_id: str, epoch: int) -> None:
        super().__init__(epoch)
        self._hub_id = hub_id
        #: Counts the sessions with this process, from 1.
        self.number = 1
        self.is_open = False
        #: Whether the replica lends credits: a Welcome has named the present number.
        self.is_gated = False
        #: Whether this process has named a session in a Welcome, under whatever number: it then names one in every
        #: answer to Hello, and its Welcomes with number 0 answer none (rule 6).
        self._lends = False
        self._connected: set[SocketName] = set()
        #: The sockets whose Hello of the present number was answered. ``is_open`` only while all were.
        self._welcomed: set[SocketName] = set()
        #: Credits that came before the session was open, and how many of them each Recall until then took back: at
        #: most ``_MAX_EARLY_RETURNS`` numbers, each at most ``_MAX_CREDITS``.
        self._early_credits = 0
        self._early_returns: list[int] = []
        #: Whether the replica may still answer what was sent in the last open session.
        self._may_be_answered = False
        #: The epoch that the replica named last on the output connection that stands; 0 if none yet.
        self.named_epoch = 0

    def __repr__(self) -> str:
        state = ("open, gated" if self.is_gated else "open") if self.is_open else "closed"
        welcomed = "+".join(sorted(self._welcomed)) or "none"
        return f"HubSession(epoch={self.epoch}, number={self.number}, {state}, welcomed={welcomed})"

    @property
    def was_ever_open(self) -> bool:
        """Whether this process has had a session with us, under whatever epoch."""
        return bool(self._epochs)

    def connected(self, socket: SocketName) -> Sequence[HubAction]:
        """A connection was made: greet on it."""
        self._connected.add(socket)
        return [self._hello(socket)]

    def disconnected(self, socket: SocketName) -> Sequence[HubAction]:
        """A connection was lost, and what was on its way with it."""
        self._connected.discard(socket)
        # Another process may listen there next.
        self.named_epoch = 0
        return self._lose("its connection was lost")

    def begin_epoch(self, epoch: int) -> Sequence[HubAction]:
        """The registry knows the same process under another epoch, or its record was written again: greet again.

        Nothing that was on its way is lost by that.
        """
        self.epoch = epoch
        self._begin_number()
        return [
            *self._close("its lease was renewed under another epoch", lost=False),
            *(self._hello(socket) for socket in SOCKETS if socket in self._connected),
        ]

    def repeat_hellos(self) -> Sequence[HubAction]:
        """The hub's timer: Hello on each connected socket that was not welcomed."""
        return [self._hello(each) for each in SOCKETS if each in self._connected and each not in self._welcomed]

    def receive(self, socket: SocketName, message: Welcome | Grant | Recall) -> Sequence[HubAction]:
        """A message about the session has come. Those of an earlier number, or for another epoch, change nothing.

        But for ``named_epoch``: a replica names its present epoch in each of them.
        """
        # Of one socket only: what is late on the other must not bring back an earlier epoch.
        if socket == "output" and message.epoch:
            self.named_epoch = message.epoch
        if isinstance(message, Welcome):
            return self._receive_welcome(socket, message)
        if socket == "input":
            return [MessageRefused(Flaw.MISPLACED, message.epoch)]
        if (message.epoch, message.session) != (self.epoch, self.number):
            return [MessageRefused(Flaw.SESSION, message.epoch)]
        if isinstance(message, Recall):
            return self._receive_recall(message)
        if self.is_open:
            return [CreditsGranted(message.credits, message.queue_length)]
        self._early_credits = min(self._early_credits + message.credits, _MAX_CREDITS)
        return []

    def want_credits(self, waiting: int, oldest_wait_s: float) -> Sequence[HubAction]:
        """So many requests wait for a slot of the replica, the oldest for so long; does nothing without a session."""
        if not self.is_open:
            return []
        want = WantCredits(epoch=self.epoch, session=self.number, waiting=waiting, oldest_wait_s=oldest_wait_s)
        return [SendToReplica("input", want)]

    def return_credits(self, session: int, credits_: int) -> Sequence[HubAction]:
        """Answer a Recall of that session by so many unspent credits; does nothing if the session has ended."""
        if not self.is_open or session != self.number:
            return []
        return [SendToReplica("input", ReturnCredits(epoch=self.epoch, session=session, credits=credits_))]

    def _receive_welcome(self, socket: SocketName, message: Welcome) -> Sequence[HubAction]:
        if message.epoch != self.epoch:
            return [MessageRefused(Flaw.EPOCH, message.epoch)]
        self._lends = self._lends or message.session != 0
        if message.session == 0 and self._lends:
            # While the session is not open yet, our Hello on this socket is on its way to the replica (rule 6).
            return self._lose("the replica has given us up", given_up=True) if self.is_open else []
        # The answer to an earlier Hello may come late; a replica that lends no credits names no session.
        if message.session not in (0, self.number):
            return []
        self.is_gated = self.is_gated or message.session == self.number
        self._welcomed.add(socket)
        if self.is_open or len(self._welcomed) < len(SOCKETS):
            return []
        return self._open(message)

    def _open(self, message: Welcome) -> Sequence[HubAction]:
        self.is_open = self._may_be_answered = True
        self._remember_epoch(message.epoch)
        returns, self._early_returns = self._early_returns, []
        early, self._early_credits = self._early_credits, 0
        actions = [action for credits_ in returns for action in self.return_credits(self.number, credits_)]
        actions.append(SessionOpened(message.queue_length, self.is_gated))
        if early:
            actions.append(CreditsGranted(early, message.queue_length))
        return actions

    def _receive_recall(self, message: Recall) -> Sequence[HubAction]:
        if self.is_open:
            return [CreditsRecalled(message.session, message.credits)]
        # Answered once the session is open: the replica handles nothing on ``input`` before it has our Hello there.
        given_back = min(message.credits, self._early_credits)
        self._early_credits -= given_back
        if len(self._early_returns) < _MAX_EARLY_RETURNS:
            self._early_returns.append(given_back)
        else:
            self._early_returns[-1] = min(self._early_returns[-1] + given_back, _MAX_CREDITS)
        return []

    def _hello(self, socket: SocketName) -> SendToReplica:
        hello = Hello(hub_id=self._hub_id, epoch=self.epoch, session=self.number, wire_version=VERSION_CUT)
        return SendToReplica(socket, hello)

    def _begin_number(self) -> None:
        # Both sockets have to be greeted again: what was granted on one may have been lost with the other.
        self.number += 1
        self.is_gated = False
        self._welcomed.clear()
        self._early_credits = 0
        self._early_returns.clear()

    def _lose(self, reason: str, *, given_up: bool = False) -> Sequence[HubAction]:
        self._begin_number()
        return self._close(reason, lost=True, given_up=given_up)

    def _close(self, reason: str, *, lost: bool, given_up: bool = False) -> Sequence[HubAction]:
        # After a change of epoch work goes on without a session: the loss of the connection is news then, too.
        is_news = self.is_open or (lost and self._may_be_answered)
        if not is_news:
            return []
        self.is_open, self._may_be_answered = False, not lost
        return [SessionClosed(reason, lost, given_up)]


class ReplicaSessions(_Role):
    """The replica's role, towards all hubs. A connection goes by its routing id, which is the same on both sockets."""

    def __init__(self) -> None:
        super().__init__(epoch=0)
        #: The last Hello of each connection and socket, for whatever epoch; oldest first.
        self._hellos: dict[tuple[SocketName, str], tuple[Peer, Hello]] = {}
        #: The connections in ``_hellos``, by hub and name. That which greeted last is the last of its hub, and so is
        #: the hub. At most ``_MAX_CONNECTIONS`` each, of ``_MAX_HUBS``.
        self._connections: dict[str, dict[str, Peer]] = {}
        #: Connections that were given up and may still stand, by hub and name, until they greet again (rule 6). Bounded
        #: likewise.
        self._given_up: dict[str, dict[str, Peer]] = {}
        #: The connections whose last Hello says that the hub takes messages that are cut, oldest first. Bounded, too.
        self._cuts: dict[str, None] = {}
        self.revoked: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return (
            f"ReplicaSessions(epoch={self.epoch}, connections={len(self.peers())}, "
            f"given_up={sum(map(len, self._given_up.values()))}, "
            f"revoked={len(self.revoked)})"
        )

    def begin_epoch(self, epoch: int) -> Sequence[ReplicaAction]:
        """The registry knows this process under an epoch: welcome the hubs that knew of it before, and tell the others.

        Idempotent.
        """
        if epoch == self.epoch:
            return []
        self.epoch = epoch
        if not epoch or epoch in self._epochs:
            return []
        self._remember_epoch(epoch)
        waiting = [(socket, peer, hello) for (socket, _), (peer, hello) in self._hellos.items() if hello.epoch == epoch]
        others = [
            peer for (socket, _), (peer, hello) in self._hellos.items() if socket == "output" and hello.epoch != epoch
        ]
        welcomes = [action for each in waiting for action in self._welcome(*each)]
        # Their work is refused from now on: of several records of this process, only it knows which one counts.
        return [*welcomes, *(action for peer in others for action in self.probe(peer))]

    def receive_hello(self, socket: SocketName, peer: Peer, hello: Hello) -> Sequence[ReplicaAction]:
        """A hub greets on one socket. Raise ForeignIdentityError if it gives another hub's name."""
        if hello.hub_id != peer.hub_id:
            raise ForeignIdentityError(f"hub {peer.hub_id!r} says that it is {hello.hub_id!r}")
        if peer.hub_id in self.revoked:
            return [MessageRefused(Flaw.REVOKED, hello.epoch)]
        if socket == "output":
            _forget(self._given_up, peer)
        self._hellos.pop((socket, peer.name), None)
        self._hellos[socket, peer.name] = peer, hello
        self._note_version(peer.name, hello)
        ended = [action for each in _remember(self._connections, peer) for action in self.give_up(each, is_gone=False)]
        if not self.epoch:
            return ended
        if hello.epoch != self.epoch:
            return [*ended, MessageRefused(Flaw.EPOCH, hello.epoch)]
        return [*ended, *self._welcome(socket, peer, hello)]

    def _note_version(self, name: str, hello: Hello) -> None:
        self._cuts.pop(name, None)
        if takes_cut(hello.wire_version):
            self._cuts[name] = None
            if len(self._cuts) > _MAX_HUBS:
                del self._cuts[next(iter(self._cuts))]

    def peers(self) -> list[Peer]:
        """The connections with a Hello on ``output`` that were not given up since."""
        return [peer for (socket, _), (peer, _) in self._hellos.items() if socket == "output"]

    def takes_cut(self, name: str) -> bool:
        """Whether the connection has said that its hub takes messages that are cut; also if it was given up since."""
        return name in self._cuts

    def probed_peers(self) -> dict[str, Peer]:
        """The connections to probe while nothing else is sent to them, by name: those greeted and those given up."""
        given_up = {name: peer for of_hub in self._given_up.values() for name, peer in of_hub.items()}
        return given_up | {peer.name: peer for peer in self.peers()}

    def connections_of(self, hub_ids: Set[str]) -> list[Peer]:
        """The connections of these hubs, greeted on either socket or given up."""
        return [
            peer
            for table in (self._connections, self._given_up)
            for hub in hub_ids
            for peer in table.get(hub, {}).values()
        ]

    def probe(self, peer: Peer) -> Sequence[ReplicaAction]:
        """The replica's timer: a Welcome on ``output``, which shows the hub our state, and us whether it is there."""
        if peer.hub_id in self.revoked:
            return []
        known = self._hellos.get(("output", peer.name))
        return [SendWelcome("output", peer, self.epoch, 0 if known is None else known[1].session)]

    def give_up(self, peer: Peer, *, is_gone: bool) -> Sequence[ReplicaAction]:
        """End the connection's session. ``is_gone``: it was lost; else it may stand, and its hub is probed."""
        for socket in SOCKETS:
            self._hellos.pop((socket, peer.name), None)
        _forget(self._connections, peer)
        _forget(self._given_up, peer)
        if is_gone:
            self._cuts.pop(peer.name, None)
        else:
            _remember(self._given_up, peer)
        return [CloseCredits(peer.name)]

    def revoke_hubs(self, hub_ids: Iterable[str]) -> frozenset[str]:
        """From now on exactly these hubs are revoked; return those that were not. The driver gives them up."""
        before, self.revoked = self.revoked, frozenset(hub_ids)
        return self.revoked - before

    def _welcome(self, socket: SocketName, peer: Peer, hello: Hello) -> Sequence[ReplicaAction]:
        if peer.hub_id in self.revoked:
            return []
        welcome = SendWelcome(socket, peer, self.epoch, hello.session)
        if socket == "output" and hello.session:
            return [welcome, OpenCredits(peer.name, hello.session)]
        return [welcome]


def _remember(table: dict[str, dict[str, Peer]], peer: Peer) -> list[Peer]:
    """Make a connection the last of its hub, and return those that are one too many now, which are forgotten.

    They are of the same hub, unless there are too many hubs.
    """
    of_hub = table.pop(peer.hub_id, {})
    table[peer.hub_id] = of_hub
    of_hub.pop(peer.name, None)
    of_hub[peer.name] = peer
    if len(of_hub) > _MAX_CONNECTIONS:
        return [of_hub.pop(next(iter(of_hub)))]
    if len(table) > _MAX_HUBS:
        return list(table.pop(next(iter(table))).values())
    return []


def _forget(table: dict[str, dict[str, Peer]], peer: Peer) -> None:
    of_hub = table.get(peer.hub_id, {})
    of_hub.pop(peer.name, None)
    if not of_hub:
        table.pop(peer.hub_id, None)
