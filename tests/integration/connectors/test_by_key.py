"""A hand-off of any size is found by its key alone, whatever metadata of others a consumer is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.wire import PayloadRef
from stage_runtime.connectors import ConnectorSpec, OmniConnectorBase, OmniConnectorFactory, TransferError
from stage_runtime.connectors.serialization import deserialize
from stage_runtime.engine_loop.payloads import build_edges
from tests.support.connector_peer import Peer

Make = Callable[..., OmniConnectorBase]
SMALL, LARGE = 100, 300_000


@pytest.fixture(params=["SharedMemoryConnector", "AutoConnector"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path) -> Iterator[Make]:
    made: list[OmniConnectorBase] = []

    def build(**extra: Any) -> OmniConnectorBase:
        made.append(OmniConnectorFactory.create_connector(ConnectorSpec(kind, {"directory": str(tmp_path), **extra})))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_another_process_finds_it_by_the_key_and_consumes_it(kind: str, tmp_path: Path, size_bytes: int) -> None:
    """With the default threshold, above and below it."""
    with_folder = {"directory": str(tmp_path)}
    producer, consumer = Peer(kind, **with_folder), Peer(kind, **with_folder)
    try:
        stored, size, metadata = producer.call("put", "key", size_bytes, 7)
        assert stored
        assert metadata["size"] == size
        assert metadata["shm"]
        assert consumer.call("get", "key", None) == (True, 7, size)
        assert consumer.call("get", "key", None) is None
        producer.call("cleanup", "key")
        if size_bytes == SMALL:
            assert list(tmp_path.iterdir()) == []
    finally:
        producer.kill()
        consumer.kill()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        "not a mapping",
        ["shm"],
        {"source_host": "10.0.0.9", "source_port": 50051, "data_size": 9, "is_fast_path": False},
        {"generation": bytes(16), "data_size": 9},
        {"shm": {"name": "psm_1", "size": 9}, "size": 9},
        {"another request": {"shm": "x"}},
    ],
    ids=["none", "empty", "text", "list", "another transport's", "generation", "another release's", "another key's"],
)
def test_metadata_that_say_nothing_here_are_ignored(make: Make, metadata: Any) -> None:
    assert make().put("0", "1", "key", {"a": 1})[0]
    got = make().get("0", "1", "key", metadata)
    assert got is not None
    assert got[0] == {"a": 1}


@pytest.mark.parametrize("by_key", [True, False])
def test_metadata_may_be_wrapped_under_the_key(make: Make, by_key: bool) -> None:
    _, _, metadata = make(by_key=by_key).put("0", "1", "key", {"a": 1})
    got = make().get("0", "1", "key", {"key": metadata, "other": None})
    assert got is not None
    assert got[0] == {"a": 1}


@pytest.mark.attack("Z21")
@pytest.mark.parametrize("forged", [None, {}, {"shm": "x"}, {"shm": "x", "generation": None}, {"generation": "x"}])
def test_without_by_key_a_key_alone_finds_nothing(make: Make, forged: Any) -> None:
    """As replicas are: a hub that guesses the keys of another one's requests gets none of their hand-offs."""
    of_replica = {"by_key": False, "shm_threshold_bytes": 0}
    _, _, metadata = make(**of_replica).put("0", "1", "key", {"a": 1})
    consumer = make(**of_replica)
    assert consumer.get("0", "1", "key", forged) is None
    got = consumer.get("0", "1", "key", metadata)
    assert got is not None
    assert got[0] == {"a": 1}


def test_a_later_hand_off_under_the_key_is_not_taken_for_the_one_that_is_meant(make: Make) -> None:
    producer, consumer = make(), make()
    _, _, first = producer.put("0", "1", "key", {"a": 1})
    producer.put("0", "1", "key", {"a": 2})
    assert consumer.get("0", "1", "key", first) is None
    assert consumer.get("0", "1", "key") == ({"a": 2}, len(producer.serialize_obj({"a": 2})))


def test_cleanup_of_an_edge_drops_that_key_there_and_no_other(make: Make) -> None:
    producer, consumer = make(), make()
    for edge in (("0", "1"), ("0", "2")):
        for key in ("a", "a_1"):
            producer.put(*edge, key, {"of": [*edge, key]})
    producer.cleanup("a", from_stage="0", to_stage="1")
    left = [(to, key) for to in "12" for key in ("a", "a_1") if consumer.get("0", to, key, {"consume": False})]
    assert left == [("1", "a_1"), ("2", "a"), ("2", "a_1")]
    producer.cleanup("a")
    assert producer.health()["pending"] == 0


def test_a_replica_sends_small_hand_offs_inside_the_metadata_and_stores_none(kind: str, tmp_path: Path) -> None:
    """Its hub passes the metadata on, to other hosts also, and the release before reads the same bytes."""
    deploy = parse_deploy(
        f"""
        stages: [{{stage_id: 0, engine: echo, final_output: text}}, {{stage_id: 1, engine: echo}}]
        edges: [{{from: 0, to: 1, connector: {{name: {kind}, extra: {{directory: {tmp_path}}}}}}}]
        """,
        "t",
    )
    connector = build_edges(deploy, 0, "n")[0, 1].connector
    with connector:
        stored, size, metadata = connector.put("0", "1", "key", {"a": 1})
        assert stored
        assert metadata is not None
        ref = PayloadRef(from_stage=0, to_stage=1, key="key", connector=kind, size_bytes=size, metadata=metadata)
        assert deserialize(ref.metadata["inline"]) == {"a": 1}
        assert list(tmp_path.iterdir()) == []
        assert connector.get("0", "1", "key") is None


def test_by_key_is_refused_where_nothing_is_found_by_key() -> None:
    with pytest.raises(ConfigError, match="a TcpConnector finds hand-offs by their metadata only"):
        OmniConnectorFactory.create_connector(ConnectorSpec("TcpConnector", {"by_key": True}))
    with pytest.raises(ConfigError, match="by_key is 'yes'; true or false is wanted"):
        OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnector", {"by_key": "yes"}))


@pytest.mark.parametrize("by_key", [True, False])
def test_tensors_come_on_the_device_that_the_settings_say(make: Make, by_key: bool) -> None:
    """torch's device without memory stands for a GPU."""
    value = {"a": [torch.arange(4)], "text": "t", "n": 1}
    _, _, metadata = make(by_key=by_key).put("0", "1", "key", value)
    got = make(device="meta").get("0", "1", "key", metadata)
    assert got is not None
    assert got[0]["a"][0].device.type == "meta"
    assert (got[0]["a"][0].shape, got[0]["text"], got[0]["n"]) == ((4,), "t", 1)


def test_a_device_that_is_not_here_is_named_with_what_to_do(make: Make) -> None:
    make().put("0", "1", "key", {"a": torch.arange(4)})
    with pytest.raises(TransferError, match=r"device is xpu:7, and .* leave 'device' out"):
        make(device="xpu:7").get("0", "1", "key")
    with pytest.raises(ConfigError, match="device is 7; 'cpu' is wanted"):
        make(device=7)


@pytest.mark.attack("D3")
def test_a_document_reads_no_hand_offs_of_another_namespace(kind: str, make: Make, tmp_path: Path) -> None:
    """Two tenants of one host: what the document of one says does not make it the other."""
    assert make(namespace="tenant-b").put("0", "1", "key", {"secret": 1})[0]
    extra = f"{{directory: {tmp_path}, namespace: tenant-b, by_key: true}}"
    deploy = parse_deploy(
        f"""
        stages: [{{stage_id: 0, engine: echo}}, {{stage_id: 1, engine: echo, final_output: text}}]
        edges: [{{from: 0, to: 1, connector: {{name: {kind}, extra: {extra}}}}}]
        """,
        "t",
    )
    with build_edges(deploy, 1, "tenant-a")[0, 1].connector as thief:
        assert thief.get("0", "1", "key") is None
    assert make(namespace="tenant-b").get("0", "1", "key") is not None
