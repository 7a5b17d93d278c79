"""A vLLM stage's engine_args, as vLLM's own class for them would get them; vLLM itself is not needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.engines.vllm.load import (
    engine_args_of,
    may_have_forms,
    take_allow_grammars,
    take_share_prefix_cache,
)
from stage_runtime.engines.vllm.runs import Runs

STAGE = StageConfig(stage_id=3, engine="vllm", model="m")


@dataclass
class Args:
    """Some of vLLM's."""

    model: str
    max_num_seqs: int = 8
    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None


def test_an_argument_that_vllm_has_not_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no engine_args.max_num_seq .*'max_num_seqs'"):
        engine_args_of(STAGE, {"max_num_seq": 1}, Args)


@pytest.mark.parametrize(
    ("given", "may"),
    [
        ({}, True),
        ({"enable_prompt_embeds": True}, False),
        ({"enable_prompt_embeds": True, "structured_outputs_config": {"backend": "auto"}}, False),
        ({"enable_prompt_embeds": True, "structured_outputs_config": {"disable_any_whitespace": True}}, False),
        ({"enable_prompt_embeds": True, "structured_outputs_config": {"backend": "xgrammar"}}, True),
    ],
)
def test_forms_are_made_where_steps_are_bounded_or_the_operator_has_chosen(given: dict[str, Any], may: bool) -> None:
    assert may_have_forms(given) is may


@pytest.mark.parametrize(
    ("given", "may"),
    [
        ({}, False),
        ({"allow_grammars": True}, True),
        ({"structured_outputs_config": {"backend": "guidance"}}, False),
        ({"structured_outputs_config": {"backend": "auto"}}, False),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, True),
    ],
)
def test_grammars_are_taken_where_the_operator_says_so(given: dict[str, Any], may: bool) -> None:
    arguments = dict(given)
    assert take_allow_grammars(STAGE, arguments) is may
    assert "allow_grammars" not in arguments


@pytest.mark.parametrize("name", ["allow_grammars", "share_prefix_cache"])
def test_what_is_no_yes_or_no_is_refused_by_name(name: str) -> None:
    take = {"allow_grammars": take_allow_grammars, "share_prefix_cache": take_share_prefix_cache}[name]
    with pytest.raises(ConfigError, match=f"engine_args.{name}"):
        take(STAGE, {name: "perhaps"})


def test_stats_are_kept_where_they_are_asked_for_or_needed_for_spans() -> None:
    """VLLM makes its spans of them, and ends with the first request if they are not there."""
    url = {"otlp_traces_endpoint": "http://h:4318/v1/traces"}
    assert engine_args_of(STAGE, {}, Args) == Args("m", disable_log_stats=True)
    assert not engine_args_of(STAGE, {"disable_log_stats": False}, Args).disable_log_stats
    assert not engine_args_of(STAGE, url, Args).disable_log_stats


def test_vllm_gets_the_span_of_a_request_that_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.exceptions"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(VLLMValidationError=ValueError))
    told: list[dict[str, Any]] = []

    class Llm:
        vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs"))

        def add_request(self, name: str, prompt: Any, params: Any, **more: Any) -> str:
            told.append(more)
            return name

    runs = Runs(Llm())
    runs.start("a", {"prompt": "x"}, None, trace="00-7-7-01")
    runs.start("b", {"prompt": "x"}, None)
    assert told == [{"lora_request": None, "trace_headers": {"traceparent": "00-7-7-01"}}, {"lora_request": None}]
