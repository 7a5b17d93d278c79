"""Flags of ``vllm serve`` at ``omni serve``: taken for a model alone, else answered with where they belong."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import pytest

from hub.command import ServeCommand
from hub.serve import vllm_flags
from hub.serve.flags import check_flags
from hub.serve.plan import deploy_of
from omni_discovery.deploy.document import DeployConfig, read_deploy
from omni_discovery.errors import ConfigError

HEADLESS = ("--headless", "--stage-id", "0", "--etcd-endpoints", "h:1")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser


def document(parser: argparse.ArgumentParser, *words: str) -> DeployConfig:
    arguments = parser.parse_args(words)
    check_flags(arguments)
    return deploy_of(arguments)


@pytest.mark.parametrize(
    ("words", "engine_args"),
    [
        (["m"], {}),
        (["m", "--max-model-len", "4096"], {"max_model_len": 4096}),
        (["--max-model-len", "4096", "m"], {"max_model_len": 4096}),
        (["--max_model_len=4k", "m"], {"max_model_len": 4000}),
        (["--model", "m", "-tp", "2", "--enforce-eager"], {"tensor_parallel_size": 2, "enforce_eager": True}),
        (["m", "--no-enable-prefix-caching", "-q", "fp8"], {"enable_prefix_caching": False, "quantization": "fp8"}),
        (["m", "--hf-overrides", '{"a": {"b": 1}}'], {"hf_overrides": {"a": {"b": 1}}}),
        (["m", "--cudagraph-capture-sizes", "1", "2"], {"cudagraph_capture_sizes": [1, 2]}),
        (["m", "--seed", "1", "--seed", "2"], {"seed": 2}),
        (["m", "--enable-sleep-mode"], {"enable_sleep_mode": True}),
    ],
)
def test_a_model_alone_takes_the_flags_of_its_engine(
    parser: argparse.ArgumentParser, words: list[str], engine_args: dict[str, Any]
) -> None:
    deploy = document(parser, *words)
    (stage,) = deploy.stages
    assert (stage.engine, stage.model, stage.final_output) == ("vllm", "m", "text")
    assert stage.engine_args == engine_args


def test_a_model_alone_is_named_and_pools_and_is_overridden_as_its_flags_say(parser: argparse.ArgumentParser) -> None:
    words = ["m", "--served-model-name", "chat", "--runner", "pooling", "--max-num-seqs", "8"]
    over = '{"0": {"engine_args": {"max_num_seqs": 4}}}'
    deploy = document(parser, *words, "--stage-overrides", over)
    assert deploy.served_name == "chat"
    assert deploy.stages[0].final_output == "embedding"
    assert deploy.stages[0].engine_args == {"runner": "pooling", "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--deploy-config", "d.yaml", "--max-model-len", "4096", "--no-enforce-eager"],
            "--max-model-len 4096, --no-enforce-eager: arguments of a stage's engine: write {max_model_len: 4096,"
            " enforce_eager: false} into engine_args of that stage in the deploy document, or give --stage-overrides"
            ' \'{"N": {"engine_args": {"max_model_len": 4096, "enforce_eager": false}}}\' with the stage\'s id in',
        ),
        ([*HEADLESS, "--max-model-len", "4"], "part of the pipeline in force: say it to the hubs"),
        (["--deploy-config", "d.yaml", "--served-model-name", "a"], "clients see is 'model' of the deploy document"),
        (["m", "--served-model-name", "a", "b"], "a pipeline has one name, and these are 2: a, b"),
        (
            ["m", "--chat-template", "t", "--enable-auto-tool-choice"],
            "which --api vllm starts: --api vllm --api-args='--chat-template t --enable-auto-tool-choice'",
        ),
        (
            ["m", "--ssl-ciphers", "f"],
            "--ssl-ciphers f: has no effect on a hub, whose listener is its own: leave it out",
        ),
        (["m", "--data-parallel-size", "2"], "leave it out and run 2 replicas"),
        (["m", "--compilation-config", "{"], "--compilation-config is not JSON"),
    ],
)
def test_a_flag_that_belongs_elsewhere_is_answered_with_where(
    parser: argparse.ArgumentParser, words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        document(parser, *words)
    assert said in str(refused.value)


def test_all_flags_are_answered_at_once(parser: argparse.ArgumentParser) -> None:
    words = ["--deploy-config", "d", "--usp", "2", "--max-num-seqs", "8", "--chat-template", "c"]
    with pytest.raises(ConfigError) as refused:
        document(parser, *words)
    told = str(refused.value).splitlines()
    assert told[0] == "these flags belong elsewhere:"
    assert [line.split()[0] for line in told[1:]] == ["--usp:", "--chat-template", "--max-num-seqs"]


@pytest.mark.parametrize("flag", ["--deploy", "--stage", "--max-model", "--omni-dp"])
def test_a_flag_that_is_cut_short_is_none(parser: argparse.ArgumentParser, flag: str) -> None:
    """It could be ours or vLLM's."""
    _, unknown = parser.parse_known_args(["m", flag, "1"])
    assert unknown[0] == flag


def test_the_advice_for_an_engines_flag_is_not_refused_in_the_next_step(parser: argparse.ArgumentParser) -> None:
    """What a flag's answer says to write into the document is what the document's own check takes."""
    refused, of_the_hub = set(), {"model", "log_level", "otlp_traces_endpoint"}
    for name in sorted((vllm_flags.SWITCHES | vllm_flags.TEXTS | vllm_flags.VALUES) - of_the_hub):
        flag = f"--{name.replace('_', '-')}"
        words = ["--deploy-config", "d.yaml", flag, *([] if name in vllm_flags.SWITCHES else ["2"])]
        with pytest.raises(ConfigError) as told:
            document(parser, *words)
        advice = re.search(r"write \{(\w+): (.*)\} into engine_args", str(told.value))
        if advice is None:
            refused.add(name)
            continue
        stage = {"stage_id": 0, "engine": "vllm", "engine_args": {advice[1]: json.loads(advice[2])}}
        assert read_deploy({"stages": [{**stage, "final_output": "text"}]}, "d.yaml").stages, name
    assert refused == {"data_parallel_size"}


@pytest.mark.parametrize("value", ["0", "auto"])
def test_a_wrong_size_of_a_group_is_answered_with_what_would_be_right(
    parser: argparse.ArgumentParser, value: str
) -> None:
    with pytest.raises(ConfigError, match=r"right would be 1 or more") as told:
        document(parser, "--deploy-config", "d.yaml", "--tensor-parallel-size", value, "--seed", "1")
    assert "write {seed: 1} into engine_args" in str(told.value)


def test_copies_of_an_engine_are_answered_with_the_number_of_replicas(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(ConfigError) as told:
        document(parser, "--deploy-config", "d.yaml", "--data-parallel-size", "2")
    assert str(told.value) == (
        "--data-parallel-size 2: engine_args.data_parallel_size is 2; a replica is one engine here: leave it out and"
        " run 2 replicas, by runtime: {num_replicas: 2} or --stage-id N --omni-dp-size-local 2"
    )
