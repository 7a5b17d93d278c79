"""A client that asks at a steady rate, whatever comes back, and looks closely at each answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Final
from urllib.parse import urlsplit

from tests.bench.actors import now_s

_TIMEOUT_S: Final = 30.0


class WrongAnswerError(Exception):
    """The answer is not what was said; ``kind`` is one word."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind} {text}")
        self.kind = kind


class SteadyClient:
    """Every other request wants a stream. Each has a connection of its own, as from a new client."""

    def __init__(self, url: str, words: int) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._netloc = parts.hostname or "", parts.port or 80, parts.netloc
        self._words = words
        self.latencies_s: list[float] = []
        self.errors: Counter[str] = Counter()
        #: The first few errors in words.
        self.examples: list[str] = []

    async def ask_for(self, seconds: float, rate: float) -> None:
        """Ask so many times a second and return when all are answered."""
        count, began_s = round(seconds * rate), now_s()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                due_s = began_s + number / rate
                # Late or not, each request counts from when it was due.
                await asyncio.sleep(max(0.0, due_s - now_s()))
                group.create_task(self._ask_one(number, due_s))

    async def _ask_one(self, number: int, due_s: float) -> None:
        prompt = " ".join(f"{number}-{word}" for word in range(self._words))
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await self._ask(prompt, stream=number % 2 == 1)
            if answer != prompt:
                raise WrongAnswerError("wrong_text", f"asked {prompt!r}, got {answer!r}")
        except (WrongAnswerError, OSError, TimeoutError, EOFError) as error:
            kind = error.kind if isinstance(error, WrongAnswerError) else type(error).__name__
            self.errors[kind] += 1
            if len(self.examples) < 10:
                self.examples.append(f"{number}: {error}")
        else:
            self.latencies_s.append(now_s() - due_s)

    async def _ask(self, prompt: str, *, stream: bool) -> str:
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": stream}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + body)
            status = int((await reader.readuntil(b"\r\n")).split()[1])
            await reader.readuntil(b"\r\n\r\n")
            text = (await reader.read()).decode()
        finally:
            writer.close()
        if status != 200:
            raise WrongAnswerError(f"status_{status}", text[-300:])
        return _streamed(text) if stream else _whole(text)


def _whole(text: str) -> str:
    return str(json.loads(text[text.index("{") : text.rindex("}") + 1])["choices"][0]["message"]["content"])


def _streamed(text: str) -> str:
    """The pieces put together; chunk sizes stand on lines of their own and are passed over."""
    pieces, ended = [], False
    for line in text.splitlines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise WrongAnswerError("error_in_stream", line)
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
    if not ended:
        raise WrongAnswerError("cut_stream", text[-300:])
    return "".join(pieces)
