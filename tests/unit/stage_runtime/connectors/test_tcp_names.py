"""A producer may name a host that no DNS answers for: fetches from it end in time, and others are not kept waiting."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from stage_runtime.connectors.base import fetching_from
from stage_runtime.connectors.errors import TransferCancelledError, TransferError, TransferTimeoutError
from stage_runtime.connectors.tcp.names import Found, Names

FOUND: Found = [(socket.AF_INET, socket.SOCK_STREAM, 6, ("10.0.0.1", 80))]


class Dns:
    """Answers for all hosts but those under ``silent.``, for which it does so at the end of the test.

    So it does for the others while it ``hangs``, and while it ``fails`` it knows none of them.
    """

    def __init__(self) -> None:
        self.hangs = self.fails = False
        self.asked: list[str] = []
        self.go_on = threading.Event()

    def look_up(self, host: str, port: int) -> Found:
        self.asked.append(host)
        if host.startswith("silent") or self.hangs:
            self.go_on.wait(30)
        if host == "unknown" or self.fails:
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
    for number in range(200):
        with pytest.raises(TransferError):
            names.addresses(f"silent{number}", 80, 30.0)
    assert len(dns.asked) <= 128
    assert names.addresses("127.0.0.1", 80, 1.0) == FOUND
    dns.go_on.set()


@pytest.mark.attack("Q61")
def test_names_of_one_producer_that_hang_keep_no_name_of_another_waiting(dns: Dns) -> None:
    """1. one replica hands over at a hundred names that no DNS answers for; 2. the name of another is found at once"""
    names = Names(dns.look_up, timeout_s=0.0)
    with fetching_from("0/6"):
        for number in range(100):
            with pytest.raises(TransferError, match=f"silent{number}"):
                names.addresses(f"silent{number}", 80, 30.0)
    assert len(dns.asked) == 4
    patient = Names(dns.look_up)
    with fetching_from("0/6"):
        for number in range(4):
            with pytest.raises(TransferError):
                patient.addresses(f"silent{number}", 80, 0.0)
        with pytest.raises(TransferError, match="4 other names of replica 0/6"):
            patient.addresses("host", 80, 5.0)
    with fetching_from("0/7"):
        assert patient.addresses("host", 80, 5.0) == FOUND
    dns.go_on.set()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.attack("P33")
def test_a_name_that_was_found_once_stays_while_dns_is_slow(dns: Dns) -> None:
    """1. found at 0 s; 2. from 31 s on the DNS hangs: there is one look-up, and what was found counts all the time,
    after a moment at most
    """
    clock = Clock()
    names = Names(dns.look_up, timeout_s=60.0, now=clock)
    assert names.addresses("host", 80, 5.0) == FOUND
    dns.hangs = True
    began_s = time.monotonic()
    for clock.now_s in (31.0, 33.0, 60.0, 1000.0):
        assert names.addresses("host", 80, 60.0) == FOUND
    assert time.monotonic() - began_s < 20.0
    assert dns.asked == ["host", "host"]
    dns.go_on.set()


@pytest.mark.attack("P33")
def test_a_name_that_was_found_once_stays_for_as_long_as_dns_fails_and_is_tried_again(dns: Dns) -> None:
    clock = Clock()
    names = Names(dns.look_up, now=clock)
    assert names.addresses("host", 80, 5.0) == FOUND
    dns.fails = True
    for clock.now_s in (31.0, 32.0, 35.9, 37.0, 1000.0):
        assert names.addresses("host", 80, 5.0) == FOUND
    assert dns.asked == ["host"] * 4, "at 0, 31, 37 and 1000 s"


def test_a_host_that_has_moved_is_found_at_its_new_address_by_the_first_fetch_after_half_a_minute() -> None:
    clock, found = Clock(), {"host": FOUND}
    names = Names(lambda host, _: found[host], now=clock)
    assert names.addresses("host", 80, 5.0) == FOUND
    found["host"] = [(socket.AF_INET, socket.SOCK_STREAM, 6, ("10.0.0.2", 80))]
    clock.now_s = 29.0
    assert names.addresses("host", 80, 5.0) == FOUND
    clock.now_s = 30.0
    assert names.addresses("host", 80, 5.0) == found["host"]


@pytest.mark.attack("P33")
def test_names_that_hang_keep_no_name_waiting_that_was_found_before(dns: Dns) -> None:
    """1. all look-ups of names without a number hang; 2. one with a number is still looked up again"""
    clock = Clock()
    names = Names(dns.look_up, now=clock)
    assert names.addresses("host", 80, 5.0) == FOUND
    for number in range(150):
        with pytest.raises(TransferError):
            names.addresses(f"silent{number}", 80, 0.0)
    clock.now_s = 31.0
    assert names.addresses("host", 80, 5.0) == FOUND
    deadline_s = time.monotonic() + 30.0
    while dns.asked.count("host") < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert dns.asked.count("host") == 2
    dns.go_on.set()


@pytest.mark.attack("P33")
def test_names_without_a_number_are_forgotten_first(dns: Dns) -> None:
    names = Names(dns.look_up)
    names.addresses("host", 80, 5.0)
    dns.fails = True
    for number in range(1500):
        with pytest.raises(TransferError):
            names.addresses(f"other{number}", 80, 5.0)
    assert names.addresses("host", 80, 5.0) == FOUND
    assert dns.asked.count("host") == 1


def test_a_fetch_that_is_cancelled_waits_for_no_name(dns: Dns) -> None:
    def cancelled() -> None:
        raise TransferCancelledError("over")

    began_s = time.monotonic()
    with pytest.raises(TransferCancelledError):
        Names(dns.look_up, timeout_s=60.0).addresses("silent", 80, 60.0, cancelled)
    assert time.monotonic() - began_s < 30.0
    dns.go_on.set()
