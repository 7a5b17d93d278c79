"""Ports on loopback: whoever says ``localhost`` reaches us, whichever address it tries first."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from omni_discovery.errors import ConfigError
from omni_discovery.sockets import listen
from omni_discovery.sockets.listen import Sharing, bind
from tests.support.loopback import HAS_IPV6

needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def addresses(stack: ExitStack, host: str, port: int = 0) -> list[tuple[str, int]]:
    """Where it listens."""
    listeners = [stack.enter_context(each) for each in bind(host, port)]
    return [each.getsockname()[:2] for each in listeners]


@pytest.mark.attack("F3")
@needs_ipv6
@pytest.mark.parametrize(
    ("host", "others"),
    [("127.0.0.1", ["::1"]), ("localhost", ["::1"]), ("::1", ["127.0.0.1"]), ("0.0.0.0", ["::1"]), ("127.0.0.2", [])],
)
def test_a_port_is_taken_on_both_addresses_of_loopback(stack: ExitStack, host: str, others: list[str]) -> None:
    (_, port), *rest = addresses(stack, host)
    assert rest == [(other, port) for other in others]
    for address in ("127.0.0.1", "::1") if others else (host,):
        stack.enter_context(socket.create_connection((address, port), timeout=30.0))


@pytest.mark.attack("F3")
@needs_ipv6
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1"), ("0.0.0.0", "::1")])
def test_a_port_that_is_taken_on_the_other_address_is_refused_and_left_free(
    stack: ExitStack, host: str, other: str
) -> None:
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.create_server((other, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"can't listen on {other} port {port}: .* choose another --port"):
            bind(host, port)
    assert (host, port) in addresses(stack, host, port)


def refusing(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[tuple[str, int]]:
    """Have ::1 refused with this errno so many times; return the ports that were asked for, as they come."""
    asked: list[tuple[str, int]] = []
    real = listen._listen

    def listening(host: str, port: int, sharing: Sharing) -> socket.socket:
        asked.append((host, port))
        if host == "::1" and [each for each, _ in asked].count("::1") <= times:
            raise OSError(number, os.strerror(number))
        return real("127.0.0.2" if host == "::1" else host, port, sharing)

    monkeypatch.setattr(listen, "_listen", listening)
    return asked


def test_a_free_port_is_free_on_both(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. three ports that are free on 127.0.0.1 are taken on ::1; 2. the fourth is free on both, and so it is used"""
    asked = refusing(monkeypatch, errno.EADDRINUSE, 3)
    found = addresses(stack, "127.0.0.1")
    tried = [port for host, port in asked if host == "::1"]
    assert len(tried) == 4
    assert found == [("127.0.0.1", tried[-1]), ("127.0.0.2", tried[-1])]


def test_without_any_port_that_is_free_on_both_it_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, errno.EADDRINUSE, 1000)
    with pytest.raises(ConfigError, match=r"can't listen on ::1 port \d+: Address already in use; what listens there"):
        bind("127.0.0.1", 0)


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_a_machine_without_ipv6_has_one_address(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    refusing(monkeypatch, number, 1000)
    ((host, _),) = addresses(stack, "127.0.0.1")
    assert host == "127.0.0.1"


def test_an_address_that_is_not_here_is_named_with_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1 port 0: .* choose another --admin-host"):
        bind("192.0.2.1", 0, "--admin-port", "--admin-host")


def test_a_port_is_shared_with_those_alone_who_join_it(stack: ExitStack) -> None:
    """1. one takes a port that may be shared; two join it, on all of its addresses, and get no client until they listen
    2. to nobody else it is free, be it to share it or not; 3. those who listen get clients; one that has gone gets none
    """
    first = bind("127.0.0.1", 0, sharing=Sharing.FIRST)
    port = first[0].getsockname()[1]
    joined = [bind("127.0.0.1", port, sharing=Sharing.JOINS) for _ in range(2)]
    for each in (first, *joined):
        for listener in each:
            stack.enter_context(listener)
    assert [len(each) for each in joined] == [len(first)] * 2
    for sharing in (Sharing.NONE, Sharing.FIRST):
        with pytest.raises(ConfigError, match="Address already in use"):
            bind("127.0.0.1", port, sharing=sharing)
    assert clients_of(port, first[0], joined[0][0]) == [64, 0]
    joined[0][0].listen(listen.BACKLOG)
    both = clients_of(port, first[0], joined[0][0])
    assert sum(both) == 64
    assert min(both) > 8, "by chance once in 10**9 times"
    first[0].close()
    assert clients_of(port, joined[0][0]) == [64]


def clients_of(port: int, *listeners: socket.socket) -> list[int]:
    """How many of 64 clients each gets."""
    for _ in range(64):
        socket.create_connection(("127.0.0.1", port), timeout=30.0).close()
    found = []
    for listener in listeners:
        listener.setblocking(False)
        count = 0
        with suppress(OSError):
            while True:
                listener.accept()[0].close()
                count += 1
        found.append(count)
    return found


def test_a_port_that_nobody_shares_cannot_be_joined(stack: ExitStack) -> None:
    ((_, port), *_) = addresses(stack, "127.0.0.1")
    with pytest.raises(ConfigError, match="Address already in use"):
        bind("127.0.0.1", port, sharing=Sharing.JOINS)
