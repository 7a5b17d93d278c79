"""The functions that a session lets its model call: what a client may say of them, and whether the pipeline can."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hub.api.realtime.schema import SessionUpdate, parse_event
from hub.api.realtime.tools import NO_SESSION_TOOLS, SessionTools, tools_missing
from omni_discovery.errors import InvalidRequestError
from tests.support.hub_fakes import deploy_of

ADD: dict[str, Any] = {"type": "function", "name": "add"}
NAMED = {"type": "function", "name": "add"}


def update(before: SessionTools = NO_SESSION_TOOLS, /, missing: str = "", **session: Any) -> SessionTools:
    event = parse_event(json.dumps({"type": "session.update", "session": session}))
    assert isinstance(event, SessionUpdate)
    return before.updated(event.session, "session", missing)


def test_each_field_changes_what_it_names() -> None:
    tools = update(tools=[ADD])
    assert tools.inputs()["tool_choice"] == "auto"
    tools = update(tools, tool_choice=NAMED)
    assert tools.inputs()["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    tools = update(tools, parallel_tool_calls=False)
    assert tools.inputs()["parallel_tool_calls"] is False
    assert tools.shown() == {"tools": [{**ADD, "description": None, "parameters": None}], "tool_choice": NAMED}
    assert update(tools, **tools.shown()) == tools
    assert update(tools, tool_choice="none").inputs() == {}
    assert update(tools, tool_choice="auto", tools=None).inputs() == {}


@pytest.mark.parametrize(
    ("session", "said"),
    [
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "can't be used"),
        ({"tools": [{"type": "function", "name": "two words"}]}, "can't be used"),
        ({"tool_choice": {"type": "mcp"}, "tools": [ADD]}, "can't be used"),
        ({"tool_choice": "required"}, "there are no tools that could be called"),
        ({"tools": [ADD], "tool_choice": {**NAMED, "name": "sing"}}, r"session\.tool_choice: there is no tool 'sing'"),
        ({"tools": [ADD, ADD]}, "the same name"),
        ({"tools": [{**ADD, "name": f"f{number}"} for number in range(129)]}, "tools can't be used"),
        ({"tools": [{**ADD, "description": "x" * (1 << 18)}]}, "describe fewer"),
        (
            {"tools": [{**ADD, "parameters": {"type": "string", "pattern": "x{100000}"}}], "tool_choice": NAMED},
            "tools",
        ),
    ],
)
def test_what_can_not_be_called_is_refused_and_nothing_changes(session: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        update(**session)


def test_a_pipeline_that_can_not_says_what_is_missing() -> None:
    """1. no parser is named; 2. the first stage puts out no text; 3. it can"""
    stage = "stages: [{stage_id: 0, engine: echo, engine_args: {ARGS}, final_output: text}]"
    missing = tools_missing(deploy_of(stage.replace("ARGS", "")))
    assert "tool_call_parser" in missing
    with pytest.raises(
        InvalidRequestError, match=r"'session\.tools' can't be served by this pipeline: stage 0 does not"
    ):
        update(missing=missing, tools=[ADD])
    assert update(missing=missing, tools=[], tool_choice="auto") == NO_SESSION_TOOLS
    drawer = stage.replace("ARGS", "modality: image").replace("final_output: text", "final_output: image")
    assert "puts out none" in tools_missing(deploy_of(drawer))
    assert tools_missing(deploy_of(stage.replace("ARGS", "tool_call_parser: echo"))) == ""


@pytest.mark.attack("M12")
def test_functions_count_with_what_their_objects_take() -> None:
    """48 000 empty lists are 96 kB of JSON and megabytes of memory, which sessions are to count."""
    heavy = update(tools=[{**ADD, "parameters": {"enum": [[]] * 10_000}}])
    assert heavy.size_bytes > 1_000_000
    assert 0 < update(tools=[ADD]).size_bytes < 1000
    assert update(heavy, tool_choice="none").size_bytes == heavy.size_bytes
    assert update(heavy, tools=[]).size_bytes == 0
