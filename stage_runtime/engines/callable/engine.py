"""``engine: torch``: any callable or torch module as a stage.

A plain function runs for one request at a time, generators take turns value by value, a batching callable gets all
running requests at once. What is returned or yielded becomes output or hand-off by its type and by the stage's
``final_output``. An exception of user code fails its own request. Which code is called is set in the operator's deploy
document only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from msgspec.structs import replace

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.records.params import ParamBounds
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, checked_args
from stage_runtime.engines.callable.live_pieces import Driven, LivePieces
from stage_runtime.engines.callable.target import Target, TorchArgs, check_target, find_target, load_target, source_hash
from stage_runtime.engines.errors import error_of
from stage_runtime.engines.files import code_version, npy_of, png_of, wav_of
from stage_runtime.engines.media.encode import mp4_of

logger = logging.getLogger(__name__)

_PNG: Final = b"\x89PNG\r\n\x1a\n"


class ValueReader:
    """Turns values of user code into outputs. ``shows`` is the stage's final_output, e.g. ``text`` or ``none``."""

    def __init__(self, shows: str, sample_rate_hz: int, frame_rate_hz: int = 24) -> None:
        self._shows = shows
        self._sample_rate_hz = sample_rate_hz
        self._frame_rate_hz = frame_rate_hz

    def read(self, key: str, value: Any) -> Iterator[EngineOutput | Mapping[str, Any]]:
        """One value as outputs for the client, and as mappings for the next stages.

        A tuple stands for all of its parts, None for nothing. Raise TypeError for a value of a type that this stage
        does not show, ValueError for an array of the wrong shape.
        """
        if value is None:
            return
        if isinstance(value, tuple):
            for part in value:
                yield from self.read(key, part)
        elif isinstance(value, Mapping):
            yield value
        elif isinstance(value, str):
            self._must_show("text", "a str")
            yield EngineOutput(key, text=value)
        elif isinstance(value, bytes):
            yield self._file(key, value)
        elif _is_image(value):
            self._must_show("image", "a picture")
            yield EngineOutput(key, image_png=png_of(value))
        elif not _is_array(value):
            raise TypeError(f"a {type(value).__name__} can't be put out; {self._right}")
        else:
            yield self._array(key, value)

    def _array(self, key: str, value: Any) -> EngineOutput | Mapping[str, Any]:
        if self._shows == "audio":
            return EngineOutput(key, audio_wav=wav_of(value, self._sample_rate_hz))
        if self._shows == "video":
            return EngineOutput(key, video_mp4=mp4_of(value, self._frame_rate_hz))
        if self._shows == "embedding":
            return EngineOutput(key, pooled_npy=npy_of(value))
        return {"tensor": value}

    def _file(self, key: str, value: bytes) -> EngineOutput:
        if value.startswith(_PNG):
            self._must_show("image", "a picture")
            return EngineOutput(key, image_png=value)
        if value[:4] == b"RIFF" and value[8:12] == b"WAVE":
            self._must_show("audio", "sound")
            return EngineOutput(key, audio_wav=value)
        if value[4:8] == b"ftyp":
            self._must_show("video", "a video")
            return EngineOutput(key, video_mp4=value)
        raise TypeError(f"{len(value)} bytes that are no PNG, WAV or MP4 file can't be put out; {self._right}")

    def _must_show(self, modality: str, what: str) -> None:
        if self._shows != modality:
            raise TypeError(f"{what} came out of a stage with final_output: {self._shows}; {self._right}")

    @property
    def _right(self) -> str:
        shown = {
            "text": "a str, and ",
            "image": "a PIL image or the bytes of a PNG file, and ",
            "audio": "a row of floats or the bytes of a WAV file, and ",
            "video": "bytes of shape (frames, height, width, 3) or those of an MP4 file, and ",
            "embedding": "an array of numbers, and ",
        }
        return f"return {shown.get(self._shows, '')}a mapping to hand over"


def _is_image(value: Any) -> bool:
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def _is_array(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return is_array or (torch is not None and isinstance(value, torch.Tensor))


_Handed = Mapping[str, Any]


@dataclass(slots=True)
class _Task:
    """One request."""

    request: StageRequest
    #: The callable's argument.
    argument: Any
    #: What a generator function returned.
    pieces: Iterator[Any] | Driven | None = None
    #: The pieces of an earlier stage that it reads as they come.
    live: LivePieces | None = None
    #: It stands still until the next of these pieces.
    is_waiting: bool = False
    #: What is to be handed over at the end.
    handed: list[_Handed] = field(default_factory=list)
    is_paused: bool = False
    #: A batch with this request has failed: it is called alone.
    is_alone: bool = False


@dataclass(slots=True)
class _Collected:
    """A request whose input can't be read before all pieces of it are there."""

    request: StageRequest
    #: By stage, and the stages that have not ended.
    pieces: dict[int, list[_Handed]]
    owed: set[int]
    is_paused: bool = False


class TorchEngine:
    """``engine: torch``, see docs/engines.md. The constructor raises ConfigError for wrong ``engine_args``."""

    def __init__(self, stage: StageConfig) -> None:
        self._stage = stage
        self._args = checked_args(stage, TorchArgs)
        check_target(stage, self._args)
        self._value_reader = ValueReader(stage.final_output, self._args.sample_rate_hz, self._args.frame_rate_hz)
        self._target: Target | None = None
        #: By request key: at most ``capacity`` running, in the order of their turns; the others wait.
        self._running: dict[str, _Task] = {}
        self._waiting: dict[str, _Task] = {}
        self._collected: dict[str, _Collected] = {}
        self._said: list[EngineOutput] = []
        self._has_said_that_it_waits = False

    @property
    def capacity(self) -> int:
        """See Engine."""
        return self._args.capacity

    @property
    def modality(self) -> str:
        """See Engine."""
        shown = self._stage.final_output
        return "text" if shown == "none" else shown

    @property
    def not_resumable(self) -> None:
        """See Engine. How user code would continue an answer is not known."""
        return None

    @property
    def takes_companions(self) -> bool:
        """See Engine."""
        return self._target is not None and self._target.takes.takes_companions

    @property
    def model_details(self) -> Mapping[str, str]:
        """See DescribedEngine. ``code`` covers the target's own file, not the modules that it imports."""
        return {"code": f"{self._args.target}+{source_hash(self._args)}; {code_version()}"}

    @property
    def params(self) -> Mapping[str, ParamBounds]:
        """See TypedEngine."""
        return self._loaded.takes.params

    @property
    def voices(self) -> tuple[str, ...]:
        """See SpeakingEngine."""
        return self._args.voices

    def check(self) -> None:
        """See CheckedEngine. User code is imported, not called."""
        find_target(self._stage, self._args)

    def load(self, report: Report) -> None:
        """See Engine."""
        report(f"loading {self._args.target}", 0.1)
        self._target = load_target(self._stage, self._args)

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if any(request.key in known for known in (self._running, self._waiting, self._collected)):
            raise InvalidRequestError("the request is running already")
        takes = self._loaded.takes
        if takes.takes_live_pieces:
            live = takes.live_pieces()
            self._waiting[request.key] = _Task(request, takes.read(request, live), live=live)
        elif request.stream_from:
            self._say_that_it_waits()
            stages = request.stream_from
            self._collected[request.key] = _Collected(request, {stage: [] for stage in stages}, set(stages))
        else:
            self._waiting[request.key] = _Task(request, takes.read(request))

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        """See PieceEngine."""
        if key in self._collected:
            self._collect(self._collected[key], from_stage, piece, is_last=is_last)
            return
        task = self._running.get(key) or self._waiting.get(key)
        if task is None or task.live is None:
            return
        if piece is not None:
            task.live.put(piece)
        if is_last:
            task.live.end()
        task.is_waiting = False

    def wants(self, key: str, from_stage: int) -> bool:
        """See PieceEngine. All pieces are wanted at once where they are only of use together."""
        del from_stage
        task = self._running.get(key) or self._waiting.get(key)
        return task is None or task.live is None or task.live.wants

    def keeps_pieces(self, key: str) -> bool:
        """See PieceEngine."""
        return key in self._collected

    def update(self, request: StageRequest) -> None:
        """See SegmentEngine. Each segment is a call of its own."""
        self.add(request)

    def pause(self, key: str, paused: bool) -> None:
        """See PieceEngine."""
        known = self._running.get(key) or self._waiting.get(key) or self._collected.get(key)
        if known is not None:
            known.is_paused = paused

    def abort(self, key: str) -> None:
        """See Engine. A generator is closed: what it has in ``finally`` runs."""
        task = self._running.pop(key, None) or self._waiting.pop(key, None)
        if task is not None:
            _close(task)
        if task is not None or self._collected.pop(key, None) is not None:
            self._said.append(EngineOutput(key, finish_reason="abort"))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._said or self._ready())

    def step(self) -> list[EngineOutput]:
        """See Engine. One call of the callable, or one piece of one generator."""
        outputs, self._said = self._said, []
        ready = self._ready()
        if ready:
            with self._loaded.working():
                outputs += self._call_batch(ready) if self._args.batch else self._take_turn(ready[0])
        return outputs

    def close(self) -> None:
        """See Engine."""
        for task in (*self._running.values(), *self._waiting.values()):
            _close(task)
        self._running.clear()
        self._waiting.clear()
        self._collected.clear()
        self._said.clear()
        self._target = None

    @property
    def _loaded(self) -> Target:
        if self._target is None:
            raise RuntimeError("the engine is not loaded")
        return self._target

    def _say_that_it_waits(self) -> None:
        if not self._has_said_that_it_waits:
            self._has_said_that_it_waits = True
            logger.warning(
                "torch.waits_for_all_pieces target=%s: the hand-off comes in pieces, and the call begins with the last;"
                " an input with a field 'pieces: AsyncIterator[...]' reads them as they come",
                self._args.target,
            )

    def _collect(
        self, collected: _Collected, from_stage: int, piece: Mapping[str, Any] | None, *, is_last: bool
    ) -> None:
        """Keep a piece; when all are there, the request begins. Raise InvalidRequestError if they don't fit."""
        if piece is not None:
            collected.pieces[from_stage].append(piece)
        if is_last:
            collected.owed.discard(from_stage)
        if collected.owed:
            return
        request = collected.request
        del self._collected[request.key]
        whole = {stage: {"pieces": pieces} for stage, pieces in collected.pieces.items()}
        request = replace(request, payloads=dict(sorted({**request.payloads, **whole}.items())))
        argument = self._loaded.takes.read(request)
        self._waiting[request.key] = _Task(request, argument, is_paused=collected.is_paused)

    def _ready(self) -> list[_Task]:
        """The running requests that can go on; waiting ones start running first, as there is room."""
        for key in list(islice(self._waiting, max(0, self._args.capacity - len(self._running)))):
            self._running[key] = self._waiting.pop(key)
        return [task for task in self._running.values() if not (task.is_paused or task.is_waiting)]

    def _take_turn(self, task: _Task) -> list[EngineOutput]:
        key = task.request.key
        # To the end of the line.
        self._running[key] = self._running.pop(key)
        try:
            if task.pieces is None:
                made = self._loaded.call(task.argument)
                if task.live is not None:
                    task.pieces = Driven(made)
                elif isinstance(made, Iterator):
                    task.pieces = made
                else:
                    return self._end(task, made)
            try:
                if isinstance(task.pieces, Driven):
                    return self._advance(task, task.pieces)
                piece = next(task.pieces)
            except StopIteration as end:
                return self._end(task, end.value)
            return self._outputs_of(task, piece)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything, at its request's cost
            return self._fail(task, error)

    def _advance(self, task: _Task, pieces: Driven) -> list[EngineOutput]:
        """The next value of an asynchronous generator, or nothing where it needs a piece first."""
        values = pieces.advance()
        task.is_waiting = not values
        return [output for value in values for output in self._outputs_of(task, value)]

    def _call_batch(self, ready: list[_Task]) -> list[EngineOutput]:
        tasks = [task for task in ready if task.is_alone][:1] or ready
        try:
            made = self._loaded.call([task.argument for task in tasks])
            if made is None or isinstance(made, str | bytes | Mapping):
                raise TypeError(f"a {type(made).__name__} came back, not a list of results")
            results = list(made)
            if len(results) != len(tasks):
                raise ValueError(f"{len(results)} results came back for {len(tasks)} inputs")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
            if len(tasks) == 1:
                return self._fail(tasks[0], error)
            logger.warning("torch.batch_failed requests=%d error=%r: each is tried alone", len(tasks), error)
            self._loaded.check_device()
            for task in tasks:
                task.is_alone = True
            return []
        return [output for task, result in zip(tasks, results, strict=True) for output in self._end_alone(task, result)]

    def _end_alone(self, task: _Task, result: Any) -> list[EngineOutput]:
        """End one request of a batch. An exception in place of its result fails it alone."""
        try:
            if isinstance(result, Exception):
                raise result
            return self._end(task, result)
        except Exception as error:  # noqa: BLE001 - as above
            return self._fail(task, error)

    def _outputs_of(self, task: _Task, value: Any) -> list[EngineOutput]:
        """The outputs of one value. A mapping goes to the next stages now; to those that take no pieces, at the end."""
        request, outputs = task.request, []
        for made in self._value_reader.read(request.key, value):
            if isinstance(made, EngineOutput):
                outputs.append(made)
                continue
            if request.stream_to:
                outputs.append(EngineOutput(request.key, handoff_piece=made))
            if len(request.stream_to) < len(request.next_stages):
                task.handed.append(made)
        return outputs

    def _end(self, task: _Task, value: Any) -> list[EngineOutput]:
        """End a request with its last value; everything not handed over in pieces is handed over now."""
        request = task.request
        if task.pieces is not None:
            outputs = self._outputs_of(task, value)
        else:
            made = list(self._value_reader.read(request.key, value))
            outputs = [each for each in made if isinstance(each, EngineOutput)]
            task.handed += [each for each in made if not isinstance(each, EngineOutput)]
        handoff: _Handed | None = None
        if request.next_stages and task.handed:
            handoff = task.handed[0] if len(task.handed) == 1 else {"pieces": task.handed}
        del self._running[request.key]
        last = outputs.pop() if outputs else EngineOutput(request.key)
        return [*outputs, replace(last, finish_reason="stop", handoff=handoff)]

    def _fail(self, task: _Task, error: BaseException) -> list[EngineOutput]:
        """Fail the request whose user code raised. Raise, which ends the engine, only if the device is lost."""
        key = task.request.key
        self._running.pop(key, None)
        if isinstance(error, InvalidRequestError):
            return [EngineOutput(key, error=error_of(error))]
        logger.error("torch.request_failed key=%s", key, exc_info=error)
        _close(task)
        self._loaded.check_device()
        return [EngineOutput(key, error=(FailureKind.ENGINE, f"{type(error).__name__}: {error}"))]


def _close(task: _Task) -> None:
    """Close a generator. What its ``finally`` raises is only logged, as its request has ended."""
    close = getattr(task.pieces, "close", None)
    if close is not None:
        try:
            close()
        except (Exception, SystemExit):
            logger.exception("torch.close_failed key=%s", task.request.key)
