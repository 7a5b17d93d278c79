"""The demo's client of the OpenAI-compatible API, on the standard library alone."""

from __future__ import annotations

import base64
import io
import json
import os
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_discovery.errors import OmniError


class DemoError(OmniError):
    """The demo can't go on; the message says why and what to look at."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one question: text, a PNG (empty without a picture), and the time it took in seconds.

    ``samples`` has 16 bits each and one channel, empty without sound; ``first_sound_s`` is when the first of them came.
    ``timings_s`` is where the time went, by the hub's names.
    """

    text: str
    png: bytes
    seconds: float
    samples: bytes = b""
    rate_hz: int = 0
    first_sound_s: float = 0.0
    timings_s: Mapping[str, float] = field(default_factory=dict)


def json_headers() -> dict[str, str]:
    """The headers of a request with a JSON body; with the key that the hub asks for, too, if the user has set one."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def ask(
    url: str,
    question: str,
    *,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
    on_sound: Callable[[bytes, int], None] | None = None,
    async_chunk: bool = True,
    picture: bool = True,
) -> Reply:
    """Ask one question for text and picture, streamed; ``on_text`` gets each piece of text. Raise DemoError.

    With ``on_sound``, for sound too: it gets samples and their rate as they come. Without ``async_chunk`` no stage
    begins before the one before it has ended.
    """
    body = {
        "messages": [{"role": "user", "content": question}],
        "modalities": ["text", *(["image"] if picture else []), *(["audio"] if on_sound is not None else [])],
        "seed": seed,
        "stream": True,
        "include_timings": True,
        **({} if async_chunk else {"async_chunk": False}),
    }
    begin_s = time.monotonic()
    text, png, heard, rate_hz, first_s = "", b"", b"", 0, 0.0
    timings_s: Mapping[str, float] = {}
    for chunk in _events(f"{url}/v1/chat/completions", body):
        if "error" in chunk:
            raise DemoError(chunk["error"]["message"])
        timings_s = chunk.get("timings_s", timings_s)
        for choice in chunk["choices"]:
            content = choice["delta"].get("content")
            if isinstance(content, str):
                text += content
                if on_text is not None:
                    on_text(content)
            elif content:
                png = base64.b64decode(content[0]["image_url"]["url"].partition(",")[2])
            if samples := _sound_of(choice["delta"]):
                first_s = first_s or time.monotonic() - begin_s
                heard, rate_hz = heard + samples[0], samples[1]
                if on_sound is not None:
                    on_sound(*samples)
    return Reply(text, png, time.monotonic() - begin_s, heard, rate_hz, first_s, timings_s)


def _sound_of(delta: Mapping[str, Any]) -> tuple[bytes, int] | None:
    """The samples of an event and their rate; None if it has no sound."""
    data = delta.get("audio", {}).get("data")
    if not data:
        return None
    with wave.open(io.BytesIO(base64.b64decode(data))) as file:
        return file.readframes(file.getnframes()), file.getframerate()


@dataclass(frozen=True, slots=True)
class Sound:
    """What was heard of one request: 16-bit samples of one channel, and seconds to the first and to the last piece."""

    samples: bytes
    rate_hz: int
    first_s: float
    seconds: float


def listen(
    url: str, text: str, params: Sequence[Mapping[str, Any]], on_piece: Callable[[int], None] | None = None
) -> Sound:
    """Have a text spoken, streamed; ``on_piece`` gets the number of each piece of sound, from 1. Raise DemoError."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "sampling_params_list": list(params)}
    begin_s = time.monotonic()
    heard: list[bytes] = []
    rate_hz, first_s = 0, 0.0
    for chunk in _events(f"{url}/v1/chat/completions", body):
        if "error" in chunk:
            raise DemoError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            if sound := _sound_of(choice["delta"]):
                heard.append(sound[0])
                rate_hz = sound[1]
                first_s = first_s or time.monotonic() - begin_s
                if on_piece is not None:
                    on_piece(len(heard))
    if not heard:
        raise DemoError("the answer has no sound")
    return Sound(b"".join(heard), rate_hz, first_s, time.monotonic() - begin_s)


def get_text(url: str) -> tuple[int, str]:
    """Status and body of a GET; status 0 if the server can't be reached."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - the address is our own
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(  # noqa: S310 - the address is our own
        url, json.dumps(body).encode(), json_headers()
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as error:
        raise DemoError(f"HTTP {error.code}: {_message(error.read())}") from error
    except OSError as error:
        raise DemoError(f"the hub does not answer: {error}") from error


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
