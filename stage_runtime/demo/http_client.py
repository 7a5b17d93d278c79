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
from dataclasses import dataclass
from typing import Any

from omni_discovery.errors import OmniError


class DemoError(OmniError):
    """The demo can't go on; the message says why and what to look at."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one question: text, a PNG (empty without a picture), and the time it took in seconds."""

    text: str
    png: bytes
    seconds: float


def json_headers() -> dict[str, str]:
    """The headers of a request with a JSON body; with the key that the hub asks for, too, if the user has set one."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def ask(url: str, question: str, *, seed: int = 0, on_text: Callable[[str], None] | None = None) -> Reply:
    """Ask one question for text and image, streamed; ``on_text`` gets each piece of text. Raise DemoError."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "modalities": ["text", "image"],
        "seed": seed,
        "stream": True,
    }
    begin_s = time.monotonic()
    text, png = "", b""
    for chunk in _events(f"{url}/v1/chat/completions", body):
        if "error" in chunk:
            raise DemoError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            content = choice["delta"].get("content")
            if isinstance(content, str):
                text += content
                if on_text is not None:
                    on_text(content)
            elif content:
                png = base64.b64decode(content[0]["image_url"]["url"].partition(",")[2])
    return Reply(text, png, time.monotonic() - begin_s)


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
            if sound := choice["delta"].get("audio", {}).get("data"):
                with wave.open(io.BytesIO(base64.b64decode(sound))) as file:
                    heard.append(file.readframes(file.getnframes()))
                    rate_hz = file.getframerate()
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
