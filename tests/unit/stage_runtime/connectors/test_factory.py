"""Connectors by name: built-in ones, and those that an installed package adds by an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from omni_discovery import plugins
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import ConfigError
from stage_runtime.connectors import (
    ConnectorSpec,
    OmniConnectorFactory,
    SharedMemoryConnector,
    load_omni_transfer_config,
)
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


@pytest.mark.parametrize(("name", "group"), [("old", "old"), ("new", "new"), ("both", "new")])
def test_engines_are_found_by_the_new_group_and_by_the_old_one(name: str, group: str) -> None:
    (stage,) = parse_deploy(f"stages: [{{stage_id: 0, engine: {name}, final_output: text}}]", "t").stages
    assert str(engines.create_engine(stage)) == f"by the {group} group"


def test_the_built_in_engines_are_those_that_a_hub_takes_for_known() -> None:
    assert set(engines._BUILT_IN) == set(plugins.BUILT_IN_ENGINES)
