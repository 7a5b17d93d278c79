"""What may come over the WebSocket by which vLLM-Omni's server is given a text to speak, piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
#: Characters of the frames of one text.
MAX_SPOKEN = 64 << 10


class Socket:
    """One whose client sends these frames."""

    def __init__(self, *frames: str) -> None:
        self._frames = list(frames)
        self.sent: list[Any] = []
        from hub.api.vllm.omni.answers import _CheckedFrames

        self._checked = _CheckedFrames({"type": "websocket", "path": "/", "headers": []}, self._receive, self._send)

    async def _receive(self) -> Any:
        return {"type": "websocket.receive", "text": self._frames.pop(0)}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def passed(self) -> int:
        """How many frames come through; of the next the client hears that it is closed."""
        passed = 0
        while self._frames and (await self._checked.receive())["type"] == "websocket.receive":
            passed += 1
        return passed


def piece(text: str) -> str:
    return json.dumps({"type": "input.text", "text": text})


CONFIG = json.dumps({"type": "session.config", "voice": "ethan"})
DONE = json.dumps({"type": "input.done"})


@pytest.mark.attack("Z8")
@pytest.mark.parametrize("text", ["." * 1000, "\N{GRINNING FACE}" * 80])
async def test_a_text_that_never_ends_ends_its_connection(text: str) -> None:
    frame = piece(text)
    most = MAX_SPOKEN // (len(text) + 4)
    socket = Socket(CONFIG, *[frame] * (2 * most))
    assert await socket.passed() == 1 + most
    (closed,) = socket.sent
    assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert str(MAX_SPOKEN) in closed["reason"]


async def test_one_text_after_the_other_may_be_as_long_as_one() -> None:
    frame = piece("word " * 1000)
    frames = [*[frame] * (MAX_SPOKEN // 5004), DONE] * 5
    socket = Socket(CONFIG, *frames)
    assert await socket.passed() == 1 + len(frames)
    assert socket.sent == []


@pytest.mark.attack("Z8")
async def test_a_number_that_only_the_server_could_read_hides_no_text() -> None:
    socket = Socket(CONFIG, '{"type": "input.text", "text": "hidden", "x": 1e999}')
    assert await socket.passed() == 1
    assert "out of range" in socket.sent[0]["reason"]
