"""The edges of a document, whatever its stages are: names, settings and bounds of the connectors between them."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.deploy.document import parse_mapping, read_deploy
from omni_discovery.deploy.edges import overlaid, read_edges
from omni_discovery.errors import ConfigError

#: As the files of vLLM-Omni have it: names at both ends of the edge, and stages that nothing here could run.
THEIRS = """
pipeline: qwen3_tts
async_chunk: true
connectors:
  wire: {name: MooncakeTransferEngineConnector, extra: {zmq_port: 50051, codec_streaming: true}}
stages:
  - stage_id: 0
    model_stage: talker
    max_num_seqs: 4
    output_connectors: {to_stage_1: wire}
  - stage_id: 1
    devices: "1"
    input_connectors: {from_stage_0: wire}
"""
OLDER = """
stage_args:
  - {stage_id: 0, runtime: {process: true, devices: "0"}}
  - {stage_id: 1, engine_input_source: [0]}
  - {stage_id: 2, engine_input_source: [0, 1]}
runtime:
  enabled: true
  defaults: {window_size: -1, max_inflight: 1}
  connectors:
    store: {name: MooncakeConnector, extra: {master: "10.0.0.9:50051"}}
  edges:
    - {from: 0, to: 2, connector: store, max_inflight: 3}
"""


def edges_of(text: str) -> dict[tuple[int, int], tuple[str, dict[str, Any]]]:
    document, problems = parse_mapping(text, "f")
    deploy = read_edges(document, "f", (), problems)
    pairs = [(before, stage.stage_id) for stage in deploy.stages for before in deploy.inputs_of(stage.stage_id)]
    found = {pair: deploy.connector_of(*pair) for pair in pairs}
    return {pair: (connector.name, dict(connector.extra)) for pair, connector in found.items()}


@pytest.mark.parametrize("drop", ["", "    output_connectors: {to_stage_1: wire}\n"])
def test_connectors_at_either_end_of_an_edge_are_read_with_all_their_settings(drop: str) -> None:
    wire = ("MooncakeTransferEngineConnector", {"zmq_port": 50051, "codec_streaming": True})
    assert edges_of(THEIRS.replace(drop, "")) == {(0, 1): wire}


def test_connectors_and_edges_of_the_runtime_are_read() -> None:
    store = ("MooncakeConnector", {"master": "10.0.0.9:50051", "max_inflight": 3})
    default = ("AutoConnector", {})
    assert edges_of(OLDER) == {(0, 1): default, (0, 2): store, (1, 2): default}


def test_a_stage_without_inputs_has_those_of_its_edges_else_the_stage_before_it() -> None:
    stages = "stages: [{stage_id: 0}, {stage_id: 1}, {stage_id: 2}, {stage_id: 3}]"
    found = edges_of(f"{stages}\nedges: [{{from: 0, to: 2, connector: TcpConnector}}]")
    assert {pair: name for pair, (name, _) in found.items()} == {
        (0, 1): "AutoConnector",
        (0, 2): "TcpConnector",
        (2, 3): "AutoConnector",
    }


def test_edges_need_no_stages_and_their_ids_may_be_text() -> None:
    found = edges_of("edges: [{from: '1', to: '2', connector: TcpConnector}, {from: 0, to: 1, max_inflight: 3}]")
    assert found == {(1, 2): ("TcpConnector", {}), (0, 1): ("AutoConnector", {"max_inflight": 3})}
    assert edges_of("{}") == {}


def test_an_edge_that_travels_in_pieces_has_the_same_settings_as_for_a_replica() -> None:
    """The window then bounds the pieces of each request, and not what the connector holds."""
    text = "async_chunk: true\nstages: [{stage_id: 0}, {stage_id: 1}]\nedges: [{from: 0, to: 1, window_size: 4}]"
    whole = {
        "async_chunk": True,
        "stages": [{"stage_id": 0, "engine": "echo", "final_output": "text"}, {"stage_id": 1, "engine": "echo"}],
        "edges": [{"from": 0, "to": 1, "window_size": 4}],
    }
    ours = read_deploy(whole, "f").connector_of(0, 1)
    assert edges_of(text) == {(0, 1): (ours.name, dict(ours.extra))} == {(0, 1): ("AutoConnector", {})}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("edges:\n  - {from: 0, to: 1, connector: Nobodys}", r"^f:2: the edge 0 to 1 wants connector 'Nobodys'"),
        ("edges:\n  - {from: 0, to: 1, max_inflight: 0}", r"^f:2: the edge 0 to 1: max_inflight is 0"),
        ("edges:\n  - {from: 0, to: 1, conector: x}", r"^f:2: edges\[0\]\.conector .*did you mean 'connector'"),
        ("edges:\n  - from: 0\n    to: 1\n    to: 2", r"^f:4: edges\[0\]\.to: the key is in line 3 already"),
        ("connectors:\n  a: {extra: {}}\nedges: [{from: 0, to: 1}]", r"^f:2: connectors\.a: .*`name`"),
        (
            "connectors: {a: {name: TcpConnector, extra: {bind_host: '${HOST}'}}}\nedges: [{from: 0, to: 1}]",
            r"^f:1: .*\$\{HOST\} is not expanded",
        ),
        (THEIRS.replace("from_stage_0: wire", "from_stage_0: TcpConnector"), r"^f:13: stage 1\.input_connectors"),
        ("stages:\nedges: [{from: 0, to: 1}]", r"^f:1: stages is None; right would be a list"),
        ("stages: [{stage_id: [0]}, 5]\nedges: 3", r"^f: 3 keys are wrong:"),
        ("- 1", r"^f: a deploy document is a mapping"),
        ("a: [", r"^f:\d: not YAML"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        edges_of(text)


def test_a_variable_elsewhere_is_of_no_concern() -> None:
    assert edges_of("stages: [{stage_id: 0, model: '${MODEL}'}, {stage_id: 1}]") == {(0, 1): ("AutoConnector", {})}


def test_a_document_over_another_changes_it_by_key_and_by_stage() -> None:
    """1. an extra is added, another changed; 2. a stage is changed, one added; 3. what is not named stays"""
    base, _ = parse_mapping(THEIRS, "base")
    over = {
        "base_config": "base.yaml",
        "connectors": {"wire": {"extra": {"zmq_port": 1, "codec_chunk_frames": 2}}},
        "stages": [{"stage_id": 1, "devices": "3"}, {"stage_id": 2, "input_connectors": {"from_stage_1": "wire"}}],
    }
    both = overlaid(base, over)
    assert both["connectors"]["wire"]["extra"] == {"zmq_port": 1, "codec_streaming": True, "codec_chunk_frames": 2}
    assert [stage["stage_id"] for stage in both["stages"]] == [0, 1, 2]
    assert both["stages"][1] == {"stage_id": 1, "devices": "3", "input_connectors": {"from_stage_0": "wire"}}
    assert sorted(_pairs(both)) == [(0, 1), (1, 2)]
    nonsense: dict[str, Any] = {"stages": [{"stage_id": [0]}, 5, {"stage_id": 1}]}
    assert len(overlaid(nonsense, nonsense)["stages"]) == 5
    with pytest.raises(ConfigError, match="base_config names a file"):
        read_edges(over, "f")


def _pairs(document: dict[str, Any]) -> list[tuple[int, int]]:
    deploy = read_edges(document, "f")
    return [(before, stage.stage_id) for stage in deploy.stages for before in deploy.inputs_of(stage.stage_id)]
