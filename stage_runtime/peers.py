"""Who speaks: the routing ids of one socket, and the hubs that they belong to.

A hub connects as ``<hub_id>/<token>``. ZMQ lets whoever names a routing id take its connection over, so that a hub that
comes back is not shut out by its own dead connection; the token, which no other hub can guess, keeps others from doing
that. The key of a connection says which hub it is: no routing id is believed before its first frame has shown that both
agree. A routing id without a token is looked at with every frame, since its connection may change hands at any time:
nobody speaks in another's name, but output to such a one is only as safe as the registered hubs are honest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_discovery.errors import WireError

#: Tokens shorter than that can be guessed, and count as none.
_MIN_TOKEN: Final = 16
#: How many routing ids of one hub are remembered, and over all hubs.
_MAX_OF_HUB: Final = 16
_MAX_KNOWN: Final = 4096


class ForeignIdentityError(WireError):
    """A frame came under a routing id that its connection has no right to."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One connection of a hub, under the name that its answers are routed by."""

    name: str
    hub_id: str


class Peers:
    """The routing ids of one socket. ``has_keys``: connections carry the hub id of their key, and must."""

    def __init__(self, *, has_keys: bool) -> None:
        self._has_keys = has_keys
        self._revoked: frozenset[str] = frozenset()
        #: Those that were proved and can't change hands, by routing id; a frame from any of them is its hub's.
        self.known: dict[bytes, Peer] = {}

    def prove(self, routing_id: bytes, hub_of_key: Callable[[], str | None]) -> Peer | None:
        """Whose frame it is; None for a revoked hub's. Raise ForeignIdentityError if its key is another hub's.

        Without keys there is nothing to compare with, and everybody is who he says.
        """
        try:
            name = routing_id.decode("utf-8")
        except UnicodeDecodeError:
            raise ForeignIdentityError("a routing id that is no text") from None
        hub_id, _, token = name.partition("/")
        if not hub_id or (self._has_keys and hub_of_key() != hub_id):
            raise ForeignIdentityError(f"the key is not the one of hub {hub_id!r}")
        if hub_id in self._revoked:
            return None
        peer = Peer(name, hub_id)
        if len(token) >= _MIN_TOKEN:
            self._remember(routing_id, peer)
        return peer

    def revoke(self, hub_ids: frozenset[str]) -> None:
        """From now on these hubs, and no others, are not listened to."""
        self._revoked = hub_ids
        for routing_id in [each for each, peer in self.known.items() if peer.hub_id in hub_ids]:
            del self.known[routing_id]

    def _remember(self, routing_id: bytes, peer: Peer) -> None:
        of_hub = [each for each, known in self.known.items() if known.hub_id == peer.hub_id]
        if len(of_hub) >= _MAX_OF_HUB:
            del self.known[of_hub[0]]
        elif len(self.known) >= _MAX_KNOWN:
            del self.known[next(iter(self.known))]
        self.known[routing_id] = peer
