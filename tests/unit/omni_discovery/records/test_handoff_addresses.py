"""Where replicas hand over by their records, and what references and KV parameters name."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.records.handoff_addresses import (
    ANY_PORT,
    host_of,
    is_at,
    kv_hosts,
    named_addresses,
    named_kv_hosts,
    registered_address,
    shown,
)
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


def record(input_addr: str = "tcp://10.0.0.1:1", **connectors: Any) -> ReplicaInfo:
    return ReplicaInfo(input_addr, "", 0, ReplicaStatus.UP, 0, 0.0, 0.0, connectors=connectors)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://10.0.0.1:1", "10.0.0.1"),
        ("tcp://[fe80::1]:1", "fe80::1"),
        ("http://gpu-9:8998/path", "gpu-9"),
        ("", ""),
        ("odd", ""),
    ],
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_record_without_an_address_stands_for_its_host_only() -> None:
    """Replicas of the release before registered none for TCP: any port of theirs, and no other host."""
    old = registered_address(record(), 1)
    assert old == ("10.0.0.1", ANY_PORT)
    assert is_at(("10.0.0.1", 4000), old)
    assert not is_at(("169.254.169.254", 80), old)
    new = registered_address(record(**{"0-1": {"host": "10.0.0.1", "port": 4000}}), 1)
    assert [is_at(("10.0.0.1", port), new) for port in (4000, 22, None, ANY_PORT)] == [True, False, False, False]


@pytest.mark.parametrize("where", [{"host": "10.0.0.1"}, {"host": "10.0.0.1", "port": None}])
def test_a_record_with_half_an_address_lets_no_port_pass(where: dict[str, Any]) -> None:
    assert not is_at(("10.0.0.1", 4000), registered_address(record(**{"0-1": where}), 1))


def test_addresses_are_found_also_below_a_key() -> None:
    nested = {"source_port": 1, "k": {"source_host": "a"}, "other": {"x": 1}, "list": [{"source_host": "b"}]}
    assert list(named_addresses(nested)) == [(None, 1), ("a", None)]


def test_the_hosts_of_a_kv_cache() -> None:
    """Of vLLM's parameters, and of a record: the replica's own, and what it registered besides."""
    params = {"remote_host": "10.0.0.1", "remote_bootstrap_addr": "http://[::1]:8998"}
    assert list(named_kv_hosts(params)) == ["10.0.0.1", "::1"]
    assert list(named_kv_hosts(None)) == list(named_kv_hosts({"remote_host": None})) == []
    assert kv_hosts(record()) == {"10.0.0.1"}
    assert kv_hosts(record(kv={"hosts": ["ib-1", 7]})) == {"10.0.0.1", "ib-1"}
    assert kv_hosts(record(kv="odd")) == kv_hosts(record(kv={"hosts": "odd"})) == {"10.0.0.1"}


@pytest.mark.attack("Z57")
@pytest.mark.parametrize(
    "address",
    [
        "http://10.0.0.1:x@169.254.169.254",
        "http://10.0.0.1:80@169.254.169.254:80",
        "http://169.254.169.254\\@10.0.0.1:80",
        "http://169.254.169.254#@10.0.0.1:80",
        "http://10.0.0.1:80?a",
        "http://10.0.0.1:80/a",
        "http://10.0.0.1",
        "ftp://10.0.0.1:80",
        "http://[10.0.0.1]:80:80",
        "http://10.0.0.1:80\n",
        "http://\uff11\uff10.0.0.1:80",
    ],
)
def test_a_url_that_may_lead_elsewhere_is_at_no_registered_host(address: str) -> None:
    (named,) = named_kv_hosts({"remote_bootstrap_addr": address})
    assert named == address


def test_what_is_shown_of_an_address_is_short() -> None:
    assert shown(("a", 1)) == "'a' port 1"
    assert shown(("a", ANY_PORT)) == "'a'"
    assert len(shown(("\x1b" * 10_000, 10**4000))) < 2000
