"""A conversation over /v1/realtime, by OpenAI's asynchronous client. Each event is checked by the client's own type."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from tests.support.speaking import Served

#: What OpenAI's library takes an event to be.
SERVER_EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
#: As a client sends a microphone's sound.
STEP = 4800
WAIT_S = 30.0


class Talk:
    """One connection of the asynchronous client."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.heard: list[Any] = []

    async def hear(self, *types: str) -> list[Any]:
        """The events up to and with the first of these types."""
        found: list[Any] = []
        async with asyncio.timeout(WAIT_S):
            while not found or found[-1].type not in types:
                found.append(SERVER_EVENT.validate_json(await self.connection.recv_bytes()))
        self.heard += found
        return found

    async def say(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        item = {"type": "message", "role": "user", "content": [part]}
        await self.connection.conversation.item.create(item=item)

    async def ask(self, text: str, **response: Any) -> list[Any]:
        await self.say(text)
        await self.connection.response.create(response=response)
        return await self.hear("response.done")

    async def speak(self, *sounds: bytes) -> None:
        sound = b"".join(sounds)
        for start in range(0, len(sound), STEP):
            piece = base64.b64encode(sound[start : start + STEP]).decode()
            await self.connection.input_audio_buffer.append(audio=piece)


@asynccontextmanager
async def talking(hub: Served) -> AsyncIterator[Talk]:
    async with hub.client as client, client.realtime.connect(model=hub.omni.graph.deploy.served_name) as connection:
        talk = Talk(connection)
        await talk.hear("session.created")
        yield talk


def sound_of(events: list[Any]) -> bytes:
    return b"".join(base64.b64decode(each.delta) for each in events if each.type == "response.output_audio.delta")


def words_of(events: list[Any]) -> str:
    kinds = ("response.output_audio_transcript.delta", "response.output_text.delta")
    return "".join(each.delta for each in events if each.type in kinds)
