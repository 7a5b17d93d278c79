"""Reads a streamed answer as it comes, and notes when each output was there.

Pure.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Mapping
from typing import Any, Final

import msgspec

#: No event of an answer is longer: a hub sends less.
_MOST_BYTES: Final = 256 << 20
#: What is kept of an error's message.
_MOST_MESSAGE: Final = 300
#: Raw samples of speech: two bytes, 24 000 times a second.
_PCM_BYTES_PER_S: Final = 48_000
#: What base64 characters hold the header of a WAV file, and where the bytes per second stand in it.
_WAV_HEAD, _WAV_HEADER_BYTES, _WAV_RATE = 60, 44, slice(28, 32)


class Reading:
    """What came of one answer. Times are moments of the caller's clock, in seconds.

    ``failure`` is empty while nothing went wrong.
    """

    def __init__(self) -> None:
        self.firsts_s: dict[str, float] = {}
        self.gaps_s = array("d")
        self.outputs = 0
        self.characters = 0
        self.tokens = 0
        self.pictures = 0
        self.sound_s = 0.0
        self.failure = ""
        #: The failure in the hub's words, if it had some.
        self.message = ""
        self._last_s = 0.0

    def take(self, chunk: bytes, at_s: float) -> None:
        """Take in bytes of the body, which came at this moment."""
        raise NotImplementedError

    def end(self) -> None:
        """The body has ended by itself: note if it had more to say."""

    def _note(self, modality: str, at_s: float) -> None:
        if self.outputs:
            self.gaps_s.append(at_s - self._last_s)
        self.outputs += 1
        self._last_s = at_s
        self.firsts_s.setdefault(modality, at_s)


class SpeechReading(Reading):
    """Speech as raw samples."""

    def take(self, chunk: bytes, at_s: float) -> None:
        """See Reading."""
        if chunk:
            self._note("audio", at_s)
            self.sound_s += len(chunk) / _PCM_BYTES_PER_S


class ChatReading(Reading):
    """A chat completion as server-sent events."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = bytearray()
        self._searched = 0
        self._is_done = False

    def take(self, chunk: bytes, at_s: float) -> None:
        """See Reading."""
        self._rest += chunk
        begin = 0
        while (end := self._rest.find(b"\n", max(begin, self._searched))) >= 0:
            line = bytes(self._rest[begin:end]).rstrip(b"\r")
            begin = end + 1
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), at_s)
        del self._rest[:begin]
        self._searched = len(self._rest)
        if len(self._rest) > _MOST_BYTES:
            self._rest.clear()
            self._searched = 0
            self.failure = self.failure or "unreadable answer"

    def end(self) -> None:
        """See Reading."""
        if not self._is_done and not self.failure:
            self.failure = "cut off"

    def _take_event(self, text: bytes, at_s: float) -> None:
        if text == b"[DONE]":
            self._is_done = True
            return
        try:
            event = msgspec.json.decode(text, type=dict[str, Any])
            self._take_parts(event, at_s)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, IndexError):
            self.failure = self.failure or "unreadable answer"

    def _take_parts(self, event: Mapping[str, Any], at_s: float) -> None:
        if event.get("error"):
            code, self.message = error_of(event)
            self.failure = self.failure or f"in the stream: {code or 'an error without a code'}"
            return
        if usage := event.get("usage"):
            self.tokens = int(usage.get("completion_tokens") or 0)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content = delta.get("content")
            if isinstance(content, str) and content:
                self.characters += len(content)
                self._note("text", at_s)
            elif content:
                self.pictures += len(content)
                self._note("image", at_s)
            if data := (delta.get("audio") or {}).get("data"):
                self.sound_s += wav_seconds(data)
                self._note("audio", at_s)


def wav_seconds(data: str) -> float:
    """How long the sound of a WAV file in base64 is; 0 for what is none."""
    try:
        head = base64.b64decode(data[:_WAV_HEAD])
    except (binascii.Error, ValueError):
        return 0.0
    bytes_per_s = int.from_bytes(head[_WAV_RATE], "little")
    if not head.startswith(b"RIFF") or len(head) < _WAV_HEADER_BYTES or not bytes_per_s:
        return 0.0
    return (len(data) * 3 // 4 - data[-2:].count("=") - _WAV_HEADER_BYTES) / bytes_per_s


def error_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """The ``code`` of OpenAI's error body, else its ``type``, and its message; both empty if it is none."""
    error = body.get("error")
    if not isinstance(error, dict):
        return "", ""
    return str(error.get("code") or error.get("type") or "")[:80], str(error.get("message") or "")[:_MOST_MESSAGE]
