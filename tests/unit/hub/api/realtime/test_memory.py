"""The memory of all sessions together."""

from __future__ import annotations

import pytest

from hub.api.realtime.memory import SoundMemory
from omni_discovery.errors import OverloadedError


def test_what_is_released_is_there_for_others() -> None:
    memory = SoundMemory(100)
    memory.hold("a", 60)
    memory.hold("b", 30)
    memory.check_room(10)
    with pytest.raises(OverloadedError, match="try again later"):
        memory.check_room(11)
    memory.hold("a", 20)
    memory.check_room(50)
    memory.release("b")
    memory.release("b")
    assert memory.held_bytes == 20
