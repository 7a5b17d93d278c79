"""What vLLM's server asks for reaches vLLM's engine unchanged, by way of the hub, or is refused by name."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hub.api.vllm.params import params_of_choices, stage_params
from hub.serve.app import _load_vllm
from omni_discovery.errors import ConfigError, InvalidRequestError
from stage_runtime.engines.sampling import TokenSampling, pooling_asked, token_sampling
from stage_runtime.engines.vllm.sampling_params import check_runner_bounds, pooling_params, sampling_params
from tests.support.engines import as_the_supervisor_has_it

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def vllm_sampling() -> Any:
    with as_the_supervisor_has_it():
        from vllm import sampling_params as found
    return found


def carried(asked: Any) -> Any:
    """The parameters as a replica's engine gets them, by way of the wire."""
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(stage_params(asked)), strict=False)
    return sampling_params(token_sampling(params))


def asked_in(vllm_sampling: Any) -> dict[str, dict[str, Any]]:
    structured, repetition = vllm_sampling.StructuredOutputsParams, vllm_sampling.RepetitionDetectionParams
    return {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 0, "max_tokens": 9},
        "penalties": {"presence_penalty": -1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
        "ends": {"stop": ["a", "b"], "stop_token_ids": [3, 4], "min_tokens": 2, "ignore_eos": True, "max_tokens": 3},
        "stop shown": {"stop": "a", "include_stop_str_in_output": True},
        "tokens": {"logit_bias": {5: -100.0, 6: 1.5}, "allowed_token_ids": [5, 6, 7], "bad_words": ["no", "never"]},
        "wording": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        "json": {"structured_outputs": structured(json={"type": "object"}, disable_any_whitespace=True)},
        "json text": {"structured_outputs": structured(json='{"type": "object"}', whitespace_pattern=" ?")},
        "any json": {"structured_outputs": structured(json_object=True)},
        "choice": {"structured_outputs": structured(choice=["yes", "no"])},
        "regex": {"structured_outputs": structured(regex="[0-9]+")},
        "grammar": {"structured_outputs": structured(grammar='root ::= "a"')},
        "tag": {"structured_outputs": structured(structural_tag="{}")},
        "repetition": {"repetition_detection": repetition(max_pattern_size=4, min_pattern_size=2, min_count=3)},
        "thinking": {"thinking_token_budget": 12},
        "no bound": {"max_tokens": None},
        "logprobs": {"logprobs": 20},
        "own logprobs": {"logprobs": 0},
        "prompt logprobs": {"prompt_logprobs": 20},
        "no watermark": {"watermarking": False},
        "own processors": {"extra_args": {"planet": 1, "weights": [0.5, "mars"]}},
    }


@pytest.mark.parametrize(
    "name",
    [
        "greedy",
        "sampled",
        "penalties",
        "ends",
        "stop shown",
        "tokens",
        "wording",
        "json",
        "json text",
        "any json",
        "choice",
        "regex",
        "grammar",
        "tag",
        "repetition",
        "thinking",
        "no bound",
        "logprobs",
        "own logprobs",
        "prompt logprobs",
        "no watermark",
        "own processors",
    ],
)
def test_what_was_asked_reaches_the_engine_as_it_was_asked(vllm_sampling: Any, name: str) -> None:
    kind, given = vllm_sampling.RequestOutputKind.DELTA, asked_in(vllm_sampling)[name]
    if not set(given) <= set(vllm_sampling.SamplingParams.__struct_fields__):
        # Nobody can ask this vLLM's server so, but a client of the hub's own API can.
        with pytest.raises(InvalidRequestError, match=next(iter(given))):
            sampling_params(token_sampling(given))
        return
    asked = vllm_sampling.SamplingParams(output_kind=kind, **given)
    assert carried(asked) == asked


def test_every_field_of_vllms_is_carried_made_here_or_refused(vllm_sampling: Any) -> None:
    """A field that a later vLLM adds is refused until somebody has thought about it."""
    known = set(TokenSampling.__struct_fields__)
    ours = {"n", "output_kind", "detokenize", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"}
    usual = vllm_sampling.SamplingParams()
    for name in set(vllm_sampling.SamplingParams.__struct_fields__) - known - ours:
        if name.startswith("_"):
            continue
        asked = vllm_sampling.SamplingParams()
        setattr(asked, name, 3 if getattr(usual, name) is None else not getattr(usual, name))
        with pytest.raises(InvalidRequestError, match=name):
            stage_params(asked)


def test_nothing_is_said_of_what_was_not_asked(vllm_sampling: Any) -> None:
    """So that the document's defaults stand for all that the server has not settled."""
    said = stage_params(vllm_sampling.SamplingParams(max_tokens=7, extra_args={}))
    assert set(said) == {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"}


def test_the_seeds_of_several_answers_count_up_from_the_one_that_was_asked(vllm_sampling: Any) -> None:
    choices = params_of_choices(vllm_sampling.SamplingParams(n=3, seed=40))
    assert [params["seed"] for params in choices] == [40, 41, 42]
    assert "seed" not in params_of_choices(vllm_sampling.SamplingParams(n=2))[1]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"structured_outputs": {}}, "structured outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured outputs"),
        ({"structured_outputs": {"yaml": "a"}}, "yaml"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "min_count"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"extra_args": {"planet": {}}}, "extra_args"),
        ({"extra_args": {"kv_transfer_params": {"remote_host": "a"}}}, "extra_args.kv_transfer_params"),
        ({"extra_args": {"kv_cache_report_mode": "full"}}, "extra_args.kv_cache_report_mode"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "../a"}, "cache_salt"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
    ],
)
def test_a_form_that_makes_no_sense_is_refused_by_name(vllm_sampling: Any, params: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        sampling_params(token_sampling(params))


@pytest.mark.attack("D5")
@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "array", "minItems": 10**9, "maxItems": 10**9}},
        {"json": '{"type": "array", "minItems": 1000000000}'},
        {"choice": ["a" * 500_000]},
        {"regex": "^[a-z]{4096}$"},
    ],
)
def test_a_form_that_may_cost_too_much_is_refused_by_hub_and_stage(vllm_sampling: Any, form: dict[str, Any]) -> None:
    asked = vllm_sampling.SamplingParams(structured_outputs=vllm_sampling.StructuredOutputsParams(**form))
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.(json|choice|regex): "):
        params_of_choices(asked)
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.(json|choice|regex): "):
        token_sampling({"structured_outputs": form})


@pytest.mark.attack("L4")
def test_words_and_tokens_that_cost_too_much_are_refused_by_hub_and_stage(vllm_sampling: Any) -> None:
    """The hub counts the words for each answer; a stage makes one, and knows the vocabulary."""
    words = [f"{each}" * 200 for each in range(10)]
    assert len(params_of_choices(vllm_sampling.SamplingParams(n=2, bad_words=words))) == 2
    with pytest.raises(InvalidRequestError, match="bad_words: 2000 characters for each of 3 answers"):
        params_of_choices(vllm_sampling.SamplingParams(n=3, bad_words=words))
    with pytest.raises(InvalidRequestError, match="bad_words: 6000 characters, where"):
        token_sampling({"bad_words": words * 3})
    assert sampling_params(token_sampling({"allowed_token_ids": [5, 3]}), 32).allowed_token_ids == [5, 3]
    with pytest.raises(InvalidRequestError, match="name each once"):
        sampling_params(token_sampling({"allowed_token_ids": [5, 3, 5]}), 32)


@pytest.mark.attack("P21")
def test_more_biases_than_all_answers_may_have_are_refused_by_hub_and_stage(vllm_sampling: Any) -> None:
    """Those of all requests in a batch are made into lists anew whenever one joins, in the engine's step."""
    biases = dict.fromkeys(range(512), 1.0)
    assert len(params_of_choices(vllm_sampling.SamplingParams(n=2, logit_bias=biases))) == 2
    with pytest.raises(InvalidRequestError, match="logit_bias: 512 tokens for each of 3 answers"):
        params_of_choices(vllm_sampling.SamplingParams(n=3, logit_bias=biases))
    with pytest.raises(InvalidRequestError, match="logit_bias: 1025 tokens, where a request may have 1024"):
        token_sampling({"logit_bias": {str(each): 1.0 for each in range(1025)}})
    allowed = vllm_sampling.SamplingParams(n=4, allowed_token_ids=list(range(70_000)))
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: 70000 tokens for each of 4 answers"):
        params_of_choices(allowed)


@pytest.mark.attack("P25")
def test_what_the_runner_of_gpus_has_no_room_for_is_refused_before_its_step(vllm_sampling: Any) -> None:
    """Its step raised, and ended the engine for everybody; the other runner takes them."""
    v2, v1 = SimpleNamespace(use_v2_model_runner=True), SimpleNamespace(use_v2_model_runner=False)
    stops = list(range(200))
    refused = ({"allowed_token_ids": list(range(1025))}, {"stop_token_ids": stops, "min_tokens": 1})
    for given in refused:
        params = sampling_params(token_sampling(given))
        check_runner_bounds(params, v1)
        with pytest.raises(InvalidRequestError, match=f"{next(iter(given))}.*: (1025|200) tokens, where"):
            check_runner_bounds(params, v2)
    for given in ({"allowed_token_ids": list(range(1024))}, {"stop_token_ids": stops}, {}):
        check_runner_bounds(sampling_params(token_sampling(given)), v2)


@pytest.mark.attack("O1")
def test_patterns_that_take_long_to_look_for_are_refused_by_hub_and_stage(vllm_sampling: Any) -> None:
    """vLLM compares the tokens of every length of pattern in its step, for each token of each answer."""
    asked = {"max_pattern_size": 128, "min_pattern_size": 2, "min_count": 16}
    params = vllm_sampling.SamplingParams(repetition_detection=vllm_sampling.RepetitionDetectionParams(**asked))
    (said,) = params_of_choices(params)
    assert sampling_params(token_sampling(said)).repetition_detection == params.repetition_detection
    asked["min_count"] = 17
    params.repetition_detection = vllm_sampling.RepetitionDetectionParams(**asked)
    with pytest.raises(InvalidRequestError, match="'max_pattern_size' may be 128, and times 'min_count' it may be"):
        params_of_choices(params)
    with pytest.raises(InvalidRequestError, match="'max_pattern_size' may be 128, and times 'min_count' it may be"):
        token_sampling({"repetition_detection": asked})


def test_a_salt_is_the_prompts_and_no_parameter_of_vllms(vllm_sampling: Any) -> None:
    """Of a stage that makes tokens, and of one that pools."""
    assert sampling_params(token_sampling({"cache_salt": "a"})) == sampling_params({})
    assert pooling_params(pooling_asked({"cache_salt": "a"}), "embed") == pooling_params({}, "embed")


def test_a_hub_beside_a_vllm_whose_server_it_does_not_know_says_so(
    vllm_sampling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, also where only one thing is missing that it needs later."""
    monkeypatch.delattr("vllm.EngineArgs.create_structured_outputs_config", raising=False)
    monkeypatch.delitem(sys.modules, "hub.api.vllm.server", raising=False)
    with pytest.raises(ConfigError, match=r"^--api vllm needs vLLM as this hub knows it .*vllm>=0\.32"):
        _load_vllm(SimpleNamespace(deploy=None, api_flags=""))  # type: ignore[arg-type]
