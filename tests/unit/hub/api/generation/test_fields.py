"""The fields that routes share, as parameters of stages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hub.api.generation.fields import TextFields, logprobs_asked, stage_params, voice_params, with_seed
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import InvalidRequestError

TRIO = parse_deploy(
    """
stages:
  - {stage_id: 3, engine: vllm, final_output: text}
  - {stage_id: 5, engine: torch, default_sampling_params: {speaker: ann}}
  - {stage_id: 6, engine: torch, final_output: audio}
""",
    "trio.yaml",
)
ECHO = parse_deploy("stages: [{stage_id: 2, engine: echo, final_output: text}]", "echo.yaml")

SENT: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 4,
    "repetition_penalty": 1.2,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "logit_bias": {"5": -100.0},
}
NOTHING: dict[str, Any] = {
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "bad_words": [],
    "logit_bias": {},
}


def test_vllms_fields_reach_text_stages_and_no_others() -> None:
    fields = msgspec.convert(SENT, TextFields)
    params = stage_params(TRIO, fields, fields.text_params())
    assert params == {3: SENT, 5: {}, 6: {}}


@pytest.mark.attack("L4")
def test_bad_words_count_for_each_answer_wherever_they_are_asked_for() -> None:
    """Each answer turns them into tokens in the engine's thread."""
    words = ["no" * 100] * 10
    listed = msgspec.convert({"sampling_params_list": [None, {"bad_words": words}]}, TextFields)
    for fields in (msgspec.convert({"bad_words": words}, TextFields), listed):
        stage_params(TRIO, fields, fields.text_params(), answers=2)
        with pytest.raises(InvalidRequestError, match="bad_words: 2000 characters for each of 3 answers"):
            stage_params(TRIO, fields, fields.text_params(), answers=3)


@pytest.mark.attack("O1")
def test_patterns_that_take_long_to_look_for_are_refused_at_the_hub() -> None:
    """A request that no replica may run is not sent to one."""
    asked = {"repetition_detection": {"max_pattern_size": 1 << 30, "min_count": 2}}
    fields = msgspec.convert({"sampling_params_list": [None, asked]}, TextFields)
    with pytest.raises(InvalidRequestError, match="repetition_detection: "):
        stage_params(TRIO, fields, fields.text_params())


def test_what_asks_for_nothing_reaches_no_stage() -> None:
    """Clients send such values to every model, and a stage may refuse what it does not know."""
    assert msgspec.convert(NOTHING, TextFields).text_params() == {}


def test_a_voice_goes_where_the_document_names_one_and_else_to_the_first_stage() -> None:
    asked = {"speaker": "bob", "language": "English", "instruct": None}
    assert voice_params(TRIO, asked) == {5: {"speaker": "bob"}, 3: {"language": "English"}}


def test_log_probabilities_are_asked_of_vllm_and_refused_elsewhere_with_the_reason() -> None:
    assert logprobs_asked(TRIO, ["text", "audio"], 2) == {3: {"logprobs": 2}}
    with pytest.raises(InvalidRequestError, match="stage 2 runs on engine 'echo', which gives none"):
        logprobs_asked(ECHO, None, 0)
    with pytest.raises(InvalidRequestError, match="no text is asked for"):
        logprobs_asked(TRIO, ["audio"], 0)
    with pytest.raises(InvalidRequestError, match="are the most"):
        logprobs_asked(TRIO, None, 1000)


def test_each_answer_has_a_seed_of_its_own() -> None:
    params = {0: {"seed": 5, "top_k": 1}, 1: {}}
    assert [with_seed(params, number)[0]["seed"] for number in range(3)] == [5, 6, 7]
    assert params[0]["seed"] == 5
