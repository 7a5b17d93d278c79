"""The body of a chat completion: one choice for each final stage that had something to put out."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hub.media import joined_wav
from omni_discovery.errors import EngineFailedError

if TYPE_CHECKING:
    from hub.api.exchange import Exchange
    from hub.request.outputs import OmniOutput

#: Characters of the Server-Timing header, and timings of one answer.
_MOST_HEADER: Final = 4000
_MOST_TIMINGS: Final = 256
#: Bytes of a whole answer, as they are sent.
_MOST_WHOLE_BYTES: Final = 128 << 20
#: From so many bytes on an answer is encoded in a thread: the hub's loop must go on meanwhile.
_LONG_BYTES: Final = 1 << 20
#: Names that the Server-Timing header allows.
_TOKEN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

#: The one choice if no requested stage has output, such as a picture for a question without one.
_NOTHING_TO_SHOW = {
    "index": 0,
    "message": {"role": "assistant", "content": None, "refusal": "nothing of what was asked for came out of this"},
    "finish_reason": "stop",
}


class Answer:
    """Collects the outputs of one request into choices: one for each final stage, in order of appearance.

    One that is streamed keeps no outputs.
    """

    def __init__(self, exchange: Exchange, model: str, created: int, *, is_streamed: bool = False) -> None:
        self._is_streamed = is_streamed
        #: The size of what is kept, as it will be sent.
        self._kept_bytes = 0
        self.exchange = exchange
        self.request_id = request_id = exchange.request_id
        #: Seconds by name, from the request's summary.
        self.timings_s: Mapping[str, float] = {}
        #: When the last frame of the answer came from a replica, on ``time.perf_counter``.
        self.received_at_s = 0.0
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self._head: dict[str, Any] = {"id": request_id, "created": created, "model": model}
        #: Choice index of each final stage that has output.
        self._indexes: dict[int, int] = {}
        self._texts: dict[int, list[str]] = {}
        #: Each with its type.
        self._images: dict[int, list[tuple[bytes, str]]] = {}
        self._sounds: dict[int, list[bytes]] = {}
        self._finished: dict[int, str] = {}

    def add(self, output: OmniOutput) -> int | None:
        """Add one output; return its choice index, None if it belongs to no choice.

        Raise EngineFailedError for an answer that is too long to be sent as a whole.
        """
        self.exchange.note_output(output)
        if output.is_summary:
            self.timings_s = output.timings_s
            return None
        self.received_at_s = max(self.received_at_s, output.received_at_s)
        # A stage that ends without a picture or sound is no choice; an empty text is one.
        if output.stage_id not in self._indexes and not (output.text or output.data or output.modality == "text"):
            return None
        index = self._indexes.setdefault(output.stage_id, len(self._indexes))
        if not self._is_streamed:
            self._keep(index, output)
        if output.finish_reason is not None:
            self._finished[index] = output.finish_reason
            self._count(output.usage)
        return index

    def _keep(self, index: int, output: OmniOutput) -> None:
        self._kept_bytes += len(output.text) + 4 * len(output.data) // 3
        if self._kept_bytes > _MOST_WHOLE_BYTES:
            most_mib = _MOST_WHOLE_BYTES >> 20
            raise EngineFailedError(f"the answer is longer than {most_mib} MiB: ask for it with 'stream': true")
        if output.text:
            self._texts.setdefault(index, []).append(output.text)
        if output.data and output.modality == "audio":
            self._sounds.setdefault(index, []).append(output.data)
        elif output.data:
            self._images.setdefault(index, []).append((output.data, output.mime))

    async def body(self, *, timings: bool = False) -> bytes:
        """``completion`` as JSON. Raise EngineFailedError as it does."""
        if self._kept_bytes < _LONG_BYTES:
            return msgspec.json.encode(self.completion(timings=timings))
        return await asyncio.to_thread(lambda: msgspec.json.encode(self.completion(timings=timings)))

    async def event(self, output: OmniOutput, index: int, *, first: bool) -> bytes:
        """``chunk`` as an event."""
        if len(output.data) < _LONG_BYTES:
            return event_of(self.chunk(output, index, first=first))
        return await asyncio.to_thread(lambda: event_of(self.chunk(output, index, first=first)))

    def completion(self, *, timings: bool = False) -> dict[str, Any]:
        """The body of the whole answer, with ``timings_s`` if ``timings``.

        Raise EngineFailedError for pieces of sound that can't be joined.
        """
        choices = [self._choice(index) for index in self._indexes.values()] or [_NOTHING_TO_SHOW]
        more = {"timings_s": shown_timings(self.timings_s)} if timings else {}
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self.usage, **more}

    def chunk(self, output: OmniOutput, index: int, *, first: bool) -> dict[str, Any]:
        """One event of the stream; its ``modality`` is text, image or audio."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if output.data and output.modality == "audio":
            delta["audio"] = self._audio(index, output.data)
        elif output.data:
            delta["content"] = [image_part(output.data, output.mime)]
        elif output.text:
            delta["content"] = output.text
        choice = {"index": index, "delta": delta, "finish_reason": output.finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "modality": output.modality, "choices": [choice]}

    def last_chunk(self, *, usage: bool, timings: bool) -> dict[str, Any]:
        """The last event, with the token counts, the timings or both."""
        more: dict[str, Any] = {"usage": self.usage} if usage else {}
        if timings:
            more["timings_s"] = shown_timings(self.timings_s)
        return {**self._head, "object": "chat.completion.chunk", "choices": [], **more}

    def _choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if index in self._sounds:
            message |= {"content": None, "audio": self._audio(index, joined_wav(self._sounds[index]))}
        else:
            pictures = [image_part(data, mime) for data, mime in self._images.get(index, ())]
            message["content"] = pictures or "".join(self._texts.get(index, []))
        return {"index": index, "message": message, "finish_reason": self._finished.get(index, "stop")}

    def _audio(self, index: int, file: bytes) -> dict[str, Any]:
        """A WAV file as OpenAI's clients expect it. It is not stored here: it expires when it is made."""
        name, data = f"audio-{self.request_id}-{index}", base64.b64encode(file).decode()
        return {"id": name, "data": data, "expires_at": self._head["created"], "transcript": ""}

    def _count(self, usage: Mapping[str, int]) -> None:
        for name in ("prompt_tokens", "completion_tokens"):
            self.usage[name] += usage.get(name, 0)
        self.usage["total_tokens"] = self.usage["prompt_tokens"] + self.usage["completion_tokens"]


def event_of(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"".join((b"data: ", msgspec.json.encode(body), b"\n\n"))


def image_part(data: bytes, mime: str) -> dict[str, Any]:
    """An image as OpenAI's clients expect it: a data URL."""
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def server_timing(timings_s: Mapping[str, float]) -> str:
    """The timings as the standard ``Server-Timing`` header has them: ``name;dur=milliseconds``.

    Those of the hub come first; what is beyond the length that clients and proxies take is left out.
    """
    parts: list[str] = []
    left = _MOST_HEADER
    for name, seconds in sorted(shown_timings(timings_s).items(), key=lambda each: "." in each[0]):
        part = f"{name};dur={1000 * seconds:.3f}"
        left -= len(part) + 2
        if left < 0:
            break
        parts.append(part)
    return ", ".join(parts)


def shown_timings(timings_s: Mapping[str, float]) -> dict[str, float]:
    """The finite timings with names that a header may hold, sorted by name: 256 at most, the hub's own first of all."""
    # The names come from a replica: one with a line break would begin another header.
    names = [name for name in sorted(timings_s) if _TOKEN.fullmatch(name) and isfinite(timings_s[name])]
    if len(names) > _MOST_TIMINGS:
        names = sorted(sorted(names, key=lambda name: "." in name)[:_MOST_TIMINGS])
    return {name: timings_s[name] for name in names}
