"""The target of the torch engine: found by its name, built, put on its device, with the type of its input."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from omni_discovery.inputs.sounds import LEAST_RATE_HZ, MOST_RATE_HZ
from stage_runtime.engines.callable.start_folder import add_start_folder
from stage_runtime.engines.callable.typed_input import TypedInput

_TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class TorchArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``engine_args`` of the torch engine; docs/engines.md describes each."""

    target: str
    #: If set, even to an empty mapping: the target is called once with these, and returns the callable.
    kwargs: dict[str, Any] | None = None
    #: How many requests run at the same time.
    capacity: Annotated[int, Meta(ge=1, le=4096)] = 1
    #: The callable takes a list of inputs and returns as many results.
    batch: bool = False
    #: Empty: the GPU if there is one and torch is used, else the CPU.
    device: str = ""
    #: Sample rate of the sound that an audio stage returns.
    sample_rate_hz: Annotated[int, Meta(ge=LEAST_RATE_HZ, le=MOST_RATE_HZ)] = 24_000
    #: Of the frames that a stage of video returns.
    frame_rate_hz: Annotated[int, Meta(ge=1, le=240)] = 24
    #: The voices that clients are shown; the callable's field ``speaker`` gets the one that they name.
    voices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The callable, the type of its input, and the device of its tensors."""

    call: Callable[[Any], Any]
    takes: TypedInput
    device: str

    def working(self) -> AbstractContextManager[Any]:
        """The context for every call: without gradients, if torch is used."""
        torch = sys.modules.get("torch")
        return nullcontext() if torch is None else torch.no_grad()

    def check_device(self) -> None:
        """After a failed call: raise the device's error if the device does not work any more."""
        if self.device.startswith("cuda"):
            torch = sys.modules["torch"]
            # After a failed kernel every call to the device raises. Running out of memory is no such failure.
            torch.cuda.synchronize()


def check_target(stage: StageConfig, args: TorchArgs) -> None:
    """Raise ConfigError if the target is no name like ``package.module:name``. Nothing is imported."""
    if not _TARGET.fullmatch(args.target):
        raise _wrong(stage, f"is no name like 'package.module:name', but {args.target!r}")


def find_target(stage: StageConfig, args: TorchArgs) -> None:
    """Import the target without building it. Raise ConfigError whatever the import raises, and for what can't work."""
    try:
        _check_kind(stage, args, find_object(stage, args.target))
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise _wrong(stage, f"{args.target!r} can't be imported: {reason}") from error


def _check_kind(stage: StageConfig, args: TorchArgs, found: Any) -> None:
    """Raise ConfigError if ``found`` can't be what is built from or called, as far as that shows without a call."""
    if not callable(found):
        raise _wrong(stage, f"{args.target!r} is of type {type(found).__name__}, which can't be called")
    if inspect.isclass(found) or args.kwargs is not None:
        _fitting_kwargs(stage, args, found, args.device or "cpu")
    else:
        _input_kind(stage, args, found)


def load_target(stage: StageConfig, args: TorchArgs) -> Target:
    """Import and build the target. Raise ConfigError where the operator must act, and what its constructor raises."""
    found = find_object(stage, args.target)
    device = _device(stage, args)
    built = _build(stage, args, found, device)
    if not callable(built):
        raise _wrong(stage, f"is a {type(built).__name__}, which can't be called")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(built, torch.nn.Module):
        built = built.to(device).eval()
        kind = _input_kind(stage, args, built.forward)
    else:
        kind = _input_kind(stage, args, built)
    return Target(built, TypedInput(kind, device), device)


def source_hash(args: TorchArgs) -> str:
    """A hash, 8 hex digits, of the source file of the imported target; ``?`` without one."""
    try:
        source = inspect.getsource(sys.modules[args.target.partition(":")[0]])
    except (OSError, TypeError):
        return "?"
    return hashlib.blake2b(source.encode("utf-8"), digest_size=4).hexdigest()


def _wrong(stage: StageConfig, text: str) -> ConfigError:
    return ConfigError(f"stage {stage.stage_id}: engine_args.target {text}")


def find_object(stage: StageConfig, target: str) -> Any:
    """Import what a target names. Raise ConfigError if it is not there, and what else its module raises."""
    module, _, path = target.partition(":")
    why_not = add_start_folder(module)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        hint = f"install it where the replica runs, or put its folder into PYTHONPATH{why_not and f'; {why_not}'}"
        raise _wrong(stage, f"{target!r} can't be imported: {error}; {hint}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise _wrong(stage, f"{target!r}: there is no {name!r} in {getattr(found, '__name__', found)}")
        found = getattr(found, name)
    return found


def _device(stage: StageConfig, args: TorchArgs) -> str:
    torch = sys.modules.get("torch")
    if torch is None:
        return args.device or "cpu"
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(args.device or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"stage {stage.stage_id}: engine_args.device: {error}") from error
    if device.type == "cuda" and not has_gpu:
        raise ConfigError(
            f"stage {stage.stage_id}: engine_args.device is {args.device!r}; torch {torch.__version__} sees no GPU here"
        )
    return str(device)


def _build(stage: StageConfig, args: TorchArgs, found: Any, device: str) -> Any:
    """The callable: an instance of a class, the result of anything with ``kwargs``, else the target itself."""
    if not inspect.isclass(found) and args.kwargs is None:
        return found
    return found(**_fitting_kwargs(stage, args, found, device))


def _fitting_kwargs(stage: StageConfig, args: TorchArgs, found: Any, device: str) -> dict[str, Any]:
    """What the target is called with to be built. Raise ConfigError if it does not take that."""
    offered = {"device": device, **({"model": stage.model} if stage.model else {})}
    try:
        signature = inspect.signature(found)
        taken = {name: value for name, value in offered.items() if name in signature.parameters}
        kwargs = {**taken, **(args.kwargs or {})}
        signature.bind(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"stage {stage.stage_id}: engine_args.kwargs do not fit {args.target!r}: {error}") from error
    return kwargs


def _input_kind(stage: StageConfig, args: TorchArgs, call: Any) -> type:
    """The struct or dataclass that the callable's one parameter is annotated with."""
    wanted = "list[YourInput]" if args.batch else "YourInput"
    hint = f"give it one parameter annotated {wanted!r}, a msgspec.Struct or a dataclass"
    try:
        parameters = list(inspect.signature(call, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError, SyntaxError) as error:
        raise _wrong(stage, f"{args.target!r}: its parameters can't be read ({error}); {hint}") from error
    needed = [each for each in parameters if each.default is each.empty and each.kind not in _STARRED]
    if len(needed) != 1 or needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise _wrong(stage, f"{args.target!r} needs {len(needed)} parameters; {hint}")
    kind = needed[0].annotation
    if args.batch:
        kind = next(iter(get_args(kind)), None) if _is_sequence(get_origin(kind)) else None
    if not _is_typed(kind):
        raise _wrong(stage, f"{args.target!r}: the type of {needed[0].name!r} is not known; {hint}")
    found: type = kind
    _check_asynchronous(stage, args, call, takes_live=TypedInput(found, "cpu").takes_live_pieces)
    return found


def _check_asynchronous(stage: StageConfig, args: TorchArgs, call: Any, *, takes_live: bool) -> None:
    """Raise ConfigError unless the callable is an asynchronous generator where it reads live pieces, and only there."""
    is_generator = inspect.isasyncgenfunction(call) or inspect.isasyncgenfunction(getattr(call, "__call__", None))  # noqa: B004
    if takes_live and (args.batch or not is_generator):
        raise _wrong(
            stage,
            f"{args.target!r} has an input with pieces: AsyncIterator; write it as 'async def' with 'async for piece in"
            " ...pieces' and 'yield', without batch",
        )
    if not takes_live and (is_generator or inspect.iscoroutinefunction(call)):
        raise _wrong(
            stage,
            f"{args.target!r} is asynchronous; write it as an ordinary function or generator, or give its input a field"
            " pieces: AsyncIterator[...], to read the pieces of a hand-off as they come",
        )


_STARRED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_sequence(origin: Any) -> bool:
    return inspect.isclass(origin) and issubclass(list, origin) and not issubclass(Mapping, origin)


def _is_typed(kind: Any) -> bool:
    return inspect.isclass(kind) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind))
