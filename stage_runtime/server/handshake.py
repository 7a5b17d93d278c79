"""Who has greeted which life of this replica, and the credits that greeting brings.

Part of the talk with all hubs (sessions.py), and like that owned by the ZMQ thread.

Hubs that a replica can't talk to, because what one encrypts the other does not: each is told of once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from omni_discovery import wire
from omni_discovery.commands.flags import CURVE
from omni_discovery.records.schema import HubRecord
from stage_runtime.lifecycle import Stage
from stage_runtime.server.credits import CreditBook, GrantCredits
from stage_runtime.server.ledger import Ledger, Ticket
from stage_runtime.server.outbox import Outbox
from stage_runtime.server.router import ForeignIdentityError, Peer

logger = logging.getLogger(__name__)

SocketName = Literal["input", "output"]

#: How many connections' greetings are remembered, and how many earlier epochs of this process.
_MAX_HELLOS: Final = 4096
_MAX_LIVES: Final = 64


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What the ZMQ thread has to know of the rest; read anew for every request."""

    stage: Callable[[], Stage]
    capacity: Callable[[], int]


class Greetings:
    """Answers Hello, says which lives are ours, and lends the replica's slots to those who have a session."""

    def __init__(
        self, state: ReplicaState, ledger: Ledger, counters: Counter[str], acks: Outbox, replies: Outbox
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._counters = counters
        self._outboxes: dict[SocketName, Outbox] = {"input": acks, "output": replies}
        self.credits = CreditBook()
        #: The life that the registry knows; 0 before the first. Set from the lease's thread.
        self.epoch = 0
        #: All lives of this process, the present one last.
        self._lives: dict[int, None] = {}
        #: Who greeted which life; answered again when the life becomes true.
        self._hellos: dict[tuple[SocketName, str], tuple[Peer, wire.Hello]] = {}
        #: Hubs that were given up and may still be there.
        self._estranged: dict[str, Peer] = {}
        self._has_warned = False

    def greet(self, socket: SocketName, peer: Peer, hello: wire.Hello) -> None:
        """A hub opens its session on one socket. Raise ForeignIdentityError if it gives another's name."""
        if hello.hub_id != peer.hub_id:
            raise ForeignIdentityError(f"hub {peer.hub_id!r} says that it is {hello.hub_id!r}")
        if socket == "output":
            self._estranged.pop(peer.name, None)
        self._hellos.pop((socket, peer.name), None)
        self._hellos[socket, peer.name] = peer, hello
        if len(self._hellos) > _MAX_HELLOS:
            del self._hellos[next(iter(self._hellos))]
        if hello.epoch == self.epoch:
            self._begin(socket, peer, hello)
        elif self.epoch:
            self.refuse_epoch(hello.epoch)

    def greet_waiting(self) -> None:
        """After a change of epoch: welcome the hubs that knew of the new life before we did."""
        epoch = self.epoch
        if not epoch or epoch in self._lives:
            return
        self._lives[epoch] = None
        while len(self._lives) > _MAX_LIVES:
            del self._lives[next(iter(self._lives))]
        for (socket, _), (peer, hello) in list(self._hellos.items()):
            if hello.epoch == epoch:
                self._begin(socket, peer, hello)

    def greeted(self) -> list[Peer]:
        """The connections for output whose hubs have said Hello and were not forgotten since."""
        return [peer for (socket, _), (peer, _) in self._hellos.items() if socket == "output"]

    def forget(self, name: str) -> None:
        """A connection is given up."""
        for socket in self._outboxes:
            self._hellos.pop((socket, name), None)
        self._estranged.pop(name, None)
        self.credits.close(name)

    def estrange(self, peer: Peer) -> None:
        """A connection is given up that may well stand: it is told that we know of no session, until it greets us."""
        self.forget(peer.name)
        self._estranged[peer.name] = peer
        if len(self._estranged) > _MAX_HELLOS:
            del self._estranged[next(iter(self._estranged))]

    def listeners(self) -> dict[str, Peer]:
        """The connections that are told our load now and then, by name."""
        return self._estranged | {peer.name: peer for peer in self.greeted()}

    def probe(self, peer: Peer) -> None:
        """Tell a hub our load: only a send shows whether it is still there."""
        _, hello = self._hellos.get(("output", peer.name), (peer, None))
        self._welcome("output", peer, 0 if hello is None else hello.session)

    def rest(self, ticket: Ticket, is_parked: bool) -> None:
        """The slot of a request is free while the engine has put it aside."""
        ticket.is_parked = is_parked
        if is_parked:
            self.credits.ended(ticket.peer.name)
        else:
            self.credits.began(ticket.peer.name, credit=False)

    def settle_credits(self, now_s: float) -> None:
        """Lend what is free, ask back what others wait for. A replica that takes nothing lends nothing."""
        is_ready = self._state.stage() is Stage.READY
        self.credits.set_capacity(self._state.capacity() if is_ready else 0)
        for action in self.credits.settle(now_s):
            kind = wire.Grant if isinstance(action, GrantCredits) else wire.Recall
            message = kind(
                epoch=self.epoch, session=action.session, credits=action.credits, queue_length=len(self._ledger)
            )
            if not self._outboxes["output"].push(action.peer, wire.encode(message)):
                # It reads too slowly to be lent anything; a new session begins anew.
                self.estrange(Peer(action.peer, action.peer.partition("/")[0]))

    def is_a_life(self, epoch: int) -> bool:
        """Whether an epoch is one of this process: what began in an earlier life may be ended in this one."""
        if epoch in self._lives:
            return True
        self.refuse_epoch(epoch)
        return False

    def is_present(self, epoch: int) -> bool:
        """Whether an epoch is the present life: nothing begins in an earlier one."""
        if epoch != self.epoch:
            self.refuse_epoch(epoch)
        return epoch == self.epoch

    def refuse_epoch(self, epoch: int) -> None:
        """A frame was for another life."""
        self._counters["wrong_epoch"] += 1
        if not self._has_warned:
            self._has_warned = True
            logger.warning("server.wrong_epoch got=%d ours=%d (others are only counted)", epoch, self.epoch)

    def _begin(self, socket: SocketName, peer: Peer, hello: wire.Hello) -> None:
        self._welcome(socket, peer, hello.session)
        if socket == "output" and hello.session:
            self.credits.open(peer.name, hello.session)

    def _welcome(self, socket: SocketName, peer: Peer, session: int) -> None:
        message = wire.Welcome(
            epoch=self.epoch, capacity=self._state.capacity(), queue_length=len(self._ledger), session=session
        )
        self._outboxes[socket].push(peer.name, wire.encode(message))


class UnlikeHubs:
    """Used by one thread."""

    def __init__(self, *, is_secured: bool) -> None:
        self._is_secured = is_secured
        self._told: set[str] = set()

    def tell(self, hubs: Mapping[str, HubRecord]) -> None:
        """Warn of those among these that nobody was warned of before."""
        for hub_id, hub in hubs.items():
            if bool(hub.curve_public_key) is not self._is_secured and hub_id not in self._told:
                self._told.add(hub_id)
                theirs, ours = ("none", CURVE) if self._is_secured else (CURVE, "none")
                text = "hub.unusable hub=%s: it speaks with --zmq-security %s, this replica with %s; they must agree"
                logger.warning(text, hub_id, theirs, ours)
