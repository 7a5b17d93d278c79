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
@pytest.mark.parametrize("token", [TOKEN, ""], ids=["proved once", "proved with every frame"])
def test_of_one_hub_the_latest_connections_are_heard_and_few_new_ones(token: str) -> None:
    """1. a hundred, one each second  2. a hundred at once: eight of them  3. a second later, one more"""
    now_s = [0.0]
    peers = Peers(has_keys=True, now=lambda: now_s[0])

    def hears(number: int, hub: str = "a") -> bool:
        return peers.identify_peer(f"{hub}/{token}{number}".encode(), lambda: {hub}) is not None

    assert hears(0, "b")
    for number in range(100):
        now_s[0] += 1.0
        assert hears(number)
    assert [number for number in range(100) if hears(number)] == [96, 97, 98, 99]
    now_s[0] += 100.0
    assert [hears(number) for number in range(100, 200)] == [True] * 8 + [False] * 92
    assert hears(0, "b")
    now_s[0] += 1.0
    assert [hears(number) for number in range(150, 152)] == [True, False]
    assert len(peers.known) == (5 if token else 0)
    with pytest.raises(ForeignIdentityError):
        peers.identify_peer(f"a/{token}0".encode(), lambda: {"b"})


def test_without_keys_nobody_can_shut_a_hub_out() -> None:
    peers = Peers(has_keys=False)
    for number in (*range(100), 0):
        assert peers.identify_peer(f"a/{TOKEN}{number}".encode(), frozenset) is not None
    assert len(peers.known) == 4
