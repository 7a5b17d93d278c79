"""A hand-off that can't be read: its producer is at fault, unless its consumer fails more often."""

from __future__ import annotations

import pytest

from hub.pool.hand_offs import HandOffRecord


@pytest.mark.attack("K1")
def test_a_producer_whose_hand_offs_nobody_can_read_is_at_fault() -> None:
    record = HandOffRecord()
    for number in range(30):
        consumer = f"c{number % 2}"
        assert not record.is_consumers_fault("bad", consumer, now_s=number)
        record.hand_off_read("good", consumer, now_s=number)


@pytest.mark.attack("K1")
def test_a_consumer_that_says_it_of_all_is_at_fault_soon() -> None:
    """1. what it says first is believed; 2. the others read what those producers leave, so it is not believed again"""
    record = HandOffRecord()
    assert not record.is_consumers_fault("p0", "bad", now_s=0.0)
    record.hand_off_read("p0", "good", now_s=1.0)
    assert record.is_consumers_fault("p0", "bad", now_s=2.0)
    assert not record.is_consumers_fault("p1", "bad", now_s=3.0)
    record.hand_off_read("p1", "good", now_s=4.0)
    for number in range(20):
        assert record.is_consumers_fault(f"p{number % 2}", "bad", now_s=5.0)
        record.hand_off_read(f"p{number % 2}", "good", now_s=5.0)


def test_where_there_is_one_of_each_it_is_the_producer() -> None:
    record = HandOffRecord()
    for _ in range(10):
        assert not record.is_consumers_fault("p", "c", now_s=0.0)


def test_nothing_is_kept_while_all_can_be_read_and_of_thousands_the_latest() -> None:
    record = HandOffRecord()
    record.hand_off_read("p", "c", now_s=0.0)
    assert not len(record)
    for number in range(10_000):
        record.is_consumers_fault(f"p{number}", "c", now_s=1.0)
    assert len(record) == 4096
    record.hand_off_read("p", "c", now_s=1000.0)
    assert not len(record)
