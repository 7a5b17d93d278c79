"""``--stage-overrides``: what it changes, for whom, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hub.cli import check_flags
from hub.command import ServeCommand
from hub.serve.plan import deploy_of, stages_on_host, supervisor_options
from omni_discovery.deploy.document import DeployConfig, encode_deploy, parse_deploy, read_deploy
from omni_discovery.deploy.overrides import document_here, parse_overrides, with_async_chunk, with_omni_python
from omni_discovery.errors import ConfigError

PAIR = """
stages:
  - {stage_id: 0, engine: echo, engine_args: {capacity: 8, delay_s: 0.1}, runtime: {devices: "0,1", num_replicas: 2}}
  - {stage_id: 1, engine: echo, final_output: text}
"""
HEADLESS = ("--headless", "--stage-id", "0", "--etcd-endpoints", "h:1")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    file = tmp_path / "pair.yaml"
    file.write_text(PAIR)
    return str(file)


def test_a_part_of_the_document_is_changed_deeply_and_for_everybody(pair: str) -> None:
    text = '{"0": {"engine_args": {"capacity": 4}, "final_output": "image"}}'
    deploy = deploy_of(parse("--deploy-config", pair, "--stage-overrides", text))
    assert deploy.stage(0).engine_args == {"capacity": 4, "delay_s": 0.1}
    assert deploy.stage(0).final_output == "image"
    assert deploy.stage(1) == parse_deploy(PAIR, "p").stage(1)


def test_what_vllm_omni_writes_flat_goes_where_it_belongs() -> None:
    assert parse_overrides('{"0": {"gpu_memory_utilization": 0.8, "devices": "1"}, "2": {"enforce_eager": true}}') == {
        0: {"engine_args": {"gpu_memory_utilization": 0.8}, "runtime": {"devices": "1"}},
        2: {"engine_args": {"enforce_eager": True}},
    }


def test_runtime_holds_for_this_host_and_is_in_nobodys_document(pair: str) -> None:
    arguments = parse("--deploy-config", pair, "--stage-overrides", '{"0": {"runtime": {"devices": "4"}}}')
    deploy = deploy_of(arguments)
    assert encode_deploy(deploy) == encode_deploy(parse_deploy(PAIR, "p"))
    (first, count), (second, _) = stages_on_host(arguments, deploy)
    assert (first.runtime.devices, count, second.runtime.devices) == ("4", 2, "")
    started = supervisor_options([(first, count), (second, 1)], arguments, deploy)
    assert [each.runtime for each in started] == [{"devices": "4"}, {}]
    # That is what the supervisor makes of it.
    assert document_here(deploy, 0, started[0].runtime).stage(0).runtime == first.runtime


def test_a_file_may_leave_to_the_flag_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "bagel.yaml"
    file.write_text("stages: [{stage_id: 0, max_num_seqs: 3}]")
    text = '{"0": {"engine": "vllm", "final_output": "text"}}'
    deploy = deploy_of(parse("a/model", "--deploy-config", str(file), "--stage-overrides", text))
    stage = deploy.stage(0)
    assert (stage.engine, stage.model, stage.engine_args) == ("vllm", "a/model", {"max_num_seqs": 3})


def test_a_model_alone_can_be_tuned_too() -> None:
    deploy = deploy_of(parse("a/model", "--stage-overrides", '{"0": {"max_model_len": 512}}'))
    assert (deploy.stage(0).model, deploy.stage(0).engine_args) == ("a/model", {"max_model_len": 512})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_num_seqs=4", "is not JSON .* right would be JSON by stage id, for example"),
        ("[]", "is no mapping; right would be"),
        ('{"one": {}}', "of 'one'; right would be"),
        ('{"0": 4}', "says 4 of '0'"),
        ('{"0": {"stage_id": 1}}', "can't give stage 0 another stage_id"),
        ('{"0": {"engin": "x"}}', r"stage 0\.engin is not known \(did you mean 'engine'\?\)"),
        ('{"1": {"runtime": {"gpus": 1}}, "0": {"a": 1, "b": 2}}', "3 keys are wrong"),
        ('{"7": {"engine": "echo"}}', "stage 7 is not in the pipeline; it has 0, 1"),
        ('{"0": {"runtime": {"num_replicas": 0}}}', r"stage 0\.runtime: .* >= 1"),
        ('{"0": {"runtime": 3}}', r"stage 0\.runtime is 3; right would be a mapping"),
        ('{"7": {"runtime": {"devices": "0"}}}', "stage 7 is not in the pipeline"),
        ('{"0": {"engine_args": 3}}', r"stage 0\.engine_args is 3; right would be a mapping"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(pair: str, text: str, reason: str) -> None:
    arguments = parse("--deploy-config", pair, "--stage-overrides", text)
    with pytest.raises(ConfigError, match=reason):
        stages_on_host(arguments, deploy_of(arguments))


def test_headless_may_say_how_its_stage_runs_here_and_nothing_else() -> None:
    check_flags(parse(*HEADLESS, "--stage-overrides", '{"0": {"runtime": {"devices": "2,3"}}}'))
    check_flags(parse(*HEADLESS, "--stage-overrides", '{"0": {"devices": "2,3"}}'))
    with pytest.raises(ConfigError, match=r"stage 0\.engine_args is part of the pipeline in force"):
        check_flags(parse(*HEADLESS, "--stage-overrides", '{"0": {"max_num_seqs": 4}}'))


def test_the_runtime_of_a_stage_that_does_not_run_here_is_told(pair: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--deploy-config", pair, "--stage-id", "0", "--stage-overrides", '{"1": {"devices": "0"}}')
    arguments = parse(*flags)
    supervisor_options(stages_on_host(arguments, deploy_of(arguments)), arguments, deploy_of(arguments))
    assert "the runtime of stages [1], which do not run here" in caplog.text


def omni_pair(**engine_args: object) -> DeployConfig:
    stages = [
        {"stage_id": 0, "engine": "vllm-omni", "engine_args": engine_args},
        {"stage_id": 1, "engine": "vllm-omni"},
        {"stage_id": 2, "engine": "echo", "final_output": "text"},
    ]
    return read_deploy({"async_chunk": True, "stages": stages}, "f")


def test_stages_of_vllm_omni_hand_over_as_the_document_says_and_the_flag_over_it() -> None:
    """1. the document says it for all stages that do not say it themselves, and no other engine has the argument
    2. the flag changes document and stages together
    """

    def said(deploy: DeployConfig) -> list[object]:
        return [deploy.async_chunk, *(stage.engine_args.get("async_chunk") for stage in deploy.stages)]

    assert said(omni_pair()) == [True, True, True, None]
    assert said(omni_pair(async_chunk=False)) == [True, False, True, None]
    assert said(with_async_chunk(omni_pair(), async_chunk=False)) == [False, False, False, None]
    none = read_deploy({"stages": [{"stage_id": 0, "engine": "vllm-omni", "final_output": "audio"}]}, "f")
    assert said(none) == [False, None]
    assert said(with_async_chunk(none, async_chunk=False)) == [False, None]
    assert said(with_async_chunk(none, async_chunk=True)) == [True, True]


def test_a_hosts_python_of_vllm_omni_is_for_its_stages_alone_and_yields_to_runtime() -> None:
    stage, _, other = omni_pair().stages
    assert with_omni_python(stage, {"devices": "1"}, "/opt/python") == {"devices": "1", "python": "/opt/python"}
    assert with_omni_python(stage, {"python": "/own"}, "/opt/python") == {"python": "/own"}
    assert with_omni_python(other, {}, "/opt/python") == {}
    assert with_omni_python(stage, {}, "") == {}
