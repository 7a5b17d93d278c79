"""What is read from one producer at once: no more memory than one hand-off may take."""

from __future__ import annotations

import threading
import time

import pytest

from stage_runtime.connectors.errors import TransferCancelledError, TransferTimeoutError
from stage_runtime.connectors.producer_room import ProducerRoom


def nothing() -> None:
    pass


@pytest.mark.attack("Z75")
def test_reads_of_one_producer_wait_for_one_another_and_others_for_none() -> None:
    """1. 60 and 40 of 100 bytes are taken: one byte more waits in vain; another producer has its own
    2. one is given back while another waits; 3. one that is alone may be larger, as its own bound says
    """
    room = ProducerRoom()
    room.take("0/1", 60, 100, time.monotonic(), nothing)
    room.take("0/1", 40, 100, time.monotonic(), nothing)
    with pytest.raises(TransferTimeoutError, match="0/1: earlier reads there take 100 of 100 bytes"):
        room.take("0/1", 1, 100, time.monotonic() + 0.1, nothing)
    room.take("0/2", 100, 100, time.monotonic(), nothing)
    threading.Timer(0.1, room.give_back, ("0/1", 60)).start()
    room.take("0/1", 50, 100, time.monotonic() + 20, nothing)
    for producer, size_bytes in (("0/1", 40), ("0/1", 50), ("0/2", 100)):
        room.give_back(producer, size_bytes)
    room.take("0/1", 0, 100, time.monotonic(), nothing)
    room.take("0/1", 500, 100, time.monotonic(), nothing)
    room.give_back("0/1", 0)
    room.give_back("0/1", 500)
    assert room._taken_bytes == {}


def test_one_that_waits_can_be_cancelled() -> None:
    room, ends = ProducerRoom(), threading.Event()

    def check() -> None:
        if ends.is_set():
            raise TransferCancelledError("no more")

    room.take("0/1", 100, 100, time.monotonic(), check)
    threading.Timer(0.1, ends.set).start()
    with pytest.raises(TransferCancelledError):
        room.take("0/1", 1, 100, time.monotonic() + 60, check)
    room.give_back("0/1", 100)
    room.take("0/1", 100, 100, time.monotonic(), nothing)
