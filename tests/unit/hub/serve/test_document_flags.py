"""Flags that say otherwise than the deploy document, and other names for those that name it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hub.command import ServeCommand
from hub.serve.document_flags import with_flags
from hub.serve.flags import check_flags
from hub.serve.plan import deploy_of
from omni_discovery.deploy.document import DeployConfig, parse_deploy
from omni_discovery.errors import ConfigError

CHAIN = """
async_chunk: true
stages:
  - {stage_id: 0, engine: echo, default_sampling_params: {temperature: 1, top_k: 3}, final_output: text}
  - {stage_id: 1, engine: echo}
  - {stage_id: 2, engine: echo, final_output: image}
edges: [{from: 1, to: 2, connector: mine, max_inflight: 4}]
connectors: {mine: {name: TcpConnector, extra: {shm_threshold_bytes: 7}}}
"""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "d.yaml").write_text(CHAIN)
    return str(tmp_path / "d.yaml")


def document(parser: argparse.ArgumentParser, *words: str) -> DeployConfig:
    arguments = parser.parse_args(words)
    check_flags(arguments)
    return deploy_of(arguments)


def test_a_document_has_two_names_and_so_has_a_model(parser: argparse.ArgumentParser, file: str) -> None:
    assert document(parser, "--stage-configs-path", file) == document(parser, "--deploy-config", file)
    assert document(parser, "--model", "m") == document(parser, "m") == document(parser, "m", "--model", "m")
    for words in (["m", "--model", "n"], ["--deploy-config", file, "--stage-configs-path", "other"]):
        with pytest.raises(ConfigError, match=r"are the same thing, and say .*: leave one out"):
            document(parser, *words)


def test_async_chunk_is_as_the_flag_says_and_else_as_the_document_says(
    parser: argparse.ArgumentParser, file: str
) -> None:
    said = {word: document(parser, "--deploy-config", file, *word.split()) for word in ("", "--no-async-chunk")}
    assert [deploy.async_chunk for deploy in said.values()] == [True, False]
    assert document(parser, "m", "--async-chunk").async_chunk


def test_sampling_parameters_are_merged_into_those_of_the_document(parser: argparse.ArgumentParser, file: str) -> None:
    words = ["--deploy-config", file, "--default-sampling-params", '{"0": {"top_k": 5}, "1": {"seed": 1}}']
    also = ["--stage-overrides", '{"0": {"engine_args": {"capacity": 2}}}']
    stages = document(parser, *words, *also).stages
    assert [stage.default_sampling_params for stage in stages] == [{"temperature": 1, "top_k": 5}, {"seed": 1}, {}]
    assert stages[0].engine_args == {"capacity": 2}
    with pytest.raises(ConfigError, match="stage 7 is not in the pipeline"):
        document(parser, "--deploy-config", file, "--default-sampling-params", '{"7": {}}')


def test_the_threshold_goes_to_every_edge_that_does_not_say_its_own(parser: argparse.ArgumentParser, file: str) -> None:
    deploy = document(parser, "--deploy-config", file, "--shm-threshold-bytes", "0")
    assert deploy.connector_of(0, 1).name == "AutoConnector"
    assert deploy.connector_of(0, 1).extra == {"shm_threshold_bytes": 0}
    assert deploy.connector_of(1, 2).extra == {"shm_threshold_bytes": 7, "max_inflight": 4}


def test_the_connector_of_another_package_is_left_alone(parser: argparse.ArgumentParser) -> None:
    deploy = parse_deploy(CHAIN.replace("TcpConnector, extra: {shm_threshold_bytes: 7}", "Theirs"), "d")
    words = [
        "--deploy-config",
        "given",
        "--shm-threshold-bytes",
        "9",
        "--default-sampling-params",
        '{"2": {"seed": 1}}',
    ]
    changed = with_flags(deploy, parser.parse_args(words))
    assert changed.connector_of(1, 2).extra == {"max_inflight": 4}
    assert changed.connector_of(0, 1).extra == {"shm_threshold_bytes": 9}
    assert changed.stages[2].default_sampling_params == {"seed": 1}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--shm-threshold-bytes", "-1"], "--shm-threshold-bytes is -1; right would be 0 or more"),
        (
            ["--default-sampling-params", '{"temperature": 1}'],
            "--default-sampling-params is not such JSON .*by stage id",
        ),
        (["--default-sampling-params", "{"], "--default-sampling-params is not such JSON"),
        (["--init-timeout", "0"], "--init-timeout is 0; right would be a number of seconds"),
        (["--stage-init-timeout", "nan"], "--stage-init-timeout is nan; right would be"),
        (["--hub-only", "--stage-init-timeout", "9"], "--stage-init-timeout is local replicas'"),
    ],
)
def test_wrong_values_are_refused(parser: argparse.ArgumentParser, file: str, words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        document(parser, "--deploy-config", file, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["--async-chunk"],
        ["--shm-threshold-bytes", "1"],
        ["--default-sampling-params", "{}"],
        ["--log-stats"],
        ["--init-timeout", "60"],
    ],
)
def test_what_a_hub_says_is_refused_without_one(parser: argparse.ArgumentParser, words: list[str]) -> None:
    headless = ["--headless", "--stage-id", "0", "--etcd-endpoints", "h:1", "--omni", "--stage-init-timeout", "60"]
    check_flags(parser.parse_args(headless))
    with pytest.raises(ConfigError, match=f"{words[0]} is "):
        check_flags(parser.parse_args([*headless, *words]))
