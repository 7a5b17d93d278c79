"""A producer may name a host that no DNS answers for: fetches from it end in time, and others are not kept waiting."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from stage_runtime.connectors.errors import TransferError, TransferTimeoutError
from stage_runtime.connectors.tcp.names import Found, Names

FOUND: Found = [(socket.AF_INET, socket.SOCK_STREAM, 6, ("10.0.0.1", 80))]


class Dns:
    """Answers for all hosts but those under ``silent.``, for which it does so at the end of the test."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Event()

    def look_up(self, host: str, port: int) -> Found:
        self.asked.append(host)
        if host.startswith("silent"):
            self.go_on.wait(30)
        if host == "unknown":
            raise OSError("no such host")
        return FOUND


@pytest.fixture
def dns() -> Dns:
    return Dns()


def test_numbers_are_not_looked_up_aside_and_names_once(dns: Dns) -> None:
    names = Names(dns.look_up)
    assert names.addresses("::1", 80, 1.0) == FOUND
    for _ in range(3):
        assert names.addresses("host", 80, 1.0) == FOUND
    assert dns.asked == ["::1", "host"]


def test_a_host_that_is_not_known_is_named_and_asked_for_again(dns: Dns) -> None:
    names = Names(dns.look_up)
    for _ in range(2):
        with pytest.raises(TransferError, match="unknown: no such host"):
            names.addresses("unknown", 80, 1.0)
    assert dns.asked == ["unknown", "unknown"]


@pytest.mark.attack("P33")
def test_a_name_without_an_answer_takes_no_longer_than_the_fetch_and_then_no_time(dns: Dns) -> None:
    names = Names(dns.look_up, timeout_s=0.2)
    with pytest.raises(TransferTimeoutError, match="does not answer"):
        names.addresses("silent", 80, 30.0)
    began_s = time.monotonic()
    for _ in range(100):
        with pytest.raises(TransferTimeoutError):
            names.addresses("silent", 80, 30.0)
    assert time.monotonic() - began_s < 0.2 * 50
    assert dns.asked == ["silent"]
    dns.go_on.set()


@pytest.mark.attack("P33")
def test_look_ups_that_hang_are_bounded_and_numbers_go_past_them(dns: Dns) -> None:
    names = Names(dns.look_up, timeout_s=0.0)
    for number in range(100):
        with pytest.raises(TransferError):
            names.addresses(f"silent{number}", 80, 30.0)
    assert len(dns.asked) <= 32
    assert names.addresses("127.0.0.1", 80, 1.0) == FOUND
    dns.go_on.set()
