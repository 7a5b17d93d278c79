"""The code that came with a model: no process that loads models runs any until it is told that it may.

vLLM-Omni and others write ``trust_remote_code=True`` into their own calls of transformers, whatever an operator has
said. So the doors themselves are guarded: the functions of transformers and diffusers by which each such file becomes a
module. A model that has a class of these libraries beside its own code is loaded by that class, as it is without trust.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.process import current_process
from types import ModuleType
from typing import Any, Final

from omni_discovery.deploy.document import DeployConfig
from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.errors import ConfigError

logger = logging.getLogger(__name__)

#: The modules with these functions, each under the same names.
_DOORS: Final = ("transformers.dynamic_module_utils", "diffusers.utils.dynamic_modules_utils")
#: Asks whether the caller trusts the model; puts a file of a model among the modules; imports it; both of these.
_ASKS: Final = "resolve_trust_remote_code"
_ENTRIES: Final = ("get_cached_module_file", "get_class_in_module", "get_class_from_dynamic_module")
_TRUST: Final = "trust_remote_code"
#: Engines whose arguments say whether a model's code may run; of ``diffusion`` and ``echo`` none ever does.
_OF_VLLM: Final = ("vllm", "vllm-omni")
_NEVER: Final = ("diffusion", "echo")
#: By this name the guard is among the settings that a child process inherits.
_CONFIG: Final = "omni_model_code"
_LONGEST_NAME: Final = 200
#: Models that the log tells of; a process loads a few.
_MOST_TOLD: Final = 64


class ModelCodeError(ConfigError, OSError):
    """A model can't be loaded without the code that came with it, which may not run here."""


class _Gate:
    """Whether code of models may run in this process."""

    is_open = False
    #: Models whose code was left aside, each told once.
    told: frozenset[str] = frozenset()


_gate: Final = _Gate()


def may_run_model_code(deploy: DeployConfig, stage_id: int, bounds: Bounds) -> bool:
    """Whether this host lets a stage run the code that came with its model.

    Engines ``vllm`` and ``vllm-omni`` run it only where the document asks for it, too.
    """
    stage = deploy.stage(stage_id)
    is_allowed = bounds.trusts(deploy) or bounds.allows("remote-code") or bounds.allows("engine-arg", _TRUST)
    if stage.engine in _OF_VLLM:
        return is_allowed and bool(stage.engine_args.get(_TRUST))
    return is_allowed and stage.engine not in _NEVER


def guard_model_code(*, may_run: bool = False) -> None:
    """From here on, run code of models in this process, and in those that it starts or forks, only if it may."""
    _gate.is_open = may_run
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name in _DOORS:
            if (module := sys.modules.get(name)) is not None:
                _guard(module)
    # What a process of multiprocessing unpickles first, before the objects that its target is called with.
    current_process()._config[_CONFIG] = _Inherited()  # type: ignore[attr-defined]  # noqa: SLF001 - no other way in


class _Inherited:
    """Becomes the guard of a child process that starts with an interpreter of its own."""

    def __reduce__(self) -> tuple[Callable[[bool], _Inherited], tuple[bool]]:
        return _guarded, (_gate.is_open,)


def _guarded(may_run: bool) -> _Inherited:
    guard_model_code(may_run=may_run)
    return _Inherited()


class _Finder(MetaPathFinder):
    """Guards each of the doors as soon as it has been imported, before anybody can copy its functions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname not in _DOORS:
            return None
        others = (each for each in sys.meta_path if each is not self)
        found = (each.find_spec(fullname, path, target) for each in others if hasattr(each, "find_spec"))
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _then_guard(loader.exec_module)
        return spec


def _then_guard(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_and_guard(module: ModuleType) -> None:
        execute(module)
        _guard(module)

    return execute_and_guard


def _guard(module: ModuleType) -> None:
    """Replace its doors, also where other modules have copied them."""
    doors = {name: vars(module)[name] for name in (_ASKS, *_ENTRIES) if name in vars(module)}
    guarded = {name: (_asking if name == _ASKS else _entering)(door) for name, door in doors.items()}
    for other in list(sys.modules.values()):
        held = getattr(other, "__dict__", {})
        for name, door in doors.items():
            if held.get(name) is door:
                held[name] = guarded[name]


def _asking(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Answers as without trust: the library's own class, or an error where it has none."""
    signature = inspect.signature(ask)

    @functools.wraps(ask)
    def ask_guarded(trust_remote_code: Any, model_name: Any, *arguments: Any, **options: Any) -> Any:
        if _gate.is_open:
            return ask(trust_remote_code, model_name, *arguments, **options)
        try:
            answer = ask(False, model_name, *arguments, **options)
        except ValueError as error:
            raise _refusal(model_name) from error
        given = signature.bind(trust_remote_code, model_name, *arguments, **options).arguments
        if trust_remote_code and given.get("has_remote_code"):
            _tell_once(model_name)
        return answer

    return ask_guarded


def _entering(enter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enter)
    def enter_guarded(*arguments: Any, **options: Any) -> Any:
        if not _gate.is_open:
            # The model, its file or its class: the library's functions begin with one of these.
            raise _refusal(next((each for each in arguments if isinstance(each, str)), "the model"))
        return enter(*arguments, **options)

    return enter_guarded


def _refusal(model: Any) -> ModelCodeError:
    return ModelCodeError(
        f"{_short(model)} asks for code that came with it, which may not run here. If you trust it: --allow remote-code"
        " on each host that takes the pipeline from etcd; and with the engines vllm and vllm-omni,"
        " trust_remote_code: true in the stage's engine_args. The engine diffusion runs no such code"
    )


def _tell_once(model: Any) -> None:
    name = _short(model)
    if name not in _gate.told and len(_gate.told) < _MOST_TOLD:
        _gate.told |= {name}
        logger.info("model_code.left_aside model=%s: no code that came with it runs here", name)


def _short(model: Any) -> str:
    return ascii(str(model))[:_LONGEST_NAME]
