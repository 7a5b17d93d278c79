"""The deploy document: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import stage_runtime.connectors
from omni_discovery.deploy.dialect import CONNECTORS
from omni_discovery.deploy.document import (
    DEFAULT_CONNECTOR,
    ConnectorConfig,
    DeployConfig,
    EdgeConfig,
    RuntimeConfig,
    StageConfig,
    convert_document,
    decode_deploy,
    encode_deploy,
    parse_deploy,
)
from omni_discovery.errors import ConfigError
from stage_runtime.connectors.factory import OmniConnectorFactory
from tests.support.documents import TREE


def test_a_stage_takes_input_from_the_one_before_unless_it_says_otherwise(tree: DeployConfig) -> None:
    assert [tree.inputs_of(stage) for stage in (0, 1, 2)] == [(), (0,), (0,)]


def test_an_edge_without_a_connector_gets_the_automatic_one(tree: DeployConfig) -> None:
    assert tree.connector_of(0, 1).name == DEFAULT_CONNECTOR == "AutoConnector"
    assert tree.connector_of(0, 2).extra == {"shm_threshold_bytes": 0}


def test_an_edges_bounds_go_to_its_connector(tree: DeployConfig) -> None:
    bounded = parse_deploy(
        TREE.replace("connector: small}", "connector: small, window_size: 4, max_inflight: -1}"), "t"
    )
    assert bounded.connector_of(0, 2).extra == {"shm_threshold_bytes": 0, "window_size": 4, "max_inflight": -1}
    unnamed = parse_deploy(TREE.replace("connector: small}", "max_inflight: 7}"), "t")
    assert (unnamed.connector_of(0, 2).name, unnamed.connector_of(0, 2).extra) == (
        DEFAULT_CONNECTOR,
        {"max_inflight": 7},
    )
    assert decode_deploy(encode_deploy(bounded), "pipeline") == bounded
    # What is not said is not written: readers that do not know the bounds yet read the rest.
    assert b"window_size" not in encode_deploy(tree)


def test_an_edge_may_name_a_connector_by_itself_or_describe_it_on_the_spot() -> None:
    """1. one line, nothing under 'connectors'; 2. what is declared under such a name is what is meant by it"""
    text = TREE.partition("connectors:")[0]
    chosen = parse_deploy(text.replace("small", "TcpConnector"), "t")
    described = parse_deploy(text.replace("small", "{name: MooncakeStoreConnector, extra: {master: 'm:1'}}"), "t")
    declared = parse_deploy(f"{text}connectors: {{TcpConnector: {{name: Mine}}}}".replace("small", "TcpConnector"), "t")
    assert chosen.connector_of(0, 2) == ConnectorConfig(name="TcpConnector")
    assert described.connector_of(0, 2) == ConnectorConfig(name="MooncakeStoreConnector", extra={"master": "m:1"})
    assert declared.connector_of(0, 2) == ConnectorConfig(name="Mine")
    # Readers of the registry that know declared ones only read it, too.
    assert set(chosen.connectors) == {chosen.edges[0].connector}
    for wrong in ("Tcp", "{name: TcpConnector, extras: {}}", "[TcpConnector]"):
        with pytest.raises(ConfigError, match=r"there are: AutoConnector, |extras is not known|or a connector's own"):
            parse_deploy(text.replace("small", wrong), "t")


def test_the_connectors_that_need_no_declaration_are_those_that_replicas_have() -> None:
    assert set(CONNECTORS) == OmniConnectorFactory._ours | set(OmniConnectorFactory._aliases)
    assert set(CONNECTORS) <= set(stage_runtime.connectors.__all__)


def test_an_edge_may_name_a_connector_of_an_installed_package_by_itself() -> None:
    text = TREE.partition("connectors:")[0].replace("small", "Carrier")
    assert parse_deploy(text, "t", installed=["Carrier"]).connector_of(0, 2) == ConnectorConfig(name="Carrier")
    with pytest.raises(ConfigError, match="wants connector 'Carrier'; there are: AutoConnector, "):
        parse_deploy(text, "t")


def test_the_document_survives_the_registry_and_has_one_form(tree: DeployConfig) -> None:
    value = encode_deploy(tree)
    assert decode_deploy(value, "pipeline") == tree
    assert encode_deploy(decode_deploy(value, "pipeline")) == value


def test_clients_see_the_model_name_or_the_first_stages(tree: DeployConfig) -> None:
    assert tree.served_name == "tree"
    assert parse_deploy(TREE.replace("model: tree\n", ""), "t").served_name == "thinker"
    assert parse_deploy("stages: [{stage_id: 0, engine: echo, final_output: text}]", "t").served_name == "echo"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: [", "file.yaml:1: not YAML"),
        ("- 1", "mapping"),
        ("stages: []", "empty"),
        ("stages: 3", "stages is 3; right would be a list"),
        ("stages: [3]", "Expected"),
        (TREE.replace("engine: echo, model", "engin: echo, model"), "did you mean 'engine'?"),
        (TREE.replace("stage_id: 1", "stage_id: 0"), "twice"),
        (TREE.replace("input_from: [0]", "input_from: [9]"), "stage 9"),
        (TREE.replace("input_from: [0]", "input_from: [2]"), "does not stand before"),
        (TREE.replace("{from: 0, to: 2", "{from: 1, to: 2"), "joins no two stages"),
        (TREE.replace("connector: small", "connector: big"), "there are: small, AutoConnector, "),
        (TREE.replace("num_replicas: 2", "num_replicas: 0"), "a whole number from 1 to 1024"),
        (TREE.replace("stage_id: 0", "stage_id: -1"), "a whole number from 0"),
        ("stages: [{stage_id: 0, engine: echo}]", "final_output"),
    ],
)
def test_a_wrong_document_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_deploy(text, "file.yaml")
    assert "file.yaml" in str(error.value)
    assert said in str(error.value)


def test_a_damaged_value_in_the_registry_is_a_config_error() -> None:
    for value in (b"\xff", b"{", b"[" * 100_000):
        with pytest.raises(ConfigError, match="pipeline"):
            decode_deploy(value, "pipeline")


def test_every_key_of_the_document_is_in_its_page() -> None:
    page = (Path(__file__).parents[4] / "docs" / "deploy.md").read_text()
    for struct in (DeployConfig, StageConfig, RuntimeConfig, EdgeConfig, ConnectorConfig):
        for name in struct.__struct_encode_fields__:
            assert f"`{name}`" in page or f"`{name}:" in page, f"{struct.__name__}.{name}"
    for example in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        assert parse_deploy(example, "docs/deploy.md").stages


def test_an_edge_hands_over_in_pieces_as_it_says_or_as_the_document_says() -> None:
    """With pieces, the window bounds those of one request, and the connector keeps no window of its own."""
    stages = (
        "stages: [{stage_id: 0, engine: e}, {stage_id: 1, engine: e}, {stage_id: 2, engine: e, final_output: text}]"
    )
    edges = "edges: [{from: 0, to: 1, async_chunk: false, window_size: 3}, {from: 1, to: 2, window_size: -1}]"
    deploy = parse_deploy(f"{stages}\n{edges}\nasync_chunk: true", "t")
    assert [deploy.async_chunk_of(*edge) for edge in ((0, 1), (1, 2))] == [False, True]
    assert [deploy.async_chunk_of(0, 1, wanted) for wanted in (True, False)] == [False, False]
    assert [deploy.async_chunk_of(1, 2, wanted) for wanted in (True, False)] == [True, False]
    assert [deploy.connector_of(*edge).extra for edge in ((0, 1), (1, 2))] == [{"window_size": 3}, {}]
    assert (deploy.window_of(0, 1), deploy.window_of(1, 2) > 1_000_000) == (3, True)
    plain = parse_deploy(stages, "t")
    assert [plain.async_chunk_of(0, 1, wanted) for wanted in (None, True)] == [False, True]
    assert plain.window_of(0, 1) == 16
    narrow = parse_deploy(f"{stages}\nedges: [{{from: 0, to: 1, window_size: 1, async_chunk: true}}]", "t")
    assert narrow.window_of(0, 1) == 1


@pytest.mark.parametrize(
    ("stage", "edge", "said"),
    [
        (
            "final_output: picture",
            "",
            "stage 7.final_output is 'picture'; right would be text, image, audio, video, embedding or none",
        ),
        (
            "final_output: text, runtime: {num_replicas: 0}",
            "",
            "stage 7.runtime.num_replicas is 0; right would be a whole",
        ),
        ("final_output: text, engine_args: 3", "", "stage 7.engine_args is 3; right would be a mapping"),
        ("final_output: text, input_from: [x]", "", "stage 7.input_from[0] is 'x'; right would be a list of stage ids"),
        ("final_output: text, runtime: {ray: {resources: {a: x}}}", "", "stage 7.runtime.ray.resources: Expected"),
        (
            "final_output: text",
            "window_size: wide",
            "the edge 0 to 7.window_size is 'wide'; right would be a whole number",
        ),
        (
            "final_output: text",
            "window_size: 0",
            "the edge 0 to 7: window_size is 0; right would be a whole number from 1",
        ),
        ("final_output: text", "max_inflight: 0", "the edge 0 to 7: max_inflight is 0; right would be a whole number"),
        ("final_output: text", "max_inflight: -2", "the edge 0 to 7.max_inflight is -2; right would be"),
    ],
)
def test_a_value_that_can_not_be_is_told_with_its_place_and_what_would_be_right(
    stage: str, edge: str, said: str
) -> None:
    text = f"stages: [{{stage_id: 0, engine: echo}}, {{stage_id: 7, engine: echo, {stage}}}]"
    with pytest.raises(ConfigError) as refused:
        parse_deploy(text + (f"\nedges: [{{from: 0, to: 7, {edge}}}]" if edge else ""), "pair.yaml")
    assert str(refused.value).startswith(f"pair.yaml:{2 if edge else 1}: {said}")


def test_a_document_says_only_what_the_release_before_knows_unless_it_has_to() -> None:
    """``share_devices`` came later, and the release before refuses keys that it does not know."""
    stage = "stages: [{stage_id: 0, engine: echo, final_output: text, runtime: {%s}}]"
    for unset in ("num_replicas: 1", "share_devices: false"):
        assert b"share_devices" not in encode_deploy(parse_deploy(stage % unset, "d"))
    assert b'"share_devices":true' in encode_deploy(parse_deploy(stage % "share_devices: true", "d"))


@pytest.mark.attack("D4")
@pytest.mark.parametrize("levels", [70, 400, 900, 5000])
def test_a_document_of_many_levels_is_refused_by_all_who_read_it(levels: int) -> None:
    deep = '{"a":' * levels + "1" + "}" * levels
    whole = f'{{"stages":[{{"stage_id":0,"engine":"echo","final_output":"text","engine_args":{deep}}}]}}'
    for text in (deep, whole):
        with pytest.raises(ConfigError) as of_registry:
            decode_deploy(text.encode(), "pipeline")
        with pytest.raises(ConfigError, match="levels"):
            parse_deploy(text, "file")
        assert str(of_registry.value).startswith("pipeline: ")
        assert len(str(of_registry.value)) < 200


def test_a_part_that_holds_itself_many_times_is_refused() -> None:
    held: dict[str, object] = {}
    held |= {str(number): held for number in range(9)}
    with pytest.raises(ConfigError, match="holds itself"):
        convert_document({"stages": held}, "t")
    twice = {"a": [1]}
    document = {
        "stages": [{"stage_id": 0, "engine": "echo", "final_output": "text", "engine_args": {"x": [twice] * 9}}]
    }
    assert convert_document(document, "t").stages[0].engine_args == {"x": [twice] * 9}


def chain(stages: int, **fields: object) -> bytes:
    """A document of so many stages, as etcd has it; ``fields`` are those of each stage."""
    each = [{"stage_id": number, "engine": "echo", "final_output": "text", **fields} for number in range(stages)]
    return msgspec.json.encode({"stages": each})


@pytest.mark.attack("F6")
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (chain(9000), "9000 stages; a pipeline has at most 256"),
        (
            msgspec.json.encode({**msgspec.json.decode(chain(2)), "edges": [{"from": 0, "to": 1}] * 20_000}),
            "20000 edges; a pipeline has at most 1024",
        ),
        (chain(200, input_from=[0] * 100), "20000 inputs in 'input_from' of its stages; a pipeline has at most 1024"),
    ],
)
def test_a_document_that_takes_minutes_to_check_is_refused_by_its_numbers(value: bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^t: it has {told}: serve it as several$"):
        decode_deploy(value, "t")
    with pytest.raises(ConfigError, match=told):
        parse_deploy(value.decode(), "t")


def test_a_document_of_as_many_stages_as_there_may_be_is_read() -> None:
    assert len(decode_deploy(chain(256), "t").stages) == 256


@pytest.mark.attack("Z44")
def test_of_a_document_that_is_wrong_in_thousands_of_places_some_are_told() -> None:
    strange = dict.fromkeys((f"kx{number}" for number in range(30_000)), "X")
    connectors = {f"kx{number}": {"nam": "X", "name": 7} for number in range(1000)}
    for document in ({"stages": [], **strange}, {"stages": [], "connectors": connectors}):
        with pytest.raises(ConfigError) as told:
            decode_deploy(msgspec.json.encode(document), "t")
        assert len(str(told.value)) < 4000
        assert re.search(r"and (18\d|38\d) more$", str(told.value))


@pytest.mark.attack("Z44")
def test_a_document_has_half_a_megabyte_and_few_parts_at_most() -> None:
    with pytest.raises(ConfigError, match="1025 connectors; a pipeline has at most 1024"):
        decode_deploy(
            msgspec.json.encode({"stages": [], "connectors": {f"{number}": {} for number in range(1025)}}), "t"
        )
    for held in ("x" * (512 << 10), [[]] * 70_000):
        value = chain(1, engine_args={"x": held})
        with pytest.raises(ConfigError, match=r"t: it has \d+ bytes as JSON .* serve it as several"):
            decode_deploy(value, "t")
        document = parse_deploy(value.decode(), "file")
        with pytest.raises(ConfigError, match="the deploy document: it has"):
            encode_deploy(document)
