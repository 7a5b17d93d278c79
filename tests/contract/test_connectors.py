"""What every connector promises; run over each one that works on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_discovery.errors import ConfigError
from stage_runtime.connectors import (
    ConnectorSpec,
    OmniConnectorBase,
    OmniConnectorFactory,
    OmniTransferConfig,
    SharedMemoryConnector,
    load_omni_transfer_config,
)
from stage_runtime.connectors.shm_owner import Owner, me
from stage_runtime.connectors.sweep import sweep
from stage_runtime.errors import SerializationError

Make = Callable[..., OmniConnectorBase]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds connectors that see each other's hand-offs, and closes them."""
    made: list[OmniConnectorBase] = []

    def build(**extra: Any) -> OmniConnectorBase:
        spec = ConnectorSpec("SharedMemoryConnector", {"directory": str(tmp_path), "shm_threshold_bytes": 0, **extra})
        made.append(OmniConnectorFactory.create_connector(spec))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


VALUES: list[Any] = [
    {},
    {"nothing": None},
    {"empty": b""},
    {"bytes": bytes(range(256)) * 10},
    {"tensor": torch.arange(10), "deep": [{"array": np.eye(3)}], "text": "ü"},
    {"large": np.arange(300_000)},
    {"zero": torch.empty(0, 4)},
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: "-".join(value) or "empty mapping")
@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["stored", "inline"])
def test_what_one_puts_the_other_gets(make: Make, value: Any, threshold: int) -> None:
    producer, consumer = make(shm_threshold_bytes=threshold), make()
    stored, size, metadata = producer.put("0", "1", "key", value)
    assert stored
    got = consumer.get("0", "1", "key", metadata)
    assert got is not None
    assert same(value, got[0])
    assert got[1] == size


def test_small_hand_offs_travel_in_the_metadata_and_leave_no_file(make: Make, tmp_path: Path) -> None:
    metadata = make(shm_threshold_bytes=65536).put("0", "1", "key", {"a": 1})[2]
    assert metadata is not None
    assert isinstance(metadata["inline"], bytes)
    assert list(tmp_path.iterdir()) == []


def test_get_works_by_key_alone_and_consumes(make: Make) -> None:
    producer, consumer = make(), make()
    producer.put("0", "1", "key", {"a": 1})
    assert consumer.get("0", "1", "key", {"source_host": "elsewhere", "source_port": 1}) is not None
    assert consumer.get("0", "1", "key") is None


def test_a_hand_off_that_must_last_is_not_consumed(make: Make) -> None:
    producer, consumer = make(), make()
    producer.put("0", "1", "key", {"a": 1})
    for _ in range(3):
        assert consumer.get("0", "1", "key", {"consume": False}) is not None


def test_what_is_not_there_is_none(make: Make) -> None:
    assert make().get("0", "1", "never put") is None


def test_keys_edges_and_namespaces_do_not_meet(make: Make) -> None:
    """Also where their texts run together: edge 1 to 23 is not edge 12 to 3."""
    producer = make(namespace="a")
    producer.put("1", "23", "k", {"it": 1})
    for connector, edge, key in [
        (make(namespace="a"), ("12", "3"), "k"),
        (make(namespace="a"), ("1", "23"), "k2"),
        (make(namespace="b"), ("1", "23"), "k"),
    ]:
        assert connector.get(*edge, key) is None
    assert make(namespace="a").get("1", "23", "k") is not None


@pytest.mark.parametrize("key", ["a/b", "../../etc/passwd", "ü" * 300, "\0", "."])
def test_any_text_is_a_key(make: Make, key: str) -> None:
    producer, consumer = make(), make()
    assert producer.put("0", "1", key, {"a": 1})[0]
    assert consumer.get("0", "1", key) is not None


def test_the_same_key_again_replaces_what_was_there(make: Make) -> None:
    producer, consumer = make(), make()
    producer.put("0", "1", "key", {"a": 1})
    producer.put("0", "1", "key", {"a": 2})
    got = consumer.get("0", "1", "key")
    assert got is not None
    assert got[0] == {"a": 2}


def test_what_can_not_be_stored_is_said_and_not_raised(make: Make, tmp_path: Path) -> None:
    connector = make()
    assert connector.put("0", "1", "key", {"f": print}) == (False, 0, None)
    assert list(tmp_path.iterdir()) == []


def test_cleanup_drops_a_requests_keys_and_no_others(make: Make, tmp_path: Path) -> None:
    connector = make()
    for key in ("r1", "r1_0", "0_r1", "r10", "xr1"):
        connector.put("0", "1", key, {"a": 1})
    connector.cleanup("r1")
    connector.cleanup("unknown")
    assert len(list(tmp_path.iterdir())) == 2
    assert connector.get("0", "1", "r10") is not None


def test_close_leaves_nothing_and_may_be_called_twice(make: Make, tmp_path: Path) -> None:
    connector = make()
    connector.put("0", "1", "a", {"a": 1})
    connector.put("0", "1", "b", {"a": 1})
    connector.close()
    connector.close()
    assert list(tmp_path.iterdir()) == []


def test_health_says_what_happened(make: Make) -> None:
    connector = make()
    connector.put("0", "1", "a", {"a": 1})
    connector.put("0", "1", "b", {"a": 1})
    connector.get("0", "1", "a")
    connector.put("0", "1", "c", print)
    assert connector.health() == {"status": "healthy", "puts": 2, "gets": 1, "failures": 1, "pending": 1}


def test_only_its_owner_may_read_a_hand_off(make: Make, tmp_path: Path) -> None:
    make().put("0", "1", "key", {"a": 1})
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"x" * 64, b"OMNISHM1" + bytes(56), b"OMNISHM1" + b"\xff" * 100])
def test_a_file_that_is_no_hand_off_is_refused(make: Make, tmp_path: Path, content: bytes) -> None:
    connector = make()
    connector.put("0", "1", "key", {"a": 1})
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    with pytest.raises(SerializationError):
        connector.get("0", "1", "key")


def test_a_hand_off_may_be_changed_by_who_got_it_without_changing_it_for_others(make: Make) -> None:
    producer, consumer = make(), make()
    producer.put("0", "1", "key", {"t": torch.zeros(1000)})
    first = consumer.get("0", "1", "key", {"consume": False})
    assert first is not None
    first[0]["t"] += 1
    second = consumer.get("0", "1", "key", {"consume": False})
    assert second is not None
    assert second[0]["t"].sum() == 0


PRODUCER = """
    import sys, time
    from stage_runtime.connectors import SharedMemoryConnector
    connector = SharedMemoryConnector({"directory": sys.argv[1], "shm_threshold_bytes": 0})
    for number in range(3):
        connector.put("0", "1", f"k{number}", {"b": bytes(100_000)})
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_producer_that_is_killed_leaves_nothing_after_the_next_start(make: Make, tmp_path: Path) -> None:
    """1. a producer puts three hand-offs; while it lives, a new start takes nothing from it
    2. it is killed: a consumer that knows a key still gets that one
    3. the next connector that starts sweeps the rest away, but not what the living own
    """
    mine = make()
    mine.put("0", "1", "mine", {"a": 1})
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PRODUCER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as producer:
        assert producer.stdout is not None
        assert producer.stdout.readline() == "ready\n"
        make()
        assert len(list(tmp_path.iterdir())) == 4
        os.kill(producer.pid, signal.SIGKILL)
    assert mine.get("0", "1", "k0") is not None
    make()
    assert len(list(tmp_path.iterdir())) == 1
    assert mine.get("0", "1", "mine") is not None


def test_half_written_files_of_the_dead_are_swept_and_those_of_strangers_are_not(tmp_path: Path) -> None:
    """A process id that was given anew has another start time; one of another container says nothing to us."""
    dead = Owner(me().pid, me().started + 1, me().pid_namespace)
    elsewhere = Owner(1 << 22, 1, me().pid_namespace + 1)
    for owner in (dead, elsewhere):
        (tmp_path / f"omni-{'0' * 32}.{owner.name}.part").write_bytes(b"half")
    (tmp_path / "omni-something-else").write_bytes(b"not ours")
    assert sweep(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_setting_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="shm_treshold"):
        SharedMemoryConnector({"shm_treshold": 1})


def test_the_factory_knows_its_connectors_and_takes_others() -> None:
    assert "SharedMemoryConnector" in OmniConnectorFactory.list_registered_connectors()
    with pytest.raises(ValueError, match="'Nobody' is not known"):
        OmniConnectorFactory.create_connector(ConnectorSpec("Nobody"))
    with pytest.raises(ValueError, match="already registered"):
        OmniConnectorFactory.register_connector("SharedMemoryConnector", SharedMemoryConnector)


def test_the_base_serializes_for_all() -> None:
    data = OmniConnectorBase.serialize_obj({"a": torch.ones(2)})
    assert isinstance(data, bytes)
    assert torch.equal(OmniConnectorBase.deserialize_obj(data)["a"], torch.ones(2))
    assert OmniConnectorBase.supports_raw_data is False


def test_edges_without_a_connector_get_shared_memory() -> None:
    """Stage 2 takes from 0 and 1; the edge from 1 is named, the others are completed."""
    config = load_omni_transfer_config(
        config_dict={
            "stages": [{"stage_id": 0}, {"stage_id": 1}, {"stage_id": 2, "input_from": [0, 1]}],
            "edges": [{"from": 1, "to": 2, "connector": "mine"}],
            "connectors": {"mine": {"name": "Mine", "extra": {"x": 1}}},
        },
        default_shm_threshold=7,
    )
    assert config is not None
    shared = ConnectorSpec("SharedMemoryConnector", {"shm_threshold_bytes": 7})
    assert config.connectors == {("0", "1"): shared, ("0", "2"): shared, ("1", "2"): ConnectorSpec("Mine", {"x": 1})}
    assert config.get_connector_for_edge("1", "2") == ConnectorSpec("Mine", {"x": 1})
    assert load_omni_transfer_config() is None
    assert not OmniTransferConfig().has_connector_for_edge("0", "1")
    assert OmniTransferConfig().get_connector_for_edge("0", "1") is None


def test_a_transfer_config_can_be_a_file_and_says_what_is_wrong_in_it(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text("stages: [{stage_id: 0}, {stage_id: 1}]")
    config = load_omni_transfer_config(path)
    assert config is not None
    assert config.has_connector_for_edge("0", "1")
    with pytest.raises(ConfigError, match="'x' is not in 'connectors'"):
        load_omni_transfer_config(config_dict={"edges": [{"from": 0, "to": 1, "connector": "x"}]})
    with pytest.raises(ConfigError, match="no-such-file"):
        load_omni_transfer_config(tmp_path / "no-such-file")
