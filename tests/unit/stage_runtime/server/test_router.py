"""Whose frame it is: the routing id, the key of the connection, and revocation."""

from __future__ import annotations

import pytest

from omni_discovery.wire.session import ForeignIdentityError, Peer
from stage_runtime.server.router import Peers

TOKEN = "0123456789abcdef"


def test_a_routing_id_with_a_token_is_proved_once() -> None:
    peers = Peers(has_keys=True)
    routing_id = f"a/{TOKEN}".encode()
    assert peers.identify_peer(routing_id, lambda: {"a"}) == Peer(f"a/{TOKEN}", "a")
    assert peers.known == {routing_id: Peer(f"a/{TOKEN}", "a")}


@pytest.mark.attack("H4")
def test_a_key_that_is_in_two_records_proves_either_id() -> None:
    """Anybody can copy a public key into a record under another id; the hub that it was copied from is that hub yet."""
    peers = Peers(has_keys=True)
    assert peers.identify_peer(f"a/{TOKEN}".encode(), lambda: {"zz", "a"}) == Peer(f"a/{TOKEN}", "a")


@pytest.mark.parametrize("routing_id", [b"a", b"a/", b"a/short"])
def test_one_that_others_could_guess_is_proved_with_every_frame(routing_id: bytes) -> None:
    peers = Peers(has_keys=True)
    peer = peers.identify_peer(routing_id, lambda: {"a"})
    assert peer is not None
    assert (peer.hub_id, peers.known) == ("a", {})


@pytest.mark.parametrize(
    "routing_id", [f"a/{TOKEN}".encode(), b"a", b"", b"/" + TOKEN.encode(), b"\xff\xfe", b"\0\0abc"]
)
@pytest.mark.parametrize("hubs_of_key", [{"b"}, {"b", "ab"}, set()])
def test_what_the_key_does_not_prove_is_refused_and_not_remembered(routing_id: bytes, hubs_of_key: set[str]) -> None:
    peers = Peers(has_keys=True)
    with pytest.raises(ForeignIdentityError):
        peers.identify_peer(routing_id, lambda: hubs_of_key)
    assert peers.known == {}


def test_without_keys_everybody_is_who_he_says() -> None:
    peers = Peers(has_keys=False)
    assert peers.identify_peer(f"a/{TOKEN}".encode(), frozenset) == Peer(f"a/{TOKEN}", "a")
    with pytest.raises(ForeignIdentityError):
        peers.identify_peer(b"", frozenset)


def test_a_revoked_hub_is_not_heard_until_it_is_revoked_no_more() -> None:
    """1. a and b speak; 2. a is revoked: it is forgotten and not let in; 3. that is taken back: it is proved anew."""
    peers = Peers(has_keys=True)
    a, b = (f"{hub}/{TOKEN}".encode() for hub in "ab")
    peers.identify_peer(a, lambda: {"a"})
    peers.identify_peer(b, lambda: {"b"})
    peers.revoke_hubs(frozenset("a"))
    assert list(peers.known) == [b]
    assert peers.identify_peer(a, lambda: {"a"}) is None
    peers.revoke_hubs(frozenset())
    assert peers.identify_peer(a, lambda: {"a"}) is not None


@pytest.mark.attack("Z51")
def test_of_one_hub_the_latest_connections_are_heard() -> None:
    peers = Peers(has_keys=True)
    peers.identify_peer(f"b/{TOKEN}".encode(), lambda: {"b"})
    for number in range(100):
        peers.identify_peer(f"a/{TOKEN}{number}".encode(), lambda: {"a"})
    assert len(peers.known) == 5
    assert f"b/{TOKEN}".encode() in peers.known
    assert f"a/{TOKEN}99".encode() in peers.known
    assert peers.identify_peer(f"a/{TOKEN}95".encode(), lambda: {"a"}) is None
    assert peers.identify_peer(f"a/{TOKEN}96".encode(), lambda: {"a"}) is not None
    with pytest.raises(ForeignIdentityError):
        peers.identify_peer(f"a/{TOKEN}95".encode(), lambda: {"b"})
