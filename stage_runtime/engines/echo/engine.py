"""The echo engine: puts out its prompt again, one word a step. For tests and benchmarks; needs no model.

As a later stage it puts out, or draws, the text of the hand-off. The words of ``engine_args`` that make it fail are
there so that every kind of failure can be tried without a GPU. Its control methods only record their calls.
"""

from __future__ import annotations

import os
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.tools import asked_tools
from omni_discovery.wire import FailureKind
from stage_runtime.config import NotResumableError
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, allowed_rpc, checked_args
from stage_runtime.engines.echo.speech import (
    NOT_RESUMABLE,
    Speech,
    called_in,
    companions_of,
    handoff_of,
    text_handed,
    text_of,
    token_id,
)


class EchoControls:
    """Control methods without effect. Each call takes ``delay_s``; ``allow_rpc`` are names out of pid, say and fail."""

    def __init__(self, allow_rpc: Sequence[str] = (), delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._is_asleep = self._is_profiling = False
        #: Paths by adapter id.
        self._loras: dict[int, str] = {}
        self._rpcs: dict[str, Callable[..., Any]] = {"pid": os.getpid, "say": _say, "fail": _fail}
        found: dict[str, Callable[..., Any]] = {
            "start_profile": lambda _prefix=None: self._profile(True),
            "stop_profile": lambda: self._profile(False),
            "sleep": lambda level=1: self._sleep(level),
            "wake_up": self._wake_up,
            "is_sleeping": lambda: self._is_asleep,
            "add_lora": self._add_lora,
            "remove_lora": lambda lora_id: self._loras.pop(lora_id, None) is not None,
            "list_loras": lambda: sorted(self._loras),
            "collective_rpc": allowed_rpc(allow_rpc, self._rpcs.__getitem__),
        }
        #: See ControlEngine.
        self.methods: Mapping[str, Callable[..., Any]] = {
            name: method if name == "is_sleeping" else self._slowly(method) for name, method in found.items()
        }

    def _slowly(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self._delay_s)
            return method(*args, **kwargs)

        return slow

    def _profile(self, on: bool) -> None:
        if on is self._is_profiling:
            raise RuntimeError("a profile is being made already" if on else "no profile is being made")
        self._is_profiling = on

    def _sleep(self, level: int) -> None:
        if level not in (0, 1, 2):
            raise ValueError(f"the level of sleep is 0, 1 or 2, not {level!r}")
        self._is_asleep = True

    def _wake_up(self, tags: Sequence[str] | None = None) -> None:
        if isinstance(tags, str):
            raise TypeError("the tags are a list")
        self._is_asleep = False

    def _add_lora(self, name: str, lora_id: int | None, path: str, _more: Mapping[str, Any] | None = None) -> bool:
        if not name or (lora_id is not None and lora_id < 1):
            raise ValueError("an adapter has a name and an id above 0")
        if lora_id is None:
            lora_id = max(self._loras, default=0) + 1
        is_new = lora_id not in self._loras
        self._loras[lora_id] = path
        return is_new


def _say(*args: Any, **kwargs: Any) -> list[Any]:
    return [list(args), kwargs]


def _fail(reason: str = "it was told to") -> None:
    raise RuntimeError(reason)


class EchoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``engine_args`` of the echo engine."""

    capacity: Annotated[int, Meta(ge=1)] = 8
    modality: Literal["text", "image"] = "text"
    #: Seconds between two words.
    delay_s: Annotated[float, Meta(ge=0)] = 0.0
    #: Seconds between two steps: the words of all requests are due together, as those of a model. 0: each at its own.
    step_s: Annotated[float, Meta(ge=0)] = 0.0
    #: How long loading pretends to take.
    load_s: Annotated[float, Meta(ge=0)] = 0.0
    #: Zero bytes that are added to each hand-off, to try large ones.
    payload_bytes: Annotated[int, Meta(ge=0)] = 0
    #: A request with this text in it fails; crashes the engine; kills the process; makes the engine hang for ever.
    fail_on: str = ""
    crash_on: str = ""
    kill_on: str = ""
    hang_on: str = ""
    #: A file of process ids, one a line, or none: a replica whose own is in it fails every request.
    broken_file: str = ""
    #: Draw a number behind each word, by the request's ``seed`` if it has one.
    random: bool = False
    #: ``echo``: a request with tools whose text holds ``CALL name {...}`` is answered by that call.
    tool_call_parser: Literal["", "echo"] = ""
    #: With this set, only answers that hold it are handed over.
    handoff_on: str = ""
    #: How long a control call takes, and which methods ``collective_rpc`` may call.
    control_delay_s: Annotated[float, Meta(ge=0)] = 0.0
    allow_rpc: tuple[str, ...] = ()


class EchoEngine:
    """The same request gets the same words, token ids and picture in every process, but with ``random``."""

    def __init__(self, stage: StageConfig) -> None:
        self._args = checked_args(stage, EchoArgs)
        #: By request key, oldest first; the first ``capacity`` that are not paused run, the others wait.
        self._speeches: dict[str, Speech] = {}
        self._due: list[EngineOutput] = []
        self._controls = EchoControls(self._args.allow_rpc, self._args.control_delay_s)

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

    @property
    def takes_companions(self) -> bool:
        """See Engine. The texts of the companions come after the request's own."""
        return True

    @property
    def controls(self) -> Mapping[str, Callable[..., Any]]:
        """See ControlEngine."""
        return self._controls.methods

    def load(self, report: Report) -> None:
        """See Engine."""
        report("loading", 0.0)
        time.sleep(self._args.load_s)

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if request.key in self._speeches:
            raise InvalidRequestError("the request is running already")
        text = text_of(request) + companions_of(request)
        if asked_tools(request.inputs) is not None and not self._args.tool_call_parser:
            raise InvalidRequestError("tools: this stage has no engine_args.tool_call_parser; leave them out")
        max_tokens = request.params.get("max_tokens")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise InvalidRequestError(f"max_tokens must be a whole number above 0, not {max_tokens!r}")
        if request.resume is not None and self._args.modality == "image":
            raise NotResumableError(f"a picture: {NOT_RESUMABLE['a picture']}")
        speech = Speech(
            request,
            max_tokens,
            self._next_at_s(time.monotonic()),
            owed=set(request.stream_from),
            dice=Random(request.params.get("seed")) if self._args.random else None,
        )
        speech.add_text(text)
        self._speeches[request.key] = speech

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        """See PieceEngine."""
        speech = self._speeches.get(key)
        if speech is not None and piece is not None:
            speech.add_text(text_handed(piece))
        elif speech is not None and is_last:
            speech.stage_ended(from_stage)

    def wants(self, key: str, from_stage: int) -> bool:
        """See PieceEngine. A picture is drawn when all pieces are there, so it takes them at once."""
        del from_stage
        speech = self._speeches.get(key)
        return speech is None or self._args.modality == "image" or speech.wants_more

    def keeps_pieces(self, key: str) -> bool:
        """See PieceEngine."""
        return key in self._speeches and self._args.modality == "image"

    def pause(self, key: str, paused: bool) -> bool:
        """See PieceEngine. A paused request leaves its place to others."""
        if key in self._speeches:
            self._speeches[key].is_paused = paused
        return True

    def update(self, request: StageRequest) -> None:
        """See SegmentEngine. Each segment is echoed by itself."""
        self.add(request)

    def abort(self, key: str) -> None:
        """See Engine."""
        speech = self._speeches.pop(key, None)
        if speech is not None:
            self._due.append(EngineOutput(key, finish_reason="abort", usage=_usage(speech)))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._due) or any(self._speaking())

    def step(self) -> list[EngineOutput]:
        """See Engine."""
        outputs, self._due = self._due, []
        now_s = time.monotonic()
        speaking = list(self._speaking())
        for speech in speaking:
            if speech.next_at_s <= now_s:
                outputs.append(self._speak(speech, now_s))
        if not outputs and speaking:
            # Short, so that an abort or a new request is not kept waiting.
            time.sleep(min(0.01, max(0.0, min(speech.next_at_s for speech in speaking) - now_s)))
        return outputs

    def metrics(self) -> Mapping[str, float]:
        """See MeasuredEngine. The oldest requests run, as many as there is capacity for."""
        running = min(len(self._speeches), self._args.capacity)
        return {"requests_running": running, "requests_waiting": len(self._speeches) - running}

    def close(self) -> None:
        """See Engine."""
        self._speeches.clear()

    def _speaking(self) -> Iterator[Speech]:
        """The running requests that have a word to put out, or an end."""
        waits_for_all = self._args.modality == "image"
        awake = (speech for speech in self._speeches.values() if not speech.is_paused)
        for speech in islice(awake, self._args.capacity):
            if not speech.owed if waits_for_all else (speech.words or speech.is_whole):
                yield speech

    def _next_at_s(self, now_s: float) -> float:
        """When the next word is due of a request that has had one now."""
        step_s = self._args.step_s
        return (now_s // step_s + 1) * step_s if step_s else now_s + self._args.delay_s

    def _speak(self, speech: Speech, now_s: float) -> EngineOutput:
        args, key = self._args, speech.request.key
        if args.crash_on and args.crash_on in speech.text:
            raise RuntimeError(f"the echo engine was told to crash on {args.crash_on!r}")
        if args.kill_on and args.kill_on in speech.text:
            os.kill(os.getpid(), signal.SIGKILL)
        while args.hang_on and args.hang_on in speech.text:
            time.sleep(1.0)
        if args.fail_on and args.fail_on in speech.text:
            del self._speeches[key]
            reason = f"the echo engine was told to fail on {args.fail_on!r}"
            return EngineOutput(key, error=(FailureKind.ENGINE, reason))
        if args.broken_file and _is_listed(args.broken_file):
            del self._speeches[key]
            return EngineOutput(key, error=(FailureKind.ENGINE, "the echo engine was told that it is broken"))
        if self._args.modality == "image":
            return self._finish(speech, "stop", image_png=draw_png(speech.text))
        word = speech.words.popleft() if speech.words else ""
        token_ids = (token_id(word),) if word else ()
        speech.said += token_ids
        speech.next_at_s = self._next_at_s(now_s)
        if speech.words or not speech.is_whole:
            return EngineOutput(key, text=word, token_ids=token_ids, handoff_piece=self._piece(speech, word))
        reason = "stop" if len(speech.said) == speech.word_count else "length"
        return self._finish(speech, reason, text=word, token_ids=token_ids)

    def _finish(
        self,
        speech: Speech,
        reason: str,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        image_png: bytes | None = None,
    ) -> EngineOutput:
        key = speech.request.key
        del self._speeches[key]
        handoff: Mapping[str, Any] | None = None
        tools = asked_tools(speech.request.inputs)
        called = None if tools is None else called_in(speech.text)
        if called is None and speech.request.next_stages and self._args.handoff_on in speech.text:
            handoff = handoff_of(speech.text, self._args.payload_bytes)
        return EngineOutput(
            key,
            text=text,
            token_ids=token_ids,
            image_png=image_png,
            finish_reason=reason,
            handoff=handoff,
            handoff_piece=self._piece(speech, text, is_last=True),
            usage=_usage(speech),
            called=called,
        )

    def _piece(self, speech: Speech, word: str, *, is_last: bool = False) -> Mapping[str, Any] | None:
        if not speech.request.stream_to or self._args.handoff_on not in speech.text:
            return None
        return handoff_of(speech.next_piece(word, is_last=is_last), self._args.payload_bytes)


def draw_png(text: str, size_px: int = 16) -> bytes:
    """A grey PNG of ``size_px`` by ``size_px`` pixels that depends on the text alone."""
    seed = zlib.crc32(text.encode("utf-8"))
    rows = b"".join(b"\0" + bytes((seed >> (x * y % 24)) & 0xFF for x in range(size_px)) for y in range(size_px))
    header = struct.pack(">IIBBBBB", size_px, size_px, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def _is_listed(file: str) -> bool:
    """Whether this process is named in a file."""
    path = Path(file)
    return path.exists() and str(os.getpid()) in path.read_text("utf-8").split()


def _usage(speech: Speech) -> dict[str, int]:
    return {"prompt_tokens": speech.word_count, "completion_tokens": len(speech.said)}
