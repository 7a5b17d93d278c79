"""Connectors by name: built-in ones, and those that an installed package adds by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from omni_discovery import plugins
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.deploy.load import load_deploy
from omni_discovery.errors import ConfigError
from stage_runtime.connectors import (
    ConnectorSpec,
    OmniConnectorFactory,
    SharedMemoryConnector,
    load_omni_transfer_config,
)
from stage_runtime.connectors.store.connector import StoringConnector
from stage_runtime.engine_loop.payloads import build_edges
from stage_runtime.engines import base as engines


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that add a connector, one that can't be imported, and one engine under each group's name."""
    found: Mapping[str, Mapping[str, str]] = {
        "stage_runtime.connectors": {
            "Theirs": "stage_runtime.connectors.shm.connector:SharedMemoryConnector",
            "Broken": "no_such_module:Connector",
            "Renamed": "stage_runtime.connectors.shm.connector:NoSuchName",
            "TcpConnector": "stage_runtime.connectors.shm.connector:SharedMemoryConnector",
        },
        "omni_discovery.engines": {"old": f"{__name__}:old_engine", "both": f"{__name__}:old_engine"},
        "stage_runtime.engines": {"new": f"{__name__}:new_engine", "both": f"{__name__}:new_engine"},
    }
    points = EntryPoints(EntryPoint(name, value, group) for group in found for name, value in found[group].items())
    monkeypatch.setattr(plugins, "entry_points", lambda group: points.select(group=group))


def old_engine(_stage: Any) -> str:
    return "by the old group"


def new_engine(_stage: Any) -> str:
    return "by the new group"


def test_an_installed_connector_is_made_by_its_name() -> None:
    with OmniConnectorFactory.create_connector(ConnectorSpec("Theirs", {"shm_threshold_bytes": 7})) as connector:
        assert isinstance(connector, SharedMemoryConnector)
        assert connector.config == {"shm_threshold_bytes": 7}
    assert "Theirs" in OmniConnectorFactory.list_registered_connectors()
    assert OmniConnectorFactory.place("Theirs", namespace="n", stage_id=1) == {}


def test_a_built_in_connector_goes_before_an_installed_one_of_its_name() -> None:
    with OmniConnectorFactory.create_connector(ConnectorSpec("TcpConnector")) as connector:
        assert not isinstance(connector, SharedMemoryConnector)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "Nobodys",
            r"'Nobodys' is not known; there are: AutoConnector, Broken, .* Theirs, .*install that on this",
        ),
        ("Broken", r"'Broken' \(no_such_module:Connector\) can't be loaded: No module named 'no_such_module'"),
        ("Renamed", r"'Renamed' .* can't be loaded: module .* has no attribute 'NoSuchName'"),
    ],
)
def test_a_replica_refuses_a_connector_that_its_host_lacks(name: str, told: str) -> None:
    stages = "stages: [{stage_id: 0, engine: echo, final_output: text}, {stage_id: 1, engine: echo}]"
    deploy = parse_deploy(f"{stages}\nedges: [{{from: 0, to: 1, connector: {{name: {name}}}}}]", "t")
    with pytest.raises(ConfigError, match=f"edge 0 to 1: connector {told}"):
        build_edges(deploy, 1, "n")


def test_a_configs_edges_may_name_an_installed_connector_by_itself() -> None:
    config = load_omni_transfer_config(config_dict={"edges": [{"from": 0, "to": 1, "connector": "Theirs"}]})
    assert config is not None
    assert config.get_connector_for_edge("0", "1") == ConnectorSpec("Theirs")


def test_a_transfer_config_is_what_replicas_build_from_the_same_file(tmp_path: Path) -> None:
    """Edge by edge the same connector and settings, but for what a replica adds; also for an edge without a name."""
    stages = [{"stage_id": number, "engine": "echo", "final_output": "text"} for number in range(3)]
    file = tmp_path / "deploy.yaml"
    file.write_text(
        f"stages: {stages}\nedges: [{{from: 0, to: 1, connector: shm, max_inflight: 2}}]\n"
        f"connectors: {{shm: {{name: SharedMemoryConnector, extra: {{directory: {tmp_path}, codec_streaming: true}}}}}}"
    )
    config = load_omni_transfer_config(file)
    assert config is not None
    edges = build_edges(load_deploy(file), 1, "n")
    for pair, edge in edges.items():
        spec = config.get_connector_for_edge(str(pair[0]), str(pair[1]))
        assert spec is not None
        with edge.connector, OmniConnectorFactory.create_connector(spec) as connector:
            assert type(connector) is type(edge.connector)
            assert isinstance(connector, StoringConnector)
            assert isinstance(edge.connector, StoringConnector)
            added = {"namespace", "stage_id", "bind_host", "advertise_host", "by_key", "shm_threshold_bytes"}
            ours, theirs = ({**each.config} for each in (connector, edge.connector))
            assert {name: ours[name] for name in ours.keys() - added} == {
                name: theirs[name] for name in theirs.keys() - added
            }
            assert connector.threshold == edge.connector.threshold
    assert config.default_connector == ConnectorSpec("AutoConnector", {"shm_threshold_bytes": 65536})
    assert config.has_connector_for_edge("7", "8")


def test_a_transfer_config_of_a_file_is_read_on_top_of_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "connectors: {c: {name: SharedMemoryConnector, extra: {codec_streaming: true, codec_chunk_frames: 1}}}\n"
        "stages: [{stage_id: 0, output_connectors: {to_stage_1: c}}, {stage_id: 1, model: '${MODEL}'}]\n"
    )
    over = tmp_path / "over.yaml"
    over.write_text("base_config: base.yaml\nconnectors: {c: {extra: {codec_chunk_frames: 25}}}")
    config = load_omni_transfer_config(over)
    assert config is not None
    wanted = ConnectorSpec("SharedMemoryConnector", {"codec_streaming": True, "codec_chunk_frames": 25})
    assert config.get_connector_for_edge("0", "1") == wanted
    (tmp_path / "self.yaml").write_text("base_config: self.yaml")
    with pytest.raises(ConfigError, match="on at most 8 others"):
        load_omni_transfer_config(tmp_path / "self.yaml")
    over.write_text("base_config: gone.yaml")
    with pytest.raises(ConfigError, match=r"can't read .*gone\.yaml"):
        load_omni_transfer_config(over)
    (tmp_path / "base.yaml").write_text("edges: []\nedges: []")
    over.write_text("base_config: base.yaml")
    with pytest.raises(ConfigError, match=r"base\.yaml:2: edges: the key is in line 1 already"):
        load_omni_transfer_config(over)


@pytest.mark.parametrize("name", ["SharedMemoryConnector", "AutoConnector", "TcpConnector"])
def test_settings_of_model_code_are_taken_and_kept_and_slips_are_not(name: str) -> None:
    of_models = {"codec_streaming": True, "codec_chunk_frames": 25, "connector_get_sleep_s": 0.01}
    with OmniConnectorFactory.create_connector(ConnectorSpec(name, of_models)) as connector:
        assert isinstance(connector, StoringConnector)
        assert connector.config == of_models
    for wrong, meant in (
        ("shm_treshold_bytes", "shm_threshold_bytes"),
        ("codec_chunk_frame", "codec_chunk_frames"),
        ("window", "window_size"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}: '{wrong}' is not known \(did you mean '{meant}'\?\); known"):
            OmniConnectorFactory.create_connector(ConnectorSpec(name, {wrong: 1}))
    with pytest.raises(ConfigError, match=f"{name}: 'xyz' is not known; known are .*by_key, "):
        OmniConnectorFactory.create_connector(ConnectorSpec(name, {"xyz": 1}))


@pytest.mark.parametrize(("name", "group"), [("old", "old"), ("new", "new"), ("both", "new")])
def test_engines_are_found_by_the_new_group_and_by_the_old_one(name: str, group: str) -> None:
    (stage,) = parse_deploy(f"stages: [{{stage_id: 0, engine: {name}, final_output: text}}]", "t").stages
    assert str(engines.create_engine(stage)) == f"by the {group} group"


def test_the_built_in_engines_are_those_that_a_hub_takes_for_known() -> None:
    assert set(engines._BUILT_IN) == set(plugins.BUILT_IN_ENGINES)
