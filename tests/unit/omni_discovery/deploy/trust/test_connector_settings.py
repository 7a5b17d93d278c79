"""Which settings of connectors a document from etcd decides, in each of its forms, and which are the host's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import yaml

from omni_discovery.deploy.document import DeployConfig, decode_deploy, encode_deploy, parse_deploy
from omni_discovery.deploy.trust.bounds import Bounds, digest_of
from omni_discovery.deploy.trust.connector_settings import CLOSED, OF_REPLICA, OPEN, is_open
from omni_discovery.deploy.trust.judge import check_document, closed_in
from omni_discovery.errors import ConfigError
from omni_discovery.plugins import BUILT_IN_CONNECTORS, CONNECTOR_ALIASES
from stage_runtime import connectors
from stage_runtime.engine_loop.payloads import build_edges

TLS = {"cert": "/etc/shadow", "key": "/etc/shadow", "ca": "/etc/shadow"}
ENGINE = "MooncakeTransferEngineConnector"
EVIL: list[tuple[str, str, Any]] = [
    ("TcpConnector", "tls", TLS),
    ("TcpConnector", "bind_host", "0.0.0.0"),
    ("TcpConnector", "bind_host", ""),
    ("AutoConnector", "advertise_host", "203.0.113.9"),
    ("AutoConnector", "directory", "/etc"),
    ("SharedMemoryConnector", "directory", "/dev/shm/../../etc"),
    (ENGINE, "insecure_by_key", True),
    (ENGINE, "insecure_by_key", 1),
    (ENGINE, "host", "auto"),
    (ENGINE, "sender_token", "known"),
    (ENGINE, "sender_host", "203.0.113.9"),
    (ENGINE, "device_name", "/etc/shadow"),
    ("MooncakeStoreConnector", "host", "203.0.113.9"),
    ("MooncakeConnector", "metadata_server", "http://169.254.169.254/latest"),
    ("MooncakeStoreConnector", "master", "etcd://203.0.113.9:2379"),
    ("YuanrongConnector", "host", "203.0.113.9"),
    ("YuanrongTransferEngineConnector", "tls", TLS),
    ("TcpConnector", "of_a_later_release", 1),
]
FINE: list[tuple[str, dict[str, Any]]] = [
    ("SharedMemoryConnector", {"shm_threshold_bytes": 0, "directory": "/dev/shm", "device": "cuda:0"}),
    ("AutoConnector", {"window_size": -1, "ttl_s": 60.5, "codec_chunk_frames": 25, "codec_streaming": True}),
    ("TcpConnector", {"timeout_s": 5, "max_connections": 9, "max_fetch_bytes": 1 << 30, "tls": None}),
    (ENGINE, {"protocol": "rdma", "device_name": "mlx5_0,mlx5_1", "memory_pool_size": 1 << 32, "zmq_port": "auto"}),
    (ENGINE, {"insecure_by_key": False, "role": "sender", "memory_pool_device": "cuda:0"}),
    ("MooncakeStoreConnector", {"master": "10.0.0.9:50051", "metadata_server": "P2PHANDSHAKE", "segment": 1 << 29}),
    ("MooncakeConnector", {"master": "[fd00::9]:50051", "proto": "tcp", "rdma": ""}),
    ("YuanrongConnector", {"port": 35001, "get_sub_timeout_ms": 10}),
]


def documents(name: str, extra: dict[str, Any]) -> dict[str, DeployConfig]:
    """The same connector between stages 0 and 1 in each form that a document has, as it comes from etcd."""
    connector = {"name": name, "extra": extra}
    named = {"wire": connector}
    two = [{"stage_id": 0, "engine": "echo"}, {"stage_id": 1, "engine": "echo", "final_output": "text"}]
    forms: dict[str, dict[str, Any]] = {
        "in the edge": {"stages": two, "edges": [{"from": 0, "to": 1, "connector": connector}]},
        "by name": {"stages": two, "edges": [{"from": 0, "to": 1, "connector": "wire"}], "connectors": named},
        "of the stage before": {
            "stages": [{**two[0], "output_connectors": {"to_stage_1": "wire"}}, two[1]],
            "connectors": named,
        },
        "of the stage after": {
            "stages": [two[0], {**two[1], "input_connectors": {"from_stage_0": "wire"}}],
            "connectors": named,
        },
        "of the runtime": {
            "stages": [two[0], {**two[1], "input_connectors": {"from_stage_0": "wire"}}],
            "runtime": {"connectors": named},
        },
        "edges of the runtime": {
            "stages": [{**two[0], "output_connectors": {"to_stage_1": "wire"}}, two[1]],
            "runtime": {"connectors": named, "edges": [{"from": 0, "to": 1, "window_size": -1}]},
        },
    }
    return {
        form: decode_deploy(encode_deploy(parse_deploy(yaml.safe_dump(content), form)), "etcd")
        for form, content in forms.items()
    }


def closed(deploy: DeployConfig, stage_id: int, bounds: Bounds | None = None) -> list[str]:
    return [each.flag for each in closed_in(deploy, stage_id, bounds or Bounds(), lambda _: ())]


@pytest.mark.attack("D3")
@pytest.mark.parametrize(("name", "setting", "value"), EVIL)
def test_files_addresses_and_tokens_are_the_hosts_in_each_form(name: str, setting: str, value: Any) -> None:
    """At both ends of the edge, and the flag in the refusal opens just that."""
    for form, deploy in documents(name, {setting: value}).items():
        for stage_id in (0, 1):
            assert closed(deploy, stage_id) == [f"--allow key=connectors.{setting}"], form
            assert closed(deploy, stage_id, Bounds(allow=(f"key=connectors.{setting}",))) == []
            assert closed(deploy, stage_id, Bounds(allow=("key=connectors.other",))) != []
            check_document(deploy, stage_id, Bounds(own=(digest_of(deploy),)), lambda _: ())


@pytest.mark.attack("D3")
def test_a_refusal_does_not_tell_a_token() -> None:
    deploy = documents(ENGINE, {"sender_token": "a-secret"})["by name"]
    with pytest.raises(ConfigError, match=r"connectors.sender_token of Mooncake\w+ is this host's to decide") as told:
        check_document(deploy, 0, Bounds(), lambda _: ())
    assert "a-secret" not in str(told.value)


@pytest.mark.parametrize(("name", "extra"), FINE)
def test_sizes_times_devices_and_the_documents_store_are_open(name: str, extra: dict[str, Any]) -> None:
    for form, deploy in documents(name, extra).items():
        assert closed(deploy, 0) == closed(deploy, 1) == [], form


def test_every_setting_that_a_connector_knows_is_judged() -> None:
    """A setting that is added has to be judged: closed until then, and this test says so."""
    assert OPEN.keys() == set(BUILT_IN_CONNECTORS)
    known = {name: getattr(connectors, name).known_settings for name in BUILT_IN_CONNECTORS}
    for name, settings in known.items():
        assert settings == OPEN[name] | OF_REPLICA | (settings & CLOSED.keys()), name
        assert not OPEN[name] & (CLOSED.keys() | OF_REPLICA), name
    assert CLOSED.keys() <= frozenset().union(*known.values())
    assert set(CONNECTOR_ALIASES.values()) <= OPEN.keys()
    assert not is_open("TcpConnector", "of_a_later_release", 1)


@pytest.mark.attack("D3")
@pytest.mark.parametrize("name", ["AutoConnector", "SharedMemoryConnector", "TcpConnector"])
def test_a_replica_is_who_its_host_says_whatever_its_document_says(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the document is a file of this host; a log line says so."""
    extra = {"namespace": "tenant-b", "stage_id": 7, "by_key": True}
    for deploy in documents(name, extra).values():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            connector: Any = build_edges(deploy, 1, "tenant-a")[0, 1].connector
        with connector:
            assert (connector.namespace, connector.stage_id, connector.by_key) == ("tenant-a", 1, False)
        assert [line.rpartition("setting=")[2].partition(":")[0] for line in caplog.messages] == [*extra]


def test_an_address_that_was_let_in_is_the_documents() -> None:
    """Of a file of this host, or with its flag; without, it is the replica's own."""
    (given, *_) = documents("TcpConnector", {"advertise_host": "127.0.0.3"}).values()
    (usual, *_) = documents("TcpConnector", {}).values()
    for deploy, host in ((given, "127.0.0.3"), (usual, "127.0.0.2")):
        with build_edges(deploy, 0, "n", "127.0.0.1", "127.0.0.2")[0, 1].connector as connector:
            assert connector.endpoint()["host"] == host
