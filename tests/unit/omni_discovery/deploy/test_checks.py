"""All errors of a document in one go: one of them does not hide the others, and none is an echo of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_discovery.deploy.checks import Part, Parts, check_parts
from omni_discovery.deploy.document import EdgeConfig, StageConfig, parse_deploy
from omni_discovery.deploy.load import load_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import BUILT_IN_ENGINES

ALL_WRONG = """\
stages:
  - stage_id: 0
    engine: nope
    final_output: txt
    runtime: {num_replicas: 0}
  - stage_id: 0
    engine: vllm
    engine: vllm
    engine_args: {tensor_parallel_size: 0}
edges:
  - {from: 0, to: 9, window_size: 0, connector: mine}
connectors:
  mine: {name: TcpConector}
"""


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        parse_deploy(text, "f", engines=())
    return str(refused.value).splitlines()


def test_errors_of_every_kind_come_in_one_go_in_the_order_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(ALL_WRONG)
    with pytest.raises(ConfigError) as refused:
        load_deploy(file)
    told = [line.strip().removeprefix(f"{file}:") for line in str(refused.value).splitlines()[1:]]
    assert [(int(line.partition(":")[0]), line.partition(": ")[2]) for line in told] == [
        (3, f"stage 0: engine 'nope' is not known on this host; there are {', '.join(BUILT_IN_ENGINES)}"),
        (4, "stage 0.final_output is 'txt'; right would be text, image, audio, video, embedding or none"),
        (5, "stage 0.runtime.num_replicas is 0; right would be a whole number from 1 to 1024"),
        (6, "stage_id 0 appears twice; the first one is in line 2: give one of the two another id"),
        (8, "stage 0.engine: the key is in line 7 already; keep one of the two"),
        (9, "stage 0: engine_args.tensor_parallel_size is 0; right would be 1 or more"),
        (11, "the edge 0 to 9 joins no two stages of the pipeline: there is no stage 9"),
        (11, "the edge 0 to 9: window_size is 0; right would be a whole number from 1, or -1 for no bound"),
        (13, "connectors.mine: connector 'TcpConector' is not known on this host; did you mean 'TcpConnector'?"),
    ]


TWO = """\
stages:
  - stage_id: 0
    engine: echo
  - stage_id: 1
    engine: echo
    input_from: [0]
    final_output: text
edges:
  - {from: 0, to: 1, connector: a}
connectors:
  a: {name: TcpConnector}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("final_output: text", "final_outputs: text"),
        ("final_output: text", "final_output: txt"),
        ("stage_id: 0", "stage_id: zero"),
        ("stage_id: 0", "stageid: 0"),
        ("input_from: [0]", "input_from: zero"),
        ("input_from: [0]", "input_form: [0]"),
        ("\nconnectors:", "\nconectors:"),
        ("  a: {name: TcpConnector}", "  a: 3"),
        ("connector: a}", "connector: '${EDGE}'}"),
        ("from: 0, to", "form: 0, to"),
        ("stages:\n", "stages: []\nstages:\n"),
        ("    engine: echo\n    input", "    input"),
    ],
)
def test_an_error_has_no_echoes(old: str, new: str) -> None:
    assert old in TWO
    text = TWO.replace(old, new, 1)
    [said] = refusal(text)
    assert said.startswith("f:"), said


def test_a_lone_double_key_does_not_hide_what_is_wrong_between_stages_and_edges() -> None:
    said = refusal(TWO.replace("  - stage_id: 1\n", "  - stage_id: 1\n    engine: echo\n").replace("to: 1", "to: 7"))
    assert [line.split(": ")[0].strip() for line in said[1:]] == ["f:6", "f:10"]


def test_a_document_without_lines_names_the_ids() -> None:
    stages = [Part(StageConfig(stage_id=0, engine="e", final_output="text"))] * 2
    [problem] = check_parts(Parts(stages, [], {}), {})
    assert problem.text == "stage_id 0 appears twice; the stages have [0, 0]: give one of the two another id"


def test_nothing_is_said_of_stages_that_an_unreadable_id_may_be() -> None:
    stages = [None, Part(StageConfig(stage_id=1, engine="e", final_output="text", input_from=(5,)))]
    assert list(check_parts(Parts(stages, [Part(EdgeConfig(from_=5, to=1))], {}), {})) == []


def test_an_engine_or_a_connector_that_this_host_does_not_know_is_alone_no_error_of_the_document() -> None:
    """It may be known where the stage runs."""
    text = TWO.replace("engine: echo", "engine: theirs").replace("TcpConnector", "TheirConnector")
    assert [stage.engine for stage in parse_deploy(text, "f", engines=()).stages] == ["theirs", "theirs"]
