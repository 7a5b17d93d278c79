"""The demo's thinker with a chat template that shows tools, and stages that serve it: it calls what it is made to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from omni_discovery.deploy.document import StageConfig
from tests.support.engines import DEMO, THINKER

#: The names of the tools before the question; of what a tool has said, that alone, which the thinker can answer.
TEMPLATE = (
    "{%- set last = messages[-1] -%}"
    "{%- if last.role != 'tool' and tools -%}"
    "{%- for tool in tools -%}[{{ tool.function.name }}]{%- endfor -%}"
    "{%- endif -%}"
    "{{- last.content -}}<|answer|>"
)
#: A function whose only argument has a single value: a call that must be made is the same with any model.
ASK = {
    "name": "ask",
    "description": "Ask somebody for the sum.",
    "parameters": {
        "type": "object",
        "properties": {"who": {"type": "string", "enum": ["ann"]}},
        "required": ["who"],
        "additionalProperties": False,
    },
}
#: How a Hermes model writes a call of it.
WRITTEN = '<tool_call> {"name": "ask", "arguments": {"who": "bob"}} </tool_call>'


def write_model(folder: Path, template: str = TEMPLATE) -> None:
    """Write the model's folder."""
    shutil.copytree(DEMO / "thinker", folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "chat_template": template}), "utf-8")


def tool_stage(folder: Path, **more: Any) -> StageConfig:
    """A stage of that model, which reads the calls of Hermes models; ``more`` are arguments of its engine."""
    arguments = {name: value for name, value in THINKER.engine_args.items() if name != "handoff"}
    return StageConfig(
        stage_id=0,
        engine="vllm",
        model=str(folder),
        engine_args={**arguments, "tool_call_parser": "hermes", **more},
        final_output="text",
    )


def as_chats_have(function: dict[str, Any]) -> dict[str, Any]:
    """A function as one of a chat's tools."""
    return {"type": "function", "function": function}


def no_spaces() -> dict[str, Any]:
    """Parameters against white space, with which this model would fill JSON: it is its most likely token."""
    vocabulary = json.loads((DEMO / "thinker" / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    # How byte-level tokenizers write them: a space, a line feed, a carriage return and a tab.
    return {"logit_bias": {vocabulary[each]: -100.0 for each in "ĠĊčĉ" if each in vocabulary}}
