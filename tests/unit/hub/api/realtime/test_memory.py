"""The memory of all sessions together."""

from __future__ import annotations

from contextlib import suppress

import pytest

from hub.api.realtime.memory import SoundMemory
from omni_discovery.errors import OverloadedError


def test_what_is_released_is_there_for_others() -> None:
    memory = SoundMemory(100)
    memory.hold("a", 60)
    memory.hold("b", 30)
    with memory.room_for(10):
        pass
    with pytest.raises(OverloadedError, match="try again later"), memory.room_for(11):
        pytest.fail("there was no room")
    memory.hold("a", 20)
    with memory.room_for(50):
        pass
    memory.release("b")
    memory.release("b")
    assert memory.held_bytes == 20


@pytest.mark.attack("J2")
def test_room_is_given_once_whoever_asks_for_it_before_it_is_held() -> None:
    """1. a has room for 60 of 100, and holds nothing yet; 2. b gets none of it; 3. a fails: all of it is free again"""
    memory = SoundMemory(100)
    with suppress(ValueError), memory.room_for(60):
        with pytest.raises(OverloadedError), memory.room_for(60):
            pytest.fail("room was given twice")
        memory.hold("a", 40)
        raise ValueError
    assert memory.held_bytes == 40
