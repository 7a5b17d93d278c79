"""The functions that a session lets its model call, and whether its pipeline can. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec import UNSET

from hub.api.realtime.schema import ResponseFields, SessionFields, SessionTool, SessionToolChoice
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.tools import PARSER_ARG, asked_tools

#: Memory of a value, or a name, beside its characters.
_OBJECT_BYTES: Final = 100


@dataclass(frozen=True, slots=True)
class SessionTools:
    """The functions in force, and which may, or must, be called."""

    tools: Sequence[SessionTool] = ()
    choice: str | SessionToolChoice = "auto"
    #: Whether one response may call several.
    calls_several: bool = True
    #: The memory of the functions, about.
    size_bytes: int = 0

    def shown(self) -> dict[str, Any]:
        """As clients see them."""
        return {
            "tools": [msgspec.to_builtins(each) for each in self.tools],
            "tool_choice": msgspec.to_builtins(self.choice),
        }

    def inputs(self) -> dict[str, Any]:
        """What the first stage gets of them; empty if nothing is to be called."""
        if not self.tools or self.choice == "none":
            return {}
        choice: Any = self.choice
        if isinstance(choice, SessionToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "tools": [{"type": "function", "function": _function(each)} for each in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.calls_several,
        }

    def updated(self, asked: SessionFields | ResponseFields, where: str, missing: str) -> SessionTools:
        """As a client wants them from now on. ``missing`` is why there can be none, empty if there can.

        Raise InvalidRequestError; then nothing has changed.
        """
        changed = self
        if asked.tools is not UNSET:
            tools = tuple(asked.tools or ())
            changed = replace(changed, tools=tools, size_bytes=sum(map(_size_of, tools)))
        if asked.tool_choice is not UNSET:
            changed = replace(changed, choice=asked.tool_choice or "auto")
        if asked.parallel_tool_calls is not UNSET:
            changed = replace(changed, calls_several=asked.parallel_tool_calls is not False)
        if changed == self:
            return self
        if changed.tools and missing:
            raise InvalidRequestError(f"'{where}.tools' can't be served by this pipeline: {missing}")
        if not changed.tools and changed.choice not in ("auto", "none"):
            raise InvalidRequestError(f"'{where}.tool_choice': there are no tools that could be called; give 'tools'")
        try:
            asked_tools({"messages": [], **changed.inputs()})
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}.{error}") from error
        return changed


NO_SESSION_TOOLS: Final = SessionTools()


def _function(tool: SessionTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {name: value for name, value in given.items() if value is not None}


def _size_of(tool: SessionTool) -> int:
    """The memory of a function, about: that of small objects is far more than their JSON."""
    total, waiting = len(tool.name) + 4 * len(tool.description or ""), [tool.parameters]
    while waiting:
        value: Any = waiting.pop()
        total += _OBJECT_BYTES
        if isinstance(value, dict):
            total += sum(_OBJECT_BYTES + 4 * len(name) for name in value)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            total += 4 * len(value)
    return total


def tools_missing(deploy: DeployConfig) -> str:
    """Why no session of this pipeline can have tools; empty if it can."""
    stage = deploy.stages[0]
    if stage.final_output != "text":
        return f"calls are read from text, and stage {stage.stage_id} puts out none. Leave tools out"
    if not stage.engine_args.get(PARSER_ARG):
        return (
            f"stage {stage.stage_id} does not say how its model writes calls. The operator gives its engine_args a"
            f" {PARSER_ARG}, such as hermes, for a model whose chat template shows tools; else leave tools out"
        )
    return ""
