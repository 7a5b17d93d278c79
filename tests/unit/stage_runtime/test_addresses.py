"""Where replicas listen and which address they give to hubs."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from omni_discovery.errors import ConfigError
from stage_runtime import addresses
from stage_runtime.addresses import find_hosts, tcp_address

#: What the kernel would take as the source of packets to these.
ROUTES = {"10.0.0.9": "10.0.0.7", "fd00::9": "fd00::7", "fe80::9": "fe80::7", "0.0.0.9": "0.0.0.0"}


class _Probe:
    """A UDP socket that can be connected only where there is a route."""

    def __init__(self, family: int, kind: int) -> None:
        self._source = ""

    def connect(self, address: tuple[str, int]) -> None:
        if address[0] not in ROUTES:
            raise OSError(101, "Network is unreachable")
        self._source = ROUTES[address[0]]

    def getsockname(self) -> tuple[str, int]:
        return self._source, 40000

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"both": ["192.0.2.1", "fd00::9"], "six": ["fd00::9"]}

    def getaddrinfo(host: str, port: int | None, **_: Any) -> list[tuple[Any, ...]]:
        if host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        found = names.get(host, [host])
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_DGRAM, 0, "", (each, port or 0))
            for each in found
        ]

    monkeypatch.setattr(addresses.socket, "socket", _Probe)
    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("endpoints", "host"),
    [
        ("10.0.0.9:2379", "10.0.0.7"),
        ("unix:///run/omni/etcd:2379", "127.0.0.1"),
        ("[fd00::9]:2379", "fd00::7"),
        ("192.0.2.1:2379,10.0.0.9:2379", "10.0.0.7"),
        ("both:2379", "fd00::7"),
        ("localhost:2379", "127.0.0.1"),
        ("ip6-localhost:2379", "::1"),
    ],
)
def test_it_is_the_address_from_which_this_machine_talks_to_etcd(endpoints: str, host: str) -> None:
    """The first endpoint and the first of its addresses that have a route."""
    assert find_hosts(endpoints) == (host, host)


@pytest.mark.parametrize(
    ("given", "bound", "advertised"),
    [
        ("203.0.113.5", "0.0.0.0", "203.0.113.5"),
        ("[fd00::5]", "::", "fd00::5"),
        ("gpu-7.example", "0.0.0.0", "gpu-7.example"),
        ("six", "::", "six"),
        ("both", "0.0.0.0", "both"),
        ("nowhere", "0.0.0.0", "nowhere"),
        ("127.0.0.3", "127.0.0.3", "127.0.0.3"),
        ("localhost", "127.0.0.1", "localhost"),
        ("[::1]", "::1", "::1"),
    ],
)
def test_an_address_that_is_given_is_advertised_and_all_interfaces_listened_on_but_for_loopback(
    given: str, bound: str, advertised: str
) -> None:
    assert find_hosts("192.0.2.1:2379", given) == (bound, advertised)


@pytest.mark.parametrize("endpoints", ["192.0.2.1:2379", "[fe80::9]:2379", "0.0.0.9:2379"])
def test_without_an_address_that_others_can_reach_one_is_asked_for(endpoints: str) -> None:
    with pytest.raises(ConfigError, match=r"no address to give to hubs .* say one with --omni-replica-address"):
        find_hosts(endpoints)


def test_addresses_are_written_as_zmq_reads_them() -> None:
    assert tcp_address("10.0.0.7", 5) == "tcp://10.0.0.7:5"
    assert tcp_address("fd00::7", 5) == "tcp://[fd00::7]:5"
