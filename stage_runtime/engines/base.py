"""The contract of engines, and how an engine is found by name.

An engine is used by one thread only. ``add`` accepts a request or refuses it, ``step`` does a bounded amount of work
for all requests together and returns their new outputs. Any exception out of ``step`` means that the engine is dead.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import ENGINE_GROUPS, check_packages, find_plugins
from omni_discovery.records.params import ParamBounds
from omni_discovery.wire import FailureKind, Resume, TokenLogprobs, ToolAnswer
from stage_runtime.config import ControlRefusedError

#: Called while an engine loads, with the phase and the share of loading that is done, 0 to 1.
Report = Callable[[str, float], None]

_Args = TypeVar("_Args")


class StageRequest(msgspec.Struct, frozen=True):
    """One request as an engine sees it. ``key`` is its name in this replica and comes back on every output.

    ``request_id`` is the hub's and the same over all attempts. ``payloads`` holds the hand-offs of earlier stages by
    stage id. ``params`` has the stage's defaults merged in. ``stream_from`` are stages whose hand-off comes piece by
    piece, through ``feed``; an engine without ``feed`` gets the pieces together, as ``{"pieces": [...]}`` in
    ``payloads``. ``stream_to`` are those of ``next_stages`` that take pieces, see ``EngineOutput.handoff_piece``.
    """

    key: str
    request_id: str
    attempt: int = 0
    inputs: Mapping[str, Any] = {}
    params: Mapping[str, Any] = {}
    payloads: Mapping[int, Mapping[str, Any]] = {}
    #: Hand-offs of earlier stages for the request's companions, by role and stage id.
    companions: Mapping[str, Mapping[int, Mapping[str, Any]]] = {}
    next_stages: tuple[int, ...] = ()
    deadline_s: float = float("inf")
    #: What the client has of the answer, from another replica: put out only the rest. None: put out all.
    resume: Resume | None = None
    #: Lower goes first, if the engine lets requests overtake each other.
    priority: int = 0
    stream_from: tuple[int, ...] = ()
    stream_to: tuple[int, ...] = ()
    #: Of a request whose input comes in segments, which one this is, from 0; see ``SegmentEngine``.
    segment: int | None = None
    #: The parent of the engine's spans, as a W3C ``traceparent``; empty if the hub traces nothing.
    trace: str = ""
    #: Who has sent it, to its hub: the same for all requests of one client. Empty if that is not known.
    client: str = ""

    @property
    def payload(self) -> Mapping[str, Any] | None:
        """The hand-off of the only, or first, stage before this one."""
        return next(iter(self.payloads.values()), None)


class EngineOutput(msgspec.Struct, frozen=True):
    """New output of one request. ``finish_reason`` or ``error`` is set on the last one, and only there.

    ``handoff`` is what the next stages get; None means that they have nothing to do. ``handoff_piece`` goes at once to
    the stages in the request's ``stream_to``; after the first piece they get pieces only, and ``handoff`` is for the
    other next stages. ``logprobs``, if it is not empty, has one entry for each of ``token_ids``, see
    ``wire.TokenLogprobs``; ``prompt_logprobs``, on the first output with tokens, has one for each prompt token but the
    first. ``prompt_token_ids``, on that output too, is the prompt after items such as pictures were put into it.
    ``stop_reason`` is the token or text of the request's stop parameters that ended the answer, if one did.
    ``called``, on the last output, is the meaning of the whole text where it calls functions of the request's tools;
    such an answer is not handed over.
    ``partial_image`` says that ``image_png`` is an unfinished picture, and which: see ``PartialImageEngine``.
    """

    key: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    image_png: bytes | None = None
    #: Sound as a WAV file; several of one request are played one after the other.
    audio_wav: bytes | None = None
    #: The result of a pooling model, an embedding, class odds or a score, as a .npy file of float32.
    pooled_npy: bytes | None = None
    finish_reason: str | None = None
    handoff: Mapping[str, Any] | None = None
    handoff_piece: Mapping[str, Any] | None = None
    usage: Mapping[str, int] = {}
    #: The kind of the failure and the reason; behind INVALID also the HTTP status that the client is to get.
    error: tuple[FailureKind, str] | tuple[FailureKind, str, int] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    stop_reason: int | str | None = None
    #: A whole video, as an MP4 file.
    video_mp4: bytes | None = None
    called: ToolAnswer | None = None
    partial_image: int | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more comes for this request."""
        return self.finish_reason is not None or self.error is not None


class Engine(Protocol):
    """One model on its devices. What an engine may offer besides is in the protocols below and in ``capabilities``."""

    @property
    def capacity(self) -> int:
        """How many requests run at the same time; further ones are queued by the engine."""

    @property
    def modality(self) -> str:
        """The kind of its output: ``text``, ``image``, ``audio`` or ``embedding``."""

    def load(self, report: Report) -> None:
        """Load the model and be ready for requests. Raise ConfigError where the operator must act."""

    def add(self, request: StageRequest) -> None:
        """Accept a request. Raise InvalidRequestError if it can't be served as it is, or one with its key runs.

        Its client gets the ``status`` of the error, 400 by default.

        Raise NotResumableError if it has ``resume`` and the rest of the answer is not sure to be exactly what the first
        replica would have put out. The hand-off and the usage are those of the whole answer.
        """

    def abort(self, key: str) -> None:
        """Stop a request. Its last output has finish_reason ``abort``; unknown keys are ignored."""

    def step(self) -> list[EngineOutput]:
        """Work for a short time at most and return the new outputs. Must not wait for input that may never come."""

    def has_unfinished(self) -> bool:
        """Whether ``step`` has work to do or outputs to return."""

    def close(self) -> None:
        """Release the model, its devices and its threads. Idempotent."""


class ResumingEngine(Protocol):
    """Offered by an engine that can continue an answer which another replica began."""

    @property
    def not_resumable(self) -> Mapping[str, str] | None:
        """The parameters with which an answer of another replica can't be continued here: name and reason of each.

        None, as without the attribute: this engine never continues an answer, and is never given a ``resume``.
        """


class CompanionEngine(Protocol):
    """Offered by an engine that can use the hand-offs of a request's companions."""

    @property
    def takes_companions(self) -> bool:
        """Whether it does."""


class DeterministicEngine(Protocol):
    """Offered by an engine whose output may be the same whenever and wherever a request runs."""

    @property
    def deterministic(self) -> bool:
        """After ``load``: whether all output, hand-offs and their pieces are a function of input and ``params``.

        That is: the same tokens and sound, in the same order and pieces of hand-off, whatever runs beside them. A lost
        replica's work is then run again even where a part of what came of it was shown; hubs see to a ``seed`` in the
        parameters, compare what was shown with what comes again, and end the request where they differ.
        """


class SegmentEngine(Protocol):
    """Offered by an engine that takes the input of a request in segments.

    The first segment goes to ``add``, with ``segment`` 0. Each segment ends as a request does, with its own usage; the
    engine keeps what the next segment builds on, under the request's key, until ``abort`` is called with that key.
    """

    def update(self, request: StageRequest) -> None:
        """Begin the next segment of a request whose last segment has ended. Raises what ``add`` raises."""


#: Every control method that an engine may offer; each means the same with every engine that has it.
CONTROL_METHODS: Final = (
    "start_profile",
    "stop_profile",
    "sleep",
    "wake_up",
    "is_sleeping",
    "add_lora",
    "remove_lora",
    "list_loras",
    "pin_lora",
    "reset_prefix_cache",
    "collective_rpc",
)


class ControlEngine(Protocol):
    """Offered by an engine that hubs can control while it serves."""

    @property
    def controls(self) -> Mapping[str, Callable[..., Any]]:
        """The control methods that this engine has, by their names in ``CONTROL_METHODS``.

        They are called between two steps, with plain values, and return plain values; an exception fails that call
        only. An engine with ``sleep`` also has ``is_sleeping``; while it sleeps, it has no request and gets none.
        """


class CheckedEngine(Protocol):
    """Offered by an engine that can check more, without loading, than its constructor does."""

    def check(self) -> None:
        """Check, for a dry run, what can be checked in moments. Raise ConfigError."""


class ThreadedEngine(Protocol):
    """Required of an engine that works in a thread of its own: its ``step`` returns even if that thread hangs."""

    def moved_at_s(self) -> float:
        """When its work last made progress, by ``time.monotonic``, or now if it has no work."""


class KvEngine(Protocol):
    """An engine whose KV cache other replicas fetch by a way of its own, as vLLM's KV connectors do."""

    @property
    def kv_hosts(self) -> Sequence[str]:
        """The hosts where they reach it, beside the replica's own, once it has loaded; others are refused."""


class DescribedEngine(Protocol):
    """Offered by an engine that can describe what it has loaded, so that hubs find mismatched replicas."""

    @property
    def model_details(self) -> Mapping[str, str]:
        """After ``load``: ``revision``, ``dtype``, ``tokenizer``, ``content`` and ``code``, as far as they are known.

        Replicas of one stage with unlike ``content`` are not used together. Without an entry, ``content`` is a hash of
        the model's folder.
        """


class SpeakingEngine(Protocol):
    """Offered by an engine that can speak with several voices."""

    @property
    def voices(self) -> Sequence[str]:
        """After ``load``: the names that clients may give; the first 256 of at most 64 characters are shown to them."""


class TypedEngine(Protocol):
    """Offered by an engine that can say beforehand which parameters it takes."""

    @property
    def params(self) -> Mapping[str, ParamBounds]:
        """After ``load``: each parameter that ``add`` takes. A request with any other value can't be served.

        Hubs refuse a job with another at once, where it would fail in minutes.
        """


class PartialImageEngine(Protocol):
    """Offered by an engine that draws step by step and can show how far a picture is."""

    @property
    def gives_partial_images(self) -> bool:
        """After ``load``: whether it takes the parameter ``partial_images``, of 0 to ``wire.MAX_PARTIAL_IMAGES``.

        At most so many outputs with ``partial_image``, counted from 0, come before each picture: what it would be if
        it were finished now. They change nothing of the finished picture, and no hub keeps or repeats them.
        """


class MeasuredEngine(Protocol):
    """Offered by an engine that knows more of its load than the replica sees."""

    def metrics(self) -> Mapping[str, float]:
        """What is known of ``requests_running``, ``requests_waiting`` and ``kv_cache_usage`` (0 to 1).

        ToolAnswer between two steps, at most four times a second; must be quick. Other names are ignored.
        """


class PieceEngine(Protocol):
    """Offered by an engine that works on hand-offs piece by piece (async_chunk); each method also on its own."""

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        """Take the next piece of an earlier stage; the end is announced alone: no piece, and ``is_last``.

        Until the end came for every stage of ``stream_from``, the request must not finish for want of input; while it
        has nothing to work on, it does not count for ``has_unfinished``. Raise InvalidRequestError for a bad piece.
        """

    def wants(self, key: str, from_stage: int) -> bool:
        """Whether it can take another piece now. An engine without this method always can."""

    def keeps_pieces(self, key: str) -> bool:
        """Whether the pieces of a request are kept until the last one: then what they may take together is bounded.

        An engine without this method uses each piece up.
        """

    def pause(self, key: str, paused: bool) -> bool | None:
        """Pause a request, because its client or its next stages are behind, or continue it.

        A paused request is no reason to step, and it can be aborted; other requests go on. Return True if its place is
        free for others meanwhile: when it continues and all places are taken, it waits for one. Anything else means
        that it keeps its place.
        """


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    #: ``module:name`` of what makes the engine of a StageConfig.
    target: str
    #: Heavy modules that are safe to import before a fork.
    preload: tuple[str, ...] = ()


_BUILT_IN: Final = {
    "echo": _BuiltIn("stage_runtime.engines.echo.engine:EchoEngine"),
    "vllm": _BuiltIn("stage_runtime.engines.vllm.pooling:engine_for", preload=("vllm.v1.engine.llm_engine",)),
    "vllm-omni": _BuiltIn(
        "stage_runtime.engines.vllm_omni.diffusion.engine:engine_for",
        preload=(
            "vllm.v1.engine.core",
            "vllm_omni.config.resolver",
            "vllm_omni.engine.async_engine_utils",
            "vllm_omni.engine.orchestrator",
            "vllm_omni.engine.stage_init_utils",
            "vllm_omni.outputs.output_processor",
            "vllm_omni.worker.gpu_ar_model_runner",
            "vllm_omni.worker.gpu_generation_model_runner",
        ),
    ),
    "diffusion": _BuiltIn("stage_runtime.engines.painter.engine:engine_for", preload=("torch",)),
    # Needs torch only where what it calls does.
    "torch": _BuiltIn("stage_runtime.engines.callable.engine:TorchEngine"),
}


def create_engine(stage: StageConfig) -> Engine:
    """Make the engine that a stage names, not loaded yet.

    Names are the built-in ones and those of entry points of the group ``stage_runtime.engines``. Raise ConfigError if
    the name is unknown, its package is missing or broken, or the stage's arguments are wrong.
    """
    built_in = _BUILT_IN.get(stage.engine)
    if built_in is not None:
        check_packages(stage.stage_id, stage.engine)
        module, _, name = built_in.target.partition(":")
        engine: Engine = getattr(importlib.import_module(module), name)(stage)
        return engine
    plugins = find_plugins(ENGINE_GROUPS)
    if stage.engine not in plugins:
        known = ", ".join(sorted({*_BUILT_IN, *plugins}))
        raise ConfigError(
            f"stage {stage.stage_id}: engine {stage.engine!r} is not known; there are: {known}; if a package adds it "
            f"(entry-point group {ENGINE_GROUPS[0]!r}), install that on this host"
        )
    try:
        engine = plugins[stage.engine].load()(stage)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"stage {stage.stage_id}: engine {stage.engine!r} can't be loaded: {error}") from error
    return engine


def checked_args(stage: StageConfig, kind: type[_Args], given: Any = None, name: str = "engine_args") -> _Args:
    """The stage's ``engine_args``, or the part ``given`` of them, as a struct of class ``kind``.

    Raise ConfigError that names the stage and the argument, with the nearest known name for an unknown one.
    """
    arguments = stage.engine_args if given is None else given
    known: tuple[str, ...] = getattr(kind, "__struct_encode_fields__", ())
    for strange in [each for each in arguments if each not in known] if known and isinstance(arguments, dict) else ():
        near = difflib.get_close_matches(str(strange), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"stage {stage.stage_id}: {name}.{strange} is not known; {hint}")
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"stage {stage.stage_id}: {name}: {error}") from error


def allowed_rpc(names: Sequence[str], find: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    """A ``collective_rpc`` that reaches only what the operator has named in ``engine_args.allow_rpc``.

    ``find`` returns the method of a name. What is returned raises ControlRefusedError for every other name.
    """

    def collective_rpc(name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if name not in names:
            allowed = ", ".join(names) or "nothing"
            raise ControlRefusedError(f"engine_args.allow_rpc of this stage does not name {name!r}, but {allowed}")
        return find(name)(*args, **(kwargs or {}))

    return collective_rpc


def check_model_folder(stage: StageConfig) -> bool:
    """Whether the stage's model is a local folder; False for a name on a model hub.

    Raise ConfigError if no model is named, or what looks like a path is not there.
    """
    if not stage.model:
        raise ConfigError(f"stage {stage.stage_id}: engine {stage.engine!r} needs a 'model': a folder or a name")
    folder = Path(stage.model).expanduser()
    if folder.is_dir():
        return True
    if stage.model.startswith(("/", "./", "../", "~")) or stage.model.count("/") > 1:
        raise ConfigError(f"stage {stage.stage_id}: the model folder {stage.model} is not on this machine")
    return False


def modules_to_preload(engine: str) -> tuple[str, ...]:
    """The heavy modules that a replica with this engine needs and that are safe to import before a fork.

    Empty for an engine that is not built in: what its modules do when they are imported is not known.
    """
    built_in = _BUILT_IN.get(engine)
    return () if built_in is None else built_in.preload
