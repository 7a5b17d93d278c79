"""A record's address is a host and a port; what would make the hub open anything else is refused."""

from __future__ import annotations

import re

import pytest

from omni_discovery.errors import ConfigError
from omni_discovery.records.addresses import TcpAddress, parse_address


@pytest.mark.parametrize(
    ("addr", "read", "is_numeric"),
    [
        ("tcp://127.0.0.1:5000", TcpAddress("127.0.0.1", 5000), True),
        ("tcp://[::1]:5000", TcpAddress("::1", 5000), True),
        ("tcp://[fe80::1%eth0]:65535", TcpAddress("fe80::1%eth0", 65535), True),
        ("tcp://::1:5000", TcpAddress("::1", 5000), True),
        ("tcp://gpu-9:1", TcpAddress("gpu-9", 1), False),
        (
            "tcp://echo-0.replicas.svc.local.:80",
            TcpAddress("echo-0.replicas.svc.local.", 80),
            False,
        ),
        # What looks like a number and is none to us, ZMQ would take for a name: it goes to the resolver.
        ("tcp://127.1:5", TcpAddress("127.1", 5), False),
    ],
)
def test_hosts_by_number_and_by_name(addr: str, read: TcpAddress, is_numeric: bool) -> None:
    assert parse_address(addr) == read
    assert read.is_numeric is is_numeric


@pytest.mark.parametrize(
    "addr",
    [
        "ipc:///run/docker.sock",
        "inproc://zeromq.zap.01",
        "udp://127.0.0.1:5",
        "ws://127.0.0.1:5",
        "epgm://eth0;239.192.1.1:5",
        "tcp://*:5000",
        "tcp://:5000",
        "tcp://h",
        "tcp://h:",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://h:*",
        "tcp://h:+5",
        "tcp://h:٣",
        "tcp://10.0.0.1:0;10.0.0.2:5000",
        "tcp://[gpu-9]:5",
        "tcp://[127.0.0.1]:5",
        "tcp://a b:5",
        "tcp://a\n:5",
        "tcp://-h:5",
        "tcp://" + "h" * 300 + ":5",
        "TCP://h:5",
        "",
    ],
)
def test_all_else_is_refused_in_words_of_bounded_length(addr: str) -> None:
    with pytest.raises(ConfigError, match="its address") as raised:
        parse_address(addr)
    assert len(str(raised.value)) < 220


def test_zmq_gets_numbers_with_brackets_where_they_need_them() -> None:
    address = parse_address("tcp://gpu-9:7")
    assert (address.endpoint("10.0.0.9"), address.endpoint("fd00::9")) == ("tcp://10.0.0.9:7", "tcp://[fd00::9]:7")


@pytest.mark.parametrize(("length", "shown"), [(100, "x" * 100), (101, "x" * 100 + "...")])
def test_an_address_is_shown_whole_up_to_a_hundred_characters(length: int, shown: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"its address '{shown}' can't be used")):
        parse_address("x" * length)


@pytest.mark.parametrize("addr", ["tcp://[::12:5", "tcp://1::12]:5"])
def test_one_bracket_is_none(addr: str) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        parse_address(addr)
