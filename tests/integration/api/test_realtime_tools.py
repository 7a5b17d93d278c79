"""Functions that a session's model calls, over OpenAI's own client: of an echo, and of a real model on vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.engines import as_the_supervisor_has_it
from tests.support.speaking import CALLER, LISTENER, served, spoken
from tests.support.talking import Talk, sound_of, talking, words_of
from tests.support.tool_model import ASK, no_spaces, tool_stage, write_model

# As the supervisor has it; threads that spin for each other make tiny models slow.
torch.set_num_threads(1)

ADD: Any = {"type": "function", "name": "add", "description": "Add two numbers.", "parameters": {"type": "object"}}


async def answer_call(talk: Talk, call: Any, said: str) -> list[Any]:
    """Tell what the function has said, and have it answered."""
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": said}
    await talk.connection.conversation.item.create(item=output)
    await talk.connection.response.create()
    return await talk.hear("response.done")


async def test_a_function_is_called_in_the_middle_of_a_conversation() -> None:
    """1. words and a call: the call is not said; 2. what the function has told is answered, with its sound"""
    async with served(CALLER) as hub, talking(hub) as talk:
        await talk.connection.session.update(session={"type": "realtime", "tools": [ADD], "tool_choice": "auto"})
        (updated,) = await talk.hear("session.updated")
        assert updated.session.tools[0].name == "add"
        events = await talk.ask('a moment CALL add {"a": 26, "b": 48}')
        arguments = [each.arguments for each in events if each.type == "response.function_call_arguments.done"]
        deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
        assert [json.loads(each) for each in (*arguments, "".join(deltas))] == [{"a": 26, "b": 48}] * 2
        assert (words_of(events), sound_of(events)) == ("a moment", b"")
        message, call = events[-1].response.output
        assert (message.type, call.type, call.name, call.status) == ("message", "function_call", "add", "completed")
        events = await answer_call(talk, call, "it is 74")
        assert words_of(events) == "it is 74"
        assert sound_of(events) == spoken("it is 74")
        await talk.connection.session.update(session={"type": "realtime", "tools": []})
        assert words_of(await talk.ask("CALL add {}")) == "CALL add {}"


async def test_a_pipeline_that_calls_nothing_says_what_is_missing() -> None:
    async with served(LISTENER) as hub, talking(hub) as talk:
        await talk.connection.session.update(session={"type": "realtime", "tools": [ADD]})
        (error,) = await talk.hear("error")
        assert "stage 0" in error.error.message
        assert "tool_call_parser" in error.error.message
        assert words_of(await talk.ask("fine")).strip() == "fine"


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
async def test_a_real_model_calls_a_function_and_answers_by_what_it_says(tmp_path: Path) -> None:
    """It has to call one, which any model can; what that says is a sum, which this model knows."""
    write_model(tmp_path / "thinker")
    stage = msgspec.to_builtins(tool_stage(tmp_path / "thinker"))
    stage["default_sampling_params"] = {"temperature": 0.0, "max_tokens": 60, **no_spaces()}
    document = json.dumps({"model": "thinker", "stages": [stage]})
    with as_the_supervisor_has_it():
        async with served(document) as hub, talking(hub) as talk:
            await use_function(talk)


async def use_function(talk: Talk) -> None:
    session: Any = {"type": "realtime", "tools": [{"type": "function", **ASK}], "parallel_tool_calls": False}
    await talk.connection.session.update(session=session)
    await talk.hear("session.updated")
    for choice in ("required", {"type": "function", "name": "ask"}):
        done = (await talk.ask("Who knows?", tool_choice=choice))[-1]
        (call,) = done.response.output
        assert (call.name, json.loads(call.arguments)) == ("ask", {"who": "ann"})
        events = await answer_call(talk, call, "26 plus 48")
        assert words_of(events) == "26 + 48 = 74"
