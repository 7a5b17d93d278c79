"""Flags of ``vllm serve`` and of vLLM-Omni given to ``omni serve``: taken where they mean something, else answered.

Arguments of vLLM's engine are taken for ``omni serve MODEL``, which is one vLLM stage. With a deploy document they
belong to one of its stages, and the answer says where.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hub.serve import vllm_flags
from hub.serve.vllm_flags import engine_value
from hub.serve.vllm_omni import flags as vllm_omni_flags
from hub.serve.vllm_omni.resolve import asks_vllm_omni
from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.engine_args import argument_problems
from omni_discovery.deploy.overrides import FLAG
from omni_discovery.errors import ConfigError

_ENGINE: Final = "engine"
#: vLLM's flag for the name that clients see.
_NAME: Final = "served_model_name"
_SERVER: Final = "server"
_OMNI: Final = "vllm-omni"


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """One flag as it was given. ``name`` is that of vLLM's argument, or the flag of vLLM-Omni itself."""

    flag: str
    origin: str
    name: str
    given: bool | str | list[str]

    @property
    def text(self) -> str:
        """The flag with its value, for a shell."""
        words = [] if isinstance(self.given, bool) else [self.given] if isinstance(self.given, str) else self.given
        return shlex.join([self.flag, *words])


class _Collect(argparse.Action):
    """Appends a ForeignFlag to ``arguments.foreign``."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, origin: str, name: str, **options: Any) -> None:
        super().__init__(option_strings, dest, default=(), help=argparse.SUPPRESS, **options)
        self._origin, self._name = origin, name

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        flag = option or self.option_strings[0]
        given = not flag.startswith("--no-") if self.nargs == 0 else values
        found = ForeignFlag(flag, self._origin, self._name, given)
        namespace.foreign = (*namespace.foreign, found)


def add_foreign_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are not ours, without showing them in the help. Ours have to be there already."""
    group = parser.add_argument_group()
    for flags, nargs in (
        (vllm_omni_flags.VALUES, None),
        (vllm_omni_flags.LISTS, "+"),
        (vllm_omni_flags.SWITCHES, 0),
    ):
        for flag in flags:
            _add(group, [flag, f"--{flag.removeprefix('--').replace('-', '_')}"], _OMNI, flag, nargs)
    for origin, names, nargs in (
        (_ENGINE, vllm_flags.SWITCHES, 0),
        (_ENGINE, vllm_flags.TEXTS | vllm_flags.VALUES, None),
        (_NAME, {_NAME}, "+"),
        (_ENGINE, (vllm_flags.TEXT_LISTS | vllm_flags.VALUE_LISTS) - {_NAME}, "+"),
        (_SERVER, vllm_flags.SERVER_SWITCHES, 0),
        (_SERVER, vllm_flags.SERVER_VALUES, None),
        (_SERVER, vllm_flags.SERVER_LISTS, "+"),
    ):
        for name in sorted(names):
            _add(group, _options_of(name, is_switch=nargs == 0), origin, name, nargs)


def _options_of(name: str, *, is_switch: bool) -> list[str]:
    """All spellings of a flag of vLLM, which takes underscores, too."""
    plain = list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))
    off = [f"--no-{each.removeprefix('--')}" for each in plain] if is_switch else []
    return [*plain, *off, *(alias for alias, of in vllm_flags.ALIASES.items() if of == name)]


def _add(
    group: argparse._ArgumentGroup, options: Iterable[str], origin: str, name: str, nargs: int | str | None
) -> None:
    ours = group._option_string_actions  # noqa: SLF001 - argparse has no other way to ask what is taken
    if free := [option for option in options if option not in ours]:
        group.add_argument(*free, dest="foreign", action=_Collect, origin=origin, name=name, nargs=nargs)


def check_foreign(arguments: argparse.Namespace) -> None:
    """Raise ConfigError with an answer to each flag that has no meaning in this command."""
    answers = [*_answers(arguments.foreign)]
    if not (serves_model_alone(arguments) or asks_vllm_omni(arguments)):
        answers += _where_it_belongs(arguments.foreign, is_headless=arguments.headless)
    if len(answers) == 1:
        raise ConfigError(answers[0])
    if answers:
        raise ConfigError("these flags belong elsewhere:" + "".join(f"\n  {each}" for each in answers))


def serves_model_alone(arguments: argparse.Namespace) -> bool:
    """Whether the command is ``omni serve MODEL``: one vLLM stage, no document and no ``--omni``."""
    has_document = arguments.deploy_config is not None or arguments.omni
    return bool(arguments.model) and not has_document and not arguments.headless


def _answers(flags: Sequence[ForeignFlag]) -> Iterable[str]:
    """Answer the flags that have no meaning in any command."""
    of_omni = {**vllm_omni_flags.VALUES, **vllm_omni_flags.LISTS, **vllm_omni_flags.SWITCHES}
    for flag in flags:
        if flag.origin == _OMNI:
            yield f"{flag.flag}: {of_omni[flag.name]}"
        elif flag.name in vllm_flags.WITHOUT_EFFECT:
            yield f"{flag.text}: has no effect on a hub, whose listener is its own: leave it out (docs/security.md)"
    taken = [flag for flag in flags if flag.origin == _SERVER and flag.name not in vllm_flags.WITHOUT_EFFECT]
    if server := [flag.text for flag in taken]:
        api_args = shlex.quote(" ".join(server))
        yield f"{', '.join(server)}: a flag of vLLM's server, which --api vllm starts: --api vllm --api-args={api_args}"


def _where_it_belongs(flags: Sequence[ForeignFlag], *, is_headless: bool) -> Iterable[str]:
    """Answer the flags that ``omni serve MODEL`` would have taken."""
    if names := [flag.text for flag in flags if flag.origin == _NAME]:
        yield f"{', '.join(names)}: the name that clients see is 'model' of the deploy document"
    refused = dict(_refused_arguments(flags))
    yield from () if is_headless else refused.values()
    taken = [flag for flag in flags if flag.origin == _ENGINE and (is_headless or flag.name not in refused)]
    engine = [flag.text for flag in taken]
    if not engine:
        return
    told = f"{', '.join(engine)}: {'an argument' if len(engine) == 1 else 'arguments'} of a stage's engine"
    if is_headless:
        yield f"{told}, which are part of the pipeline in force: say it to the hubs"
        return
    given = engine_args_of(taken)
    lines = ", ".join(f"{name}: {json.dumps(value)}" for name, value in given.items())
    override = shlex.quote(json.dumps({"N": {"engine_args": given}}))
    yield (
        f"{told}: write {{{lines}}} into engine_args of that stage in the deploy document, or give {FLAG} {override}"
        " with the stage's id in place of N"
    )


def _refused_arguments(flags: Sequence[ForeignFlag]) -> Iterable[tuple[str, str]]:
    """Return the arguments that the check of a vLLM stage refuses, with its answers."""
    for name, value in engine_args_of(flags).items():
        stage = StageConfig(stage_id=0, engine="vllm", engine_args={name: value})
        for problem in argument_problems(stage):
            text = next(flag.text for flag in reversed(flags) if flag.name == name)
            answer = problem.text.removeprefix("stage 0: ").replace("--stage-id 0 ", "--stage-id N ")
            yield name, f"{text}: {answer}"


def engine_args_of(flags: Sequence[ForeignFlag]) -> dict[str, Any]:
    """Return the arguments of vLLM's engine among the flags; the last of two counts. Raise ConfigError."""
    return {flag.name: engine_value(flag.name, flag.given) for flag in flags if flag.origin == _ENGINE}


def served_name(flags: Sequence[ForeignFlag]) -> str:
    """Return the model name of ``--served-model-name``; empty without one. Raise ConfigError for several."""
    names = [name for flag in flags if flag.origin == _NAME and isinstance(flag.given, list) for name in flag.given]
    if len(names) > 1:
        raise ConfigError(
            f"--served-model-name: a pipeline has one name, and these are {len(names)}: {', '.join(names)}"
        )
    return names[0] if names else ""


def stage_of_model(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Return the deploy document of ``omni serve MODEL``, in the document's own keys. Raise ConfigError."""
    engine_args = engine_args_of(arguments.foreign)
    output = "embedding" if engine_args.get("runner") == "pooling" else "text"
    stage: dict[str, Any] = {"stage_id": 0, "engine": "vllm", "model": arguments.model, "final_output": output}
    if engine_args:
        stage["engine_args"] = engine_args
    name = served_name(arguments.foreign)
    return {"stages": [stage], **({"model": name} if name else {})}
