"""What may come over the WebSocket by which vLLM-Omni's server is given a text to speak, piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.door.guard import Door, Locks
from hub.api.door.keys import KeyRing
from omni_discovery.records.api_key import digest_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
#: Characters of the frames of one text.
MAX_SPOKEN = 64 << 10


class Socket:
    """One whose client sends these frames."""

    def __init__(self, *frames: str, scope: dict[str, Any] | None = None) -> None:
        self._frames = list(frames)
        self.sent: list[Any] = []
        self.scope: dict[str, Any] = {"type": "websocket", "path": "/", "headers": [], **(scope or {})}
        from hub.api.vllm.omni.answers import _CheckedFrames

        self._checked = _CheckedFrames(self.scope, self._receive, self._send)

    async def _receive(self) -> Any:
        return {"type": "websocket.receive", "text": self._frames.pop(0)}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def passed(self, most: int = 1 << 20) -> int:
        """How many frames come through, or ``most``; of the next the client hears that it is closed."""
        passed = 0
        while self._frames and passed < most and (await self._checked.receive())["type"] == "websocket.receive":
            passed += 1
        return passed


def piece(text: str) -> str:
    return json.dumps({"type": "input.text", "text": text})


CONFIG = json.dumps({"type": "session.config", "voice": "ethan"})
DONE = json.dumps({"type": "input.done"})


@pytest.mark.attack("Z8")
@pytest.mark.parametrize("text", ["a." * 500, "\N{GRINNING FACE}" * 80])
async def test_a_text_that_never_ends_ends_its_connection(text: str) -> None:
    frame = piece(text)
    most = MAX_SPOKEN // (len(text) + 4)
    socket = Socket(CONFIG, *[frame] * (2 * most))
    assert await socket.passed() == 1 + most
    (closed,) = socket.sent
    assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert str(MAX_SPOKEN) in closed["reason"]


@pytest.mark.attack("Z81")
async def test_marks_in_a_row_have_a_bound() -> None:
    """vLLM-Omni's server goes through all of them with each piece, where it speaks sentence by sentence."""
    socket = Socket(CONFIG, piece("a" + "." * 1000), piece(""), piece("." * 24), piece("?"), DONE)
    assert await socket.passed() == 4
    assert "1024 marks" in socket.sent[0]["reason"]
    parted = Socket(CONFIG, *[piece("." * 1000 + " "), piece("word" + "." * 1000), piece("a"), DONE] * 9)
    assert await parted.passed() == 37


@pytest.mark.attack("Z82")
async def test_a_socket_waits_for_its_client_between_two_frames() -> None:
    """It is then one of those that give way; not while it speaks, and what it sends makes the wait begin anew."""
    noted: list[bool] = []
    socket = Socket(CONFIG, DONE, scope={"omni.input_wait": noted.append})
    assert await socket.passed(1) == 1
    await socket._checked.send({"type": "websocket.send", "bytes": b"sound"})
    assert noted == [True, False]

    async def speaks() -> Any:
        await socket._checked.send({"type": "websocket.send", "bytes": b"sound"})
        return {"type": "websocket.disconnect"}

    socket._checked._receive = speaks
    await socket._checked.receive()
    assert noted == [True, False, True, False, True, False]


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


@pytest.mark.attack("Z28")
async def test_a_key_that_was_taken_back_speaks_no_more() -> None:
    """It was asked for as the connection was opened, and never again, however many texts came over it."""
    keys = KeyRing(from_etcd=True)
    keys.replace({"a": digest_of("a-key")})
    socket = Socket(CONFIG, piece("one"), DONE, piece("two"), DONE)

    async def speak(*_: Any) -> None:
        assert await socket.passed(3) == 3
        keys.replace({})
        assert await socket.passed() == 0

    socket.scope["headers"] = [(b"authorization", b"Bearer a-key")]
    await Door(speak, Locks(keys), str, str)(socket.scope, socket._receive, socket._send)
    (closed,) = socket.sent
    assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert "this key opens nothing here" in closed["reason"]
