"""Which commands are for vLLM-Omni to resolve, with which Python, and what becomes of its answer."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hub.command import ServeCommand
from hub.serve.flags import check_flags
from hub.serve.plan import deploy_of, stages_on_host
from hub.serve.vllm_omni.resolve import asks_vllm_omni, python_of_omni
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.deploy.resolution import ResolvedDocument
from omni_discovery.errors import ConfigError

THEIRS = "async_chunk: true\nstages: [{stage_id: 0, max_num_seqs: 4}, {stage_id: 1, devices: '0'}]\n"
OURS = "stages: [{stage_id: 0, engine: echo, final_output: text}]\n"
DOCUMENT: dict[str, Any] = {
    "model": "m",
    "async_chunk": True,
    "stages": [
        {"stage_id": 0, "engine": "vllm-omni", "model": "m", "engine_args": {"async_chunk": True}},
        {"stage_id": 1, "engine": "vllm-omni", "model": "m", "final_output": "audio", "input_from": [0]},
    ],
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser


def parsed(parser: argparse.ArgumentParser, *words: str) -> argparse.Namespace:
    arguments = parser.parse_args(words)
    check_flags(arguments)
    return arguments


def program(folder: Path, *, out: bytes = b"", error: str = "", code: int = 0) -> str:
    """A program that takes any arguments, keeps what it was asked, and answers like this."""
    (folder / "out").write_bytes(out)
    (folder / "error").write_text(error)
    made = folder / "python"
    made.write_text(
        f'#!/bin/sh\nfor fd; do :; done\ncat "/proc/self/fd/$fd" > {folder}/asked\n'
        f"cat {folder}/out; cat {folder}/error >&2; exit {code}\n"
    )
    made.chmod(0o755)
    return str(made)


def answer(document: Mapping[str, Any] = DOCUMENT, **more: Any) -> bytes:
    return msgspec.json.encode(ResolvedDocument(document=dict(document), pipeline="qwen3_tts", **more))


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("m", False),
        ("m --omni", True),
        ("m --omni --hub-only", True),
        ("m --omni --headless --stage-id 1 --etcd-endpoints e:1", False),
        ("--omni --deploy-config OURS", False),
        ("m --omni --deploy-config OURS", False),
        ("m --deploy-config THEIRS", True),
        ("m --omni --deploy-config THEIRS", True),
        ("m --omni --deploy-config qwen3_tts.yaml", True),
        ("m --deploy-config no/such.yaml", False),
        ("--deploy-config THEIRS", False),
    ],
)
def test_which_commands_are_for_vllm_omni(
    parser: argparse.ArgumentParser, tmp_path: Path, words: str, asks: bool
) -> None:
    (tmp_path / "ours.yaml").write_text(OURS)
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    named = words.replace("OURS", str(tmp_path / "ours.yaml")).replace("THEIRS", str(tmp_path / "theirs.yaml"))
    assert asks_vllm_omni(parsed(parser, *named.split())) is asks


def test_a_file_of_theirs_without_a_model_says_what_is_missing(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("stages: [{stage_id: 0, max_num_seqs: 4}]\n")
    with pytest.raises(ConfigError, match=r"stage 0\.engine is missing: .*vLLM-Omni.*MODEL"):
        deploy_of(parsed(parser, "--deploy-config", str(file)))


def test_what_is_asked_names_folders_in_full_and_flags_of_the_engine(
    parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    python = program(tmp_path, out=b"a library says so\n" + answer())
    words = ["model", "--deploy-config", "theirs.yaml", "--omni-python", python, "--max-model-len", "1k"]
    overrides = '{"0": {"max_num_seqs": 2, "runtime": {"devices": "3"}}}'
    more = ["--no-async-chunk", "--stage-overrides", overrides, "--served-model-name", "speaker"]
    deploy = deploy_of(parsed(parser, *words, *more))
    asked = msgspec.json.decode((tmp_path / "asked").read_bytes())
    assert asked == {
        "model": str(tmp_path / "model"),
        "deploy_file": str(tmp_path / "theirs.yaml"),
        "served_name": "speaker",
        "async_chunk": False,
        "engine_args": {"max_model_len": 1000},
        "overrides": {"0": {"engine_args": {"max_num_seqs": 2}}},
    }
    assert deploy.async_chunk is False
    assert deploy.stage(0).engine_args == {"async_chunk": False, "max_num_seqs": 2}


def test_the_stages_here_run_in_that_python_and_those_elsewhere_in_their_hosts(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    """The document says no Python: each host has its own. What a host says of a stage wins over its flag."""
    python = program(tmp_path, out=answer())
    other = '{"1": {"runtime": {"python": "/other/python"}}}'
    arguments = parsed(parser, "m", "--omni", "--omni-python", python, "--stage-overrides", other)
    deploy: DeployConfig = deploy_of(arguments)
    assert [stage.runtime.own_python for stage in deploy.stages] == ["", ""]
    here = stages_on_host(arguments, deploy)
    assert [stage.runtime.own_python for stage, _ in here] == [python, "/other/python"]
    assert python_of_omni(parsed(parser, "m", "--omni", "--stage-overrides", other)) == "/other/python"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"error": "a warning\nomni: vLLM-Omni can't resolve m: no\n", "code": 2}, "vLLM-Omni can't resolve m: no"),
        ({"error": "x: No module named stage_runtime", "code": 1}, r"lacks what resolving needs.*-m pip install"),
        ({"code": 3}, "has ended with code 3 and said nothing"),
        ({"out": b"{}"}, "is no resolved document"),
        ({"out": answer({"stages": [{"stage_id": 0, "strange": 1}]})}, "strange is not known"),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_says_why(
    parser: argparse.ArgumentParser, tmp_path: Path, said: dict[str, Any], told: str
) -> None:
    python = program(tmp_path, **said)
    with pytest.raises(ConfigError, match=told):
        deploy_of(parsed(parser, "m", "--omni", "--omni-python", python))


@pytest.mark.parametrize("python", ["/nowhere/python", "python", "/etc/passwd"])
def test_a_python_that_is_none_is_refused(parser: argparse.ArgumentParser, python: str) -> None:
    with pytest.raises(ConfigError, match=f"--omni-python is {python}; right would be the path of a program"):
        parsed(parser, "m", "--omni", "--omni-python", python)


def test_without_such_a_python_the_error_says_what_to_do(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(THEIRS)
    for words, told in (["m", "--omni"], "MODEL m --omni"), (["m", "--deploy-config", str(file)], "no stage says an"):
        with pytest.raises(ConfigError, match=f"{told}.*--omni-python /opt.*on a host that has one"):
            deploy_of(parsed(parser, *words))
    assert python_of_omni(parsed(parser, "m", "--omni")) != sys.executable


def test_what_the_document_leaves_out_is_a_warning(
    parser: argparse.ArgumentParser, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python = program(tmp_path, out=answer(left_out=("model_runner: v2 (no)",), platform="cpu"))
    with caplog.at_level(logging.INFO):
        deploy_of(parsed(parser, "m", "--omni", "--omni-python", python))
    told = [(record.levelname, record.getMessage().split(" ")[0]) for record in caplog.records]
    assert ("WARNING", "deploy.left_out") in told
    assert ("INFO", "deploy.resolved") in told
