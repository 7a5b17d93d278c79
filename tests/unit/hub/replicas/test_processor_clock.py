"""The processor time of a thread is known to a millisecond, by one reading in each."""

from __future__ import annotations

import threading
import time

import pytest

from hub.replicas.sockets import READ_EVERY_S, ProcessorClock


class _Machine:
    """A clock, and a processor that the thread has now and then."""

    def __init__(self) -> None:
        self.now_s, self.used_s, self.readings = 0.0, 5.0, 0

    def read_s(self) -> float:
        self.readings += 1
        return self.used_s

    def pass_time(self, seconds: float, *, works: bool) -> None:
        self.now_s += seconds
        self.used_s += seconds if works else 0.0


def _clock() -> tuple[_Machine, ProcessorClock]:
    machine = _Machine()
    return machine, ProcessorClock(lambda: machine.now_s, machine.read_s)


@pytest.mark.parametrize("works", [True, False])
def test_within_a_millisecond_the_kernel_is_asked_once(works: bool) -> None:
    machine, clock = _clock()
    for _ in range(1000):
        assert machine.used_s - 1e-9 <= clock.used_s() <= machine.used_s + READ_EVERY_S + 1e-9
        machine.pass_time(READ_EVERY_S / 100, works=works)
    assert 9 <= machine.readings <= 10


def test_a_turn_that_waited_for_the_processor_is_no_long_one() -> None:
    """1. a turn begins; 2. another process has the processor for a second; 3. it goes on, for five milliseconds"""
    machine, clock = _clock()
    clock.used_s()
    machine.pass_time(READ_EVERY_S / 2, works=True)
    began_s = clock.used_s()
    machine.pass_time(1.0, works=False)
    machine.pass_time(0.005, works=True)
    assert clock.used_s() - began_s == pytest.approx(0.005)


def test_each_thread_has_its_own() -> None:
    clock, others = ProcessorClock(), list[float]()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    thread = threading.Thread(target=lambda: others.append(clock.used_s()))
    thread.start()
    thread.join()
    assert others[0] < clock.used_s() - 0.04
