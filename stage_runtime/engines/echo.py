"""The echo engine: says back what it was told, one word a step. For tests and benchmarks; needs no model.

As a later stage it says, or draws, what the stage before handed over. The words of ``engine_args`` that make it fail
are there so that every kind of failure can be tried without a GPU.
"""

from __future__ import annotations

import re
import struct
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np

from omni_discovery.deploy import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind, Resume
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, checked_args
from stage_runtime.errors import NotResumableError

_WORD = re.compile(r"\s*\S+\s*$|\s*\S+\s")

#: See Engine.not_resumable.
NOT_RESUMABLE: Final[Mapping[str, str]] = {
    "other words": "what was shown are not the first words of this answer, as where the prompts differ",
    "a picture": "it is drawn in one piece, there is nothing behind it",
}


class EchoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``engine_args`` of the echo engine."""

    capacity: int = 8
    modality: Literal["text", "image"] = "text"
    #: Between two words.
    delay_s: float = 0.0
    #: What loading pretends to take.
    load_s: float = 0.0
    #: Zeros that go with the hand-off, to try large ones.
    payload_bytes: int = 0
    #: A request that holds this text fails; crashes the engine; makes it stand still for ever.
    fail_on: str = ""
    crash_on: str = ""
    hang_on: str = ""
    #: With this set, only answers that hold it are handed over.
    handoff_on: str = ""


@dataclass(slots=True)
class _Speech:
    request: StageRequest
    text: str
    #: All of the text, however many of its words are to be said.
    word_count: int
    #: Still to be said.
    words: deque[str]
    next_at_s: float
    said: list[int] = field(default_factory=list)


class EchoEngine:
    """Deterministic: the same request gets the same words, token ids and picture everywhere."""

    def __init__(self, stage: StageConfig) -> None:
        self._args = checked_args(stage, EchoArgs)
        #: By request key, oldest first; the first ``capacity`` speak, the others wait.
        self._speeches: dict[str, _Speech] = {}
        self._said: list[EngineOutput] = []

    @property
    def capacity(self) -> int:
        """See Engine."""
        return self._args.capacity

    @property
    def modality(self) -> str:
        """See Engine."""
        return self._args.modality

    @property
    def not_resumable(self) -> Mapping[str, str]:
        """See Engine."""
        return NOT_RESUMABLE

    def load(self, report: Report) -> None:
        """See Engine."""
        report("loading", 0.0)
        time.sleep(self._args.load_s)

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        text = _text_of(request)
        words = _WORD.findall(text)
        max_tokens = request.params.get("max_tokens")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise InvalidRequestError(f"max_tokens must be a whole number above 0, not {max_tokens!r}")
        to_say = deque(words[:max_tokens])
        speech = _Speech(request, text, len(words), to_say, time.monotonic() + self._args.delay_s)
        if request.resume is not None:
            self._skip_shown(speech, request.resume)
        self._speeches[request.key] = speech

    def abort(self, key: str) -> None:
        """See Engine."""
        speech = self._speeches.pop(key, None)
        if speech is not None:
            self._said.append(EngineOutput(key, finish_reason="abort", usage=_usage(speech)))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._speeches or self._said)

    def step(self) -> list[EngineOutput]:
        """See Engine."""
        outputs, self._said = self._said, []
        now_s = time.monotonic()
        speaking = list(self._speeches.values())[: self._args.capacity]
        for speech in speaking:
            if speech.next_at_s <= now_s:
                outputs.append(self._speak(speech, now_s))
        if not outputs and speaking:
            # Short, so that an abort or a new request is not kept waiting.
            time.sleep(min(0.01, max(0.0, min(speech.next_at_s for speech in speaking) - now_s)))
        return outputs

    def close(self) -> None:
        """See Engine."""
        self._speeches.clear()

    def _skip_shown(self, speech: _Speech, resume: Resume) -> None:
        if self._args.modality == "image":
            raise NotResumableError(f"a picture: {NOT_RESUMABLE['a picture']}")
        shown = [speech.words.popleft() for _ in resume.token_ids if speech.words]
        speech.said = [token_id(word) for word in shown]
        if "".join(shown) != resume.text or speech.said != list(resume.token_ids):
            raise NotResumableError(f"other words: {NOT_RESUMABLE['other words']}")

    def _speak(self, speech: _Speech, now_s: float) -> EngineOutput:
        args, key = self._args, speech.request.key
        if args.crash_on and args.crash_on in speech.text:
            raise RuntimeError(f"the echo engine was told to crash on {args.crash_on!r}")
        while args.hang_on and args.hang_on in speech.text:
            time.sleep(1.0)
        if args.fail_on and args.fail_on in speech.text:
            del self._speeches[key]
            reason = f"the echo engine was told to fail on {args.fail_on!r}"
            return EngineOutput(key, error=(FailureKind.ENGINE, reason))
        if self._args.modality == "image":
            return self._finish(speech, "stop", image_png=draw_png(speech.text))
        word = speech.words.popleft() if speech.words else ""
        token_ids = (token_id(word),) if word else ()
        speech.said += token_ids
        speech.next_at_s = now_s + args.delay_s
        if speech.words:
            return EngineOutput(key, text=word, token_ids=token_ids)
        reason = "stop" if len(speech.said) == speech.word_count else "length"
        return self._finish(speech, reason, text=word, token_ids=token_ids)

    def _finish(
        self,
        speech: _Speech,
        reason: str,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        image_png: bytes | None = None,
    ) -> EngineOutput:
        key = speech.request.key
        del self._speeches[key]
        handoff: Mapping[str, Any] | None = None
        if speech.request.next_stages and self._args.handoff_on in speech.text:
            encoded = np.frombuffer(speech.text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
            handoff = {"token_ids": encoded, "filler": np.zeros(self._args.payload_bytes, dtype=np.uint8)}
        return EngineOutput(
            key,
            text=text,
            token_ids=token_ids,
            image_png=image_png,
            finish_reason=reason,
            handoff=handoff,
            usage=_usage(speech),
        )


def token_id(word: str) -> int:
    """A stable number for a word."""
    return zlib.crc32(word.encode("utf-8")) % 50_000


def draw_png(text: str, size_px: int = 16) -> bytes:
    """A small grey picture that depends on the text alone."""
    seed = zlib.crc32(text.encode("utf-8"))
    rows = b"".join(b"\0" + bytes((seed >> (x * y % 24)) & 0xFF for x in range(size_px)) for y in range(size_px))
    header = struct.pack(">IIBBBBB", size_px, size_px, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def _usage(speech: _Speech) -> dict[str, int]:
    return {"prompt_tokens": speech.word_count, "completion_tokens": len(speech.said)}


def _text_of(request: StageRequest) -> str:
    payload = request.payload
    if payload is not None:
        try:
            return bytes(np.asarray(payload["token_ids"], dtype=np.int64).astype(np.uint8)).decode("utf-8")
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the hand-off is not an echo engine's: {error}") from error
    inputs = request.inputs
    text = inputs.get("prompt")
    if text is None and isinstance(inputs.get("messages"), list) and inputs["messages"]:
        last = inputs["messages"][-1]
        text = _content_of(last.get("content") if isinstance(last, Mapping) else None)
    if text is None and isinstance(inputs.get("prompt_token_ids"), list):
        text = " ".join(str(number) for number in inputs["prompt_token_ids"])
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequestError("the prompt is empty")
    return text


def _content_of(content: Any) -> Any:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content
