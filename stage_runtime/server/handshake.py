"""Drives the replica's role of the session protocol (omni_discovery/wire/session.py), and lends credits under it.

Part of the sessions with all hubs (sessions.py), and like them owned by the ZMQ thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from omni_discovery import wire
from omni_discovery.commands.flags import CURVE
from omni_discovery.curve import is_public_key
from omni_discovery.log_once import LogOnce
from omni_discovery.records.schema import HubRecord
from omni_discovery.wire.session import (
    CloseCredits,
    Flaw,
    MessageRefused,
    MisplacedError,
    OpenCredits,
    Peer,
    ReplicaAction,
    ReplicaSessions,
    SendWelcome,
    SocketName,
    same_security,
)
from stage_runtime.lifecycle import LifeState
from stage_runtime.server.credits import CreditBook, DoubtHub, GrantCredits
from stage_runtime.server.ledger import Ledger
from stage_runtime.server.outbox import Outbox

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The part of the replica's state that the ZMQ thread reads, for every request."""

    life_state: Callable[[], LifeState]
    capacity: Callable[[], int]


class Handshake:
    """Answers Hello, refuses frames for other epochs, and lends the replica's slots to hubs with a session."""

    def __init__(
        self, state: ReplicaState, ledger: Ledger, counters: Counter[str], acks: Outbox, replies: Outbox
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._counters = counters
        self._outboxes: dict[SocketName, Outbox] = {"input": acks, "output": replies}
        self._protocol = ReplicaSessions()
        self.credits = CreditBook()
        #: The epoch that the registry has for this replica; 0 before the first. Written by the lease's thread, and
        #: taken over by ``follow_epoch``.
        self.registered_epoch = 0
        self._log_once = LogOnce()

    def __repr__(self) -> str:
        return f"Handshake({self._protocol!r}, {self.credits!r})"

    def greet(self, socket: SocketName, peer: Peer, hello: wire.Hello) -> None:
        """A hub opens its session on one socket. Raise ForeignIdentityError if it gives another hub's name."""
        self._carry_out(self._protocol.receive_hello(socket, peer, hello))

    def follow_epoch(self) -> None:
        """Take over the registered epoch: welcome the hubs that knew of it before this replica did."""
        self._carry_out(self._protocol.begin_epoch(self.registered_epoch))

    def admits(self, socket: SocketName, message: wire.ToReplica) -> bool:
        """Whether to handle a message; one for another epoch is counted. Raise MisplacedError on the wrong socket."""
        flaw = self._protocol.flaw_of(socket, message)
        if flaw is None:
            return True
        if flaw is Flaw.MISPLACED:
            raise MisplacedError(f"{type(message).__name__} on the {socket} socket")
        self._carry_out([MessageRefused(flaw, message.epoch)])
        return False

    def admits_any(self, epochs: Sequence[int]) -> bool:
        """Whether any message under these epochs may be handled, as far as they tell; else one is counted."""
        if any(map(self._protocol.knows_epoch, epochs)):
            return True
        self._carry_out([MessageRefused(Flaw.EPOCH, epoch) for epoch in epochs[:1]])
        return False

    def greeted_peers(self) -> list[Peer]:
        """The connections with a Hello on the output socket that were not given up since."""
        return self._protocol.peers()

    def probed_peers(self) -> dict[str, Peer]:
        """The connections that get the replica's load while nothing else is sent to them, by name."""
        return self._protocol.probed_peers()

    def takes_cut(self, name: str) -> bool:
        """Whether a connection's hub has said that it takes messages that are cut."""
        return self._protocol.takes_cut(name)

    def connections_of(self, hub_ids: Set[str]) -> list[Peer]:
        """The connections of these hubs, greeted on either socket or given up."""
        return self._protocol.connections_of(hub_ids)

    def probe(self, peer: Peer) -> None:
        """Send a hub our load, unless it is revoked: only a send shows whether it is still there."""
        self._carry_out(self._protocol.probe(peer))

    def give_up(self, peer: Peer, *, is_gone: bool = False) -> None:
        """End a connection's session; unless it ``is_gone``, its hub learns of that by the next probe."""
        self._carry_out(self._protocol.give_up(peer, is_gone=is_gone))

    def revoke_hubs(self, hub_ids: frozenset[str]) -> frozenset[str]:
        """From now on these hubs, and no others, are revoked; return those that were not before."""
        return self._protocol.revoke_hubs(hub_ids)

    def settle_credits(self, now_s: float) -> None:
        """Lend free slots, recall credits that other hubs wait for. A replica that takes nothing lends nothing."""
        is_ready = self._state.life_state() is LifeState.READY
        self.credits.set_capacity(self._state.capacity() if is_ready else 0)
        for action in self.credits.lend_and_recall(now_s):
            if isinstance(action, DoubtHub):
                self._warn_of_hoarder(action)
                continue
            kind = wire.Grant if isinstance(action, GrantCredits) else wire.Recall
            message = kind(
                epoch=self._protocol.epoch,
                session=action.session,
                credits=action.credits,
                queue_length=len(self._ledger),
            )
            if not self._outboxes["output"].push_message(action.peer, wire.encode(message)):
                # It reads too slowly to be lent anything; its next session begins without credits.
                self.give_up(Peer(action.peer, action.peer.partition("/")[0]))

    def _warn_of_hoarder(self, doubt: DoubtHub) -> None:
        self._counters["hoarded_credits"] += 1
        hub_id = doubt.peer.partition("/")[0]
        if self._log_once.should(f"server.hoarded_credits {hub_id}"):
            text = (
                "server.hoarded_credits hub=%s credits=%d: it says that requests wait, and spends nothing; "
                "other hubs get the slots. If its omni_replica_hub_credits stay: omni hub revoke %s"
            )
            logger.warning(text, hub_id, doubt.credits, hub_id)

    def _carry_out(self, actions: Sequence[ReplicaAction]) -> None:
        for action in actions:
            match action:
                case SendWelcome():
                    self._send_welcome(action)
                case OpenCredits(peer, session):
                    self.credits.open_account(peer, session)
                case CloseCredits(peer):
                    self.credits.close_account(peer)
                case MessageRefused():
                    self._count_refused(action)

    def _send_welcome(self, action: SendWelcome) -> None:
        message = wire.Welcome(
            epoch=action.epoch,
            capacity=self._state.capacity(),
            queue_length=len(self._ledger),
            session=action.session,
        )
        # Where the outbox is full, the hub's next Hello or our next probe makes up for it.
        self._outboxes[action.socket].push_message(action.peer.name, wire.encode(message))

    def _count_refused(self, refused: MessageRefused) -> None:
        if refused.flaw is not Flaw.EPOCH:
            self._counters[refused.flaw] += 1
            return
        self._counters["wrong_epoch"] += 1
        if self._log_once.should("server.wrong_epoch"):
            ours = self._protocol.epoch
            logger.warning("server.wrong_epoch got=%d ours=%d (others are only counted)", refused.epoch, ours)


#: Hubs that a replica warns of by name.
_MOST_NAMED: Final = 64


def former_hubs(public_key: str, hubs: Mapping[str, HubRecord], revoked: Set[str]) -> list[str]:
    """The registered hubs of a release before that may connect, with a key of their own if this side has one."""
    return [
        hub_id
        for hub_id, hub in hubs.items()
        if hub_id not in revoked
        and not wire.takes_cut(hub.wire_version)
        and (is_public_key(hub.curve_public_key) if public_key else not hub.curve_public_key)
    ]


class SecurityMismatchLog:
    """Warns once of each hub that encrypts while this replica does not, or the other way round. For one thread."""

    def __init__(self, public_key: str) -> None:
        #: Ours; empty where connections are not encrypted.
        self._public_key = public_key
        self._named: set[str] = set()

    def warn_of_hubs(self, hubs: Mapping[str, HubRecord]) -> None:
        """Warn of those among the registered hubs, by hub id, that this replica can't talk to."""
        for hub_id, hub in hubs.items():
            if len(self._named) > _MOST_NAMED:
                return
            if not same_security(self._public_key, hub.curve_public_key) and hub_id not in self._named:
                self._named.add(hub_id)
                if len(self._named) > _MOST_NAMED:
                    logger.warning("hub.unusable_more: others like these are not named; omni doctor says more")
                    return
                theirs, ours = ("none", CURVE) if self._public_key else (CURVE, "none")
                text = "hub.unusable hub=%s: it speaks with --zmq-security %s, this replica with %s; they must agree"
                logger.warning(text, hub_id, theirs, ours)
