"""The functions that a request lets a model call, the forms of calls that must be made, and calls in such a form. Pure.

A call that may be made is in the model's own way to write it: to read that is each engine's affair. Where one must be
made, the answer gets the form of JSON, whatever the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import check_schema

#: The argument of a stage that says how its model writes calls.
PARSER_ARG: Final = "tool_call_parser"
#: How many functions a request may name, and how many calls one answer may be: as many as the wire carries.
MAX_TOOLS: Final = 128
#: The most that all functions of a request are together, as JSON.
MAX_TOOLS_BYTES: Final = 1 << 18


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function, as chats describe it; ``parameters`` is the JSON schema of its arguments."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def form(self) -> dict[str, Any]:
        """The JSON schema of its arguments; without parameters: none may be given."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """One of the ``tools`` of a chat."""

    type: Literal["function"]
    function: Function


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The ``tool_choice`` of one function, which must be called."""

    type: Literal["function"]
    function: Named


class AskedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The functions of a request, and whether one must be called."""

    tools: Annotated[list[FunctionTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]
    tool_choice: Literal["auto", "required"] | NamedChoice = "auto"
    #: Whether one answer may be several calls.
    parallel_tool_calls: bool = True

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice != "auto"

    @property
    def most_calls(self) -> int:
        """How many calls one answer may be."""
        return MAX_TOOLS if self.parallel_tool_calls else 1

    def shown(self) -> list[dict[str, Any]]:
        """The functions as chat templates get them."""
        shown: list[dict[str, Any]] = msgspec.to_builtins(self.tools)
        return shown

    def form(self) -> dict[str, Any] | None:
        """The JSON schema of an answer that has to be a call; None if it need not be one."""
        if self.tool_choice == "auto":
            return None
        if isinstance(self.tool_choice, NamedChoice):
            return self._function(self.tool_choice.function.name).form
        calls = [_form_of_call(each.function) for each in self.tools]
        return {"type": "array", "minItems": 1, "maxItems": self.most_calls, "items": {"anyOf": calls}}

    def calls_in(self, text: str) -> list[tuple[str, str]]:
        """The calls of an answer that has this form: names, and arguments as JSON. Empty where it is not whole."""
        try:
            if isinstance(self.tool_choice, NamedChoice):
                msgspec.json.decode(text)
                return [(self.tool_choice.function.name, text.strip())]
            made = msgspec.json.decode(text, type=list[_MadeCall])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return []
        return [(each.name, bytes(each.parameters).decode()) for each in made]

    def _function(self, name: str) -> Function:
        for each in self.tools:
            if each.function.name == name:
                return each.function
        raise InvalidRequestError(f"tool_choice: there is no tool {name!r} among the request's tools")


class _MadeCall(msgspec.Struct):
    name: str
    parameters: msgspec.Raw


def _form_of_call(function: Function) -> dict[str, Any]:
    parameters = function.form
    # References of a schema lead from its root.
    if "$defs" in parameters or "definitions" in parameters:
        raise InvalidRequestError(
            f"tools: the parameters of {function.name!r} have $defs, which can't be joined with other tools: write them"
            " out, or name this tool in tool_choice"
        )
    properties = {"name": {"type": "string", "enum": [function.name]}, "parameters": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def asked_tools(inputs: Mapping[str, Any]) -> AskedTools | None:
    """The functions that a request's inputs let the model call; None if there are none. Raise InvalidRequestError."""
    tools, choice, many = (inputs.get(each) for each in ("tools", "tool_choice", "parallel_tool_calls"))
    if not tools or choice == "none":
        return None
    if inputs.get("messages") is None:
        raise InvalidRequestError("tools: they go with messages, which the chat template shows them beside")
    try:
        given = {"tools": tools, "tool_choice": choice or "auto", "parallel_tool_calls": many is None or many}
        asked = msgspec.convert(given, AskedTools)
        names = {each.function.name for each in asked.tools}
        size = len(msgspec.json.encode(asked.tools))
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"tools can't be used: {error}".replace("`", "'")) from error
    if len(names) < len(asked.tools):
        raise InvalidRequestError("tools: some have the same name; give each its own")
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"tools: {size} bytes together, where {MAX_TOOLS_BYTES} are allowed: describe fewer")
    form = asked.form()
    if form is not None:
        check_schema("tools", form)
    return asked
