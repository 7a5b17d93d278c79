"""The functions of a request: their bounds, and the form of an answer that has to call one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.tools import MAX_TOOLS, AskedTools, asked_tools
from omni_discovery.wire import MAX_TOOL_CALLS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def asked(*tools: dict[str, Any], **more: Any) -> AskedTools:
    found = asked_tools({"messages": [], "tools": list(tools), **more})
    assert found is not None
    return found


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_the_wire_carries_as_many_calls_as_there_may_be() -> None:
    assert MAX_TOOLS == MAX_TOOL_CALLS


def test_without_tools_or_with_none_to_call_nothing_is_asked() -> None:
    for inputs in ({}, {"tools": []}, {"tools": None, "tool_choice": "required"}):
        assert asked_tools({"messages": [], **inputs}) is None
    assert asked_tools({"messages": [], "tools": [tool("add")], "tool_choice": "none"}) is None
    assert asked(tool("add")).form() is None


def test_a_call_of_one_function_is_its_arguments() -> None:
    tools = asked(tool("add", parameters=SCHEMA), tool("sing"), tool_choice=named("add"))
    assert tools.form() == SCHEMA
    assert tools.calls_in(' {"a": 3} ') == [("add", '{"a": 3}')]
    assert tools.calls_in('{"a": ') == []
    empty = asked(tool("sing"), tool_choice=named("sing")).form()
    assert empty == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_call_of_any_is_a_list_with_names() -> None:
    tools = asked(tool("add", parameters=SCHEMA), tool("sing"), tool_choice="required")
    form = tools.form() or {}
    assert [each["properties"]["name"]["enum"] for each in form["items"]["anyOf"]] == [["add"], ["sing"]]
    made = [{"name": "add", "parameters": {"a": 1}}, {"name": "sing", "parameters": {}}]
    assert [(name, json.loads(given)) for name, given in tools.calls_in(json.dumps(made))] == [
        ("add", {"a": 1}),
        ("sing", {}),
    ]
    for wrong in ("", "[", "{}", '[{"name": "add"}]', "[1]"):
        assert tools.calls_in(wrong) == []
    one = asked(tool("sing"), tool_choice="required", parallel_tool_calls=False).form() or {}
    assert (one["minItems"], one["maxItems"]) == (1, 1)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"messages": None}, "they go with messages"),
        ({"tools": [{"type": "function"}]}, "can't be used"),
        ({"tools": "add"}, "can't be used"),
        ({"tools": [tool("add", parameters={"x": object()})]}, "can't be used"),
        ({"tools": [tool("")]}, "can't be used"),
        ({"tools": [tool("x" * 65)]}, "can't be used"),
        ({"tools": [tool(f"f{number}") for number in range(129)]}, "can't be used"),
        ({"tools": [tool("add"), tool("add")]}, "the same name"),
        ({"tools": [tool("add", description="x" * (1 << 18))]}, "describe fewer"),
        ({"tool_choice": "perhaps"}, "can't be used"),
        ({"tool_choice": named("sing")}, "no tool 'sing'"),
        ({"tool_choice": "required", "tools": [tool("add", parameters={"$defs": {}})]}, r"have \$defs"),
        ({"tool_choice": named("add"), "tools": [tool("add", parameters={"pattern": "x{99999}"})]}, "tools"),
    ],
)
def test_what_can_not_be_followed_is_refused(inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        asked_tools({"messages": [], "tools": [tool("add")], **inputs})
