"""Calls of functions in the answers of a real vLLM stage: made of the model's own way to write them, and forced."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.wire import ToolAnswer
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, create_engine
from stage_runtime.testing import resume_of, run
from tests.support.engines import THINKER, as_the_supervisor_has_it
from tests.support.tool_model import ASK, WRITTEN, as_chats_have, no_spaces, tool_stage, write_model

# As the supervisor has it; threads that spin for each other make tiny models slow.
torch.set_num_threads(1)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TOOLS = [as_chats_have(ASK)]
#: One call: this model would go on to make more.
ONE = {"parallel_tool_calls": False}
#: The model's answer, whatever it would say itself.
HERMES = {"structured_outputs": {"choice": ["i ask. " + WRITTEN]}, "max_tokens": 100}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model") / "thinker"
    write_model(folder)
    with as_the_supervisor_has_it():
        made = create_engine(tool_stage(folder))
        made.load(lambda _phase, _progress: None)
        yield made
        made.close()


def ask(question: Any, **more: Any) -> StageRequest:
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    inputs = {"messages": messages, "tools": TOOLS, **more.pop("inputs", {})}
    params = {"temperature": 0.0, "max_tokens": 60, **more.pop("params", {})}
    return StageRequest("r", "r", inputs=inputs, params=params, next_stages=(1,), **more)


def answer(engine: Engine, request: StageRequest) -> list[EngineOutput]:
    return run(engine, request)[request.key]


def words_of(outputs: list[EngineOutput]) -> str:
    called = outputs[-1].called
    assert called is None or not called.calls
    return "".join(each.text for each in outputs) if called is None else called.content


def test_what_the_model_writes_is_read_by_the_parser_that_the_document_names(engine: Engine) -> None:
    """The words beside the call are told; a call is not handed over, where the next stage would say it."""
    outputs = answer(engine, ask("26 plus 48", params=HERMES))
    (call,) = (outputs[-1].called or ToolAnswer()).calls
    assert (call.name, json.loads(call.arguments)) == ("ask", {"who": "bob"})
    assert outputs[-1].called is not None
    assert outputs[-1].called.content.strip() == "i ask."
    assert outputs[-1].handoff is None
    assert "".join(each.text for each in outputs) == "i ask. " + WRITTEN


def test_a_call_that_must_be_made_is_made_by_any_model(engine: Engine) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "ask"}}):
        outputs = answer(engine, ask("26 plus 48", inputs={"tool_choice": choice, **ONE}, params=no_spaces()))
        made = outputs[-1].called
        assert made is not None
        calls = [(each.name, json.loads(each.arguments)) for each in made.calls]
        assert calls == [("ask", {"who": "ann"})], "".join(each.text for each in outputs)
        assert made.content == ""
    cut = answer(engine, ask("26 plus 48", inputs={"tool_choice": "required"}, params={"max_tokens": 3}))[-1]
    assert (cut.called, cut.handoff) == (ToolAnswer(), None)


def test_words_alone_are_an_answer_as_always(engine: Engine) -> None:
    """The model has seen the tools, and after a call it sees what the tool has said."""
    plain: list[dict[str, Any]] = [{}, {"tool_choice": "none"}, {"tools": []}]
    for inputs in plain:
        outputs = answer(engine, ask("26 plus 48", inputs=inputs))
        assert words_of(outputs) == "26 + 48 = 74"
        assert outputs[-1].handoff is not None
        assert outputs[-1].handoff["text"] == "26 + 48 = 74"
    seen = [answer(engine, ask("x", inputs=inputs))[-1].usage["prompt_tokens"] for inputs in plain[::2]]
    assert seen[0] == seen[1] + len("[ask]")
    call = {"id": "c", "type": "function", "function": {"name": "ask", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Ask Ann."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "26 plus 48"},
    ]
    assert words_of(answer(engine, ask(messages))) == "26 + 48 = 74"


def test_a_call_that_another_replica_has_begun_is_read_whole(engine: Engine) -> None:
    """The mark of its beginning is in the part that this engine has not made."""
    resume = resume_of(answer(engine, ask("26 plus 48", params=HERMES))[:-1])
    params = {"max_tokens": len(resume.token_ids)}
    (last,) = answer(engine, replace(ask("26 plus 48", params=params), resume=resume))
    assert last.called is not None
    assert [json.loads(each.arguments) for each in last.called.calls] == [{"who": "bob"}]


@pytest.mark.attack("U1")
def test_an_answer_that_takes_long_to_be_read_for_calls_is_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a client has the model write what the parser's expressions take a minute for
    2. the parser is cut short, though it takes any error for an answer without calls
    3. the client has the words, and the next answer's call is read
    """
    from vllm.tool_parsers import ToolParserManager

    parser: Any = ToolParserManager.get_tool_parser("hermes")

    def search(_parser: Any, _text: str, request: Any) -> Any:
        try:
            return re.findall(r"<a>([\s\S]*?)</a>", "<a>" * 40_000)
        except Exception:  # noqa: BLE001 - as vLLM's parsers do
            return request

    with monkeypatch.context() as patch:
        patch.setattr(parser, "extract_tool_calls", search)
        began_s = time.thread_time()
        outputs = answer(engine, ask("26 plus 48", params=HERMES))
    assert time.thread_time() - began_s < 15
    assert words_of(outputs) == "i ask. " + WRITTEN
    last = answer(engine, ask("26 plus 48", params=HERMES))[-1]
    assert last.called is not None
    assert [json.loads(each.arguments) for each in last.called.calls] == [{"who": "bob"}]


def test_what_can_not_be_asked_is_refused(engine: Engine) -> None:
    for inputs, said in (
        ({"tools": [{"type": "function"}]}, "tools can't be used"),
        ({"tool_choice": "maybe"}, "tools can't be used"),
        ({"tool_choice": {"type": "function", "function": {"name": "sing"}}}, "no tool 'sing'"),
        ({"messages": None, "prompt": "1 + 1"}, "they go with messages"),
        ({"tools": [as_chats_have({**ASK, "description": "x" * 300_000})]}, "describe fewer"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            engine.add(ask("1 + 1", inputs=inputs))
    with pytest.raises(InvalidRequestError, match="async_chunk false"):
        engine.add(replace(ask("1 + 1"), stream_to=(1,)))
    assert not engine.has_unfinished()


def test_a_stage_that_could_read_no_calls_does_not_start(tmp_path: Path) -> None:
    """1. the document names a parser that vLLM does not have; 2. the model's template shows no tools"""
    write_model(tmp_path / "thinker")
    write_model(tmp_path / "plain", "{{ messages[-1].content }}<|answer|>")
    for folder, parser, said in (
        ("thinker", "hermse", "did you mean 'hermes'"),
        ("plain", "hermes", "does not show tools"),
    ):
        made = create_engine(tool_stage(tmp_path / folder, tool_call_parser=parser))
        with as_the_supervisor_has_it(), pytest.raises(ConfigError, match=said):
            made.load(lambda _phase, _progress: None)
        made.close()
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    split = replace(tool_stage(tmp_path / "thinker", pd="prefill", kv_transfer_config=transfer), final_output="none")
    with pytest.raises(ConfigError, match="split into prefill and decode"):
        create_engine(split)
    pooling = replace(tool_stage(tmp_path / "thinker"), final_output="embedding")
    with pytest.raises(ConfigError, match="tool_call_parser: a stage that pools has none"):
        create_engine(pooling)


def test_a_stage_without_a_parser_says_what_is_missing() -> None:
    made = create_engine(THINKER)
    with as_the_supervisor_has_it():
        made.load(lambda _phase, _progress: None)
        with pytest.raises(InvalidRequestError, match="tool_call_parser"):
            made.add(ask("1 + 1"))
        made.close()
