"""What every connector promises; run over each one that works on this machine."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from omni_discovery.errors import ConfigError
from stage_runtime.config import SerializationError
from stage_runtime.connectors import (
    ConnectorSpec,
    OmniConnectorBase,
    OmniConnectorFactory,
    OmniTransferConfig,
    SharedMemoryConnector,
    TransferError,
    TransferTimeoutError,
    load_omni_transfer_config,
)
from tests.support.connector_peer import Peer, intact, payload
from tests.support.mooncake import mooncake_host, mooncake_master
from tests.support.netns import Host
from tests.support.processes import wait_for
from tests.support.yuanrong import yuanrong

pytestmark = pytest.mark.long

Make = Callable[..., OmniConnectorBase]
#: 256 MiB in each run, a whole GiB in the long form.
LARGEST_BYTES = (1024 if os.environ.get("OMNI_LONG") else 256) << 20
KEEP = {"consume": False}


KINDS = [
    "SharedMemoryConnector", "TcpConnector", "AutoConnector", "AutoConnector apart", "MooncakeTransferEngineConnector",
    "MooncakeStoreConnector", "YuanrongConnector",
]  # fmt: skip


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """The connectors, one after the other; ``apart`` is with nothing in common but the network."""
    return str(request.param)


def extra_of(kind: str, folder: Path, number: int) -> tuple[str, dict[str, Any]]:
    """Name and settings for the ``number``-th connector of a test."""
    name, _, apart = kind.partition(" ")
    extra: dict[str, Any] = {"shm_threshold_bytes": 0}
    if name == "MooncakeTransferEngineConnector":
        extra["memory_pool_size"] = LARGEST_BYTES + (64 << 20)
    elif name == "MooncakeStoreConnector":
        # Its allocators round sizes up by as much as an eighth.
        extra |= {"segment": LARGEST_BYTES * 5 // 4, "localbuf": LARGEST_BYTES * 5 // 4}
    elif name == "YuanrongConnector":
        # All tests share it; what keeps them apart is what keeps deployments apart.
        extra |= {**yuanrong().settings, "namespace": str(folder)}
    elif name != "TcpConnector":
        directory = folder / (str(number) if apart else "shared")
        directory.mkdir(exist_ok=True)
        extra["directory"] = str(directory)
    return name, extra


@pytest.fixture
def home(kind: str) -> Iterator[Host | None]:
    """Where the connector may run: here, or on a host of its own."""
    if not kind.startswith("Mooncake"):
        yield None
        return
    if kind == "MooncakeStoreConnector":
        mooncake_master()
    with mooncake_host().inside():
        yield mooncake_host()


@pytest.fixture
def make(kind: str, home: Host | None, tmp_path: Path) -> Iterator[Make]:
    """Builds connectors that see each other's hand-offs, and closes them."""
    made: list[OmniConnectorBase] = []

    def build(**extra: Any) -> OmniConnectorBase:
        name, settings = extra_of(kind, tmp_path, len(made))
        made.append(OmniConnectorFactory.create_connector(ConnectorSpec(name, settings | extra)))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


@pytest.fixture
def peer(kind: str, home: Host | None, tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    """Builds connectors in other processes, and kills those."""
    made: list[Peer] = []

    def build(**extra: Any) -> Peer:
        name, settings = extra_of(kind, tmp_path, 100 + len(made))
        made.append(Peer(name, home, **settings | extra))
        return made[-1]

    yield build
    for one in made:
        one.kill()


def put(connector: OmniConnectorBase, key: str, value: Any) -> dict[str, Any]:
    stored, size_bytes, metadata = connector.put("0", "1", key, value)
    assert stored, connector.last_error
    assert size_bytes > 0
    assert metadata is not None
    return metadata


def get(connector: OmniConnectorBase, key: str, metadata: dict[str, Any] | None, **more: Any) -> Any:
    got = connector.get("0", "1", key, {**(metadata or {}), **more})
    return None if got is None else got[0]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

VALUES: dict[str, Any] = {
    "empty": {},
    "none": {"nothing": None},
    "no bytes": {"empty": b""},
    "bytes": {"bytes": bytes(range(256)) * 1000},
    "nested": {"tensor": torch.arange(10), "deep": [{"array": np.eye(3), "more": [[1.5, "ü"], None]}], "n": -(2**63)},
    "large": {"large": np.arange(300_000)},
    "zero": {"zero": torch.empty(0, 4), "array": np.empty((3, 0))},
    "picture": {"picture": Image.effect_noise((31, 17), 80.0), "small": Image.new("RGBA", (1, 1), (1, 2, 3, 4))},
    "types": {str(dtype): tensor_of(dtype, (2, 3)) for dtype in DTYPES},
    "arrays": {name: np.ones((2, 3), dtype=name) for name in ("<f2", ">i8", "|b1", "<c16", "<U4", "<M8[ns]")},
}


def same(one: Any, other: Any) -> bool:
    match one:
        case dict():
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        case list():
            return len(one) == len(other) and all(map(same, one, other))
        case torch.Tensor():
            alike = (one.dtype, one.shape) == (other.dtype, other.shape)
            return alike and bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))
        case np.ndarray():
            return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
        case Image.Image():
            return (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())
        case _:
            return bool(one == other)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["stored", "inline"])
def test_what_one_puts_the_other_gets(make: Make, value: Any, threshold: int) -> None:
    producer, consumer = make(shm_threshold_bytes=threshold), make()
    stored, size, metadata = producer.put("0", "1", "key", value)
    assert stored
    got = consumer.get("0", "1", "key", metadata)
    assert got is not None
    assert same(value, got[0])
    assert got[1] == size


def test_a_very_large_hand_off_crosses_to_another_process(make: Make, peer: Callable[..., Peer]) -> None:
    producer = make()
    metadata = put(producer, "key", payload(LARGEST_BYTES, 7))
    assert peer().call("get", "key", metadata | KEEP)[:2] == (True, 7)


def test_small_hand_offs_travel_in_the_metadata(make: Make) -> None:
    producer = make(shm_threshold_bytes=65536)
    assert isinstance(put(producer, "key", {"a": 1})["inline"], bytes)
    assert producer.health()["pending"] == 0


def test_get_consumes_once_unless_it_is_told_not_to(make: Make) -> None:
    producer, consumer = make(), make()
    metadata = put(producer, "key", {"a": 1})
    for _ in range(3):
        assert get(consumer, "key", metadata, **KEEP) == {"a": 1}
    assert get(consumer, "key", metadata) == {"a": 1}
    assert get(consumer, "key", metadata) is None
    assert get(consumer, "key", metadata, **KEEP) is None


def test_of_many_that_would_consume_at_once_one_gets_it(make: Make) -> None:
    producer, consumers = make(), [make() for _ in range(4)]
    for number in range(5):
        metadata = put(producer, f"key{number}", payload(1 << 20, number))
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda one: get(one, f"key{number}", metadata), consumers))  # noqa: B023
        assert [value is not None for value in got].count(True) == 1


def test_what_is_not_there_is_none(make: Make) -> None:
    """1. never put; 2. put and released by its producer"""
    producer, consumer = make(), make()
    assert consumer.get("0", "1", "never put") is None
    assert consumer.get("0", "1", "never put", {"source_host": "elsewhere", "source_port": 1}) is None
    metadata = put(producer, "key", {"a": 1})
    producer.cleanup("key")
    assert get(consumer, "key", metadata) is None


def test_a_hand_off_of_another_time_is_not_taken_for_the_one_that_is_meant(make: Make) -> None:
    """The same key again replaces what was there: the older metadata means something that is gone."""
    producer, consumer = make(), make()
    older = put(producer, "key", {"a": 1})
    newer = put(producer, "key", {"a": 2})
    assert get(consumer, "key", older, **KEEP) is None
    assert get(consumer, "key", newer, **KEEP) == {"a": 2}
    assert producer.health()["pending"] == 1


@pytest.mark.parametrize("key", ["a/b", "../../etc/passwd", "ü" * 300, "\0", ".", "\ud800"])
def test_any_text_is_a_key(make: Make, key: str) -> None:
    producer, consumer = make(), make()
    assert get(consumer, key, put(producer, key, {"a": 1})) == {"a": 1}


def test_what_can_not_be_stored_is_said_and_not_raised(make: Make) -> None:
    connector = make()
    assert connector.put("0", "1", "key", {"f": print}) == (False, 0, None)
    assert "builtin_function" in connector.last_error
    assert connector.health()["pending"] == 0


def test_cleanup_drops_a_requests_keys_and_no_others(make: Make) -> None:
    producer, consumer = make(), make()
    all_metadata = {key: put(producer, key, {"a": 1}) for key in ("r1", "r1_0", "0_r1", "r10", "xr1")}
    producer.cleanup("r1")
    producer.cleanup("unknown")
    there = {key for key, metadata in all_metadata.items() if get(consumer, key, metadata, **KEEP)}
    assert there == {"r10", "xr1"}


def test_close_may_be_called_twice_and_refuses_afterwards(make: Make) -> None:
    producer, consumer = make(), make()
    value = payload(100_000, 3)
    metadata = put(producer, "a", value)
    got = get(consumer, "a", metadata, **KEEP)
    for connector in (producer, consumer) * 2:
        connector.close()
    assert producer.put("0", "1", "b", payload(100_000)) == (False, 0, None)
    # What was fetched belongs to who fetched it.
    assert intact(got)


def test_health_says_what_happened(make: Make) -> None:
    producer, consumer = make(), make()
    metadata = put(producer, "a", {"a": 1})
    put(producer, "b", {"a": 1})
    producer.put("0", "1", "c", print)
    assert get(consumer, "a", metadata, **KEEP)
    said = {"status": "healthy", "puts": 2, "gets": 0, "failures": 1, "pending": 2}
    assert said.items() <= producer.health().items()
    assert {"status": "healthy", "gets": 1, "lent": 0}.items() <= consumer.health().items()


def test_what_was_got_may_be_changed_without_changing_it_for_others(make: Make) -> None:
    producer, consumer = make(), make()
    metadata = put(producer, "key", {"t": torch.zeros(100_000)})
    first = get(consumer, "key", metadata, **KEEP)
    first["t"] += 1
    assert get(consumer, "key", metadata, **KEEP)["t"].sum() == 0


def test_tensors_stay_as_they_are_while_their_segment_would_be_used_again(make: Make) -> None:
    """1. a consumer looks at a hand-off whose producer drops it and stores twenty more of that size
    2. what it looks at does not change, and what is fetched meanwhile is right
    """
    producer, consumer = make(), make()
    held = get(consumer, "first", put(producer, "first", payload(200_000, 1)), **KEEP)
    producer.cleanup("first")
    for number in range(20):
        metadata = put(producer, f"k{number}", payload(200_000, 100 + number))
        got = get(consumer, f"k{number}", metadata, **KEEP)
        assert (got["seed"], intact(got)) == (100 + number, True)
        producer.cleanup(f"k{number}")
    assert (held["seed"], intact(held)) == (1, True)


def test_memory_is_used_again_once_nothing_lives_in_it(make: Make) -> None:
    """By the end of the last tensor, or by ``release``: fifty hand-offs one after the other need two segments."""
    producer, consumer = make(), make()
    for number in range(50):
        got = get(consumer, "key", put(producer, "key", payload(200_000, number)), **KEEP)
        if number % 2:
            consumer.release(got)
            assert consumer.health()["lent"] == 0
        del got
        producer.cleanup("key")
    gc.collect()
    assert producer.health()["segments_made"] <= 2
    assert producer.health()["pending"] == producer.health()["inflight_bytes"] == 0
    consumer.release(object())


def test_a_part_of_a_hand_off_keeps_all_its_memory(make: Make) -> None:
    producer, consumer = make(), make()
    got = get(consumer, "key", put(producer, "key", payload(200_000, 5)), **KEEP)
    part = got["tensor"][1000:1010]
    del got
    producer.cleanup("key")
    put(producer, "other", payload(200_000, 6))
    gc.collect()
    assert part.tolist() == list(range(1005, 1015))


def test_many_threads_get_at_once(make: Make) -> None:
    producer, consumer = make(), make()
    stored = {f"k{number}": put(producer, f"k{number}", payload(500_000, number)) for number in range(8)}

    def read(key: str) -> bool:
        got = get(consumer, key, stored[key], **KEEP)
        return got["seed"] == int(key[1:]) and intact(got)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, list(stored) * 8))


def test_beyond_the_limits_of_an_edge_put_fails_at_once_and_says_which(make: Make) -> None:
    """1. two in flight are allowed: the third is refused until one is cleaned up
    2. one that nobody fetched is allowed: the next one is refused until that one is fetched
    3. bytes are bounded in the same way; the same key again needs no room of its own
    """
    producer, consumer = make(max_inflight=2), make()
    put(producer, "a", payload(1000))
    put(producer, "b", payload(1000))
    begun_s = time.monotonic()
    assert producer.put("0", "1", "c", payload(1000)) == (False, 0, None)
    assert time.monotonic() - begun_s < 0.5
    assert "max_inflight is 2" in producer.last_error
    put(producer, "b", payload(1000))
    producer.cleanup("a")
    put(producer, "c", payload(1000))
    window = make(window_size=1, shm_threshold_bytes=500)
    first = put(window, "a", payload(1000))
    assert window.put("0", "1", "b", payload(1000)) == (False, 0, None)
    assert "window_size is 1" in window.last_error
    put(window, "small", {"a": 1})
    assert get(consumer, "a", first, **KEEP) is not None
    # Over the network its producer hears of it a moment later.
    wait_for("room", lambda: window.put("0", "1", "b", payload(1000))[0], 5.0)
    narrow = make(max_inflight_bytes=100_000)
    put(narrow, "a", payload(60_000))
    assert narrow.put("0", "1", "b", payload(60_000)) == (False, 0, None)
    assert "max_inflight_bytes is 100000" in narrow.last_error
    put(narrow, "a", payload(60_000))


def test_what_was_consumed_makes_room(make: Make) -> None:
    producer, consumer = make(max_inflight=3), make()
    for number in range(20):
        metadata = put(producer, f"k{number}", payload(1000, number))
        assert get(consumer, f"k{number}", metadata)["seed"] == number


def test_what_nobody_cleans_up_goes_after_its_time(make: Make) -> None:
    producer, consumer = make(ttl_s=0.05), make()
    metadata = put(producer, "old", {"a": 1})
    time.sleep(0.1)
    put(producer, "new", {"a": 1})
    assert producer.health()["pending"] == 1
    assert get(consumer, "old", metadata) is None


@pytest.mark.parametrize(
    "wrong",
    [{"shm_treshold": 1}, {"max_inflight": 0}, {"window_size": "many"}, {"pool_bytes": -1}, {"ttl_s": float("nan")}],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused(make: Make, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make(**wrong)


def test_the_dead_producers_hand_off_is_there_or_its_absence_is_said(make: Make, peer: Callable[..., Peer]) -> None:
    """The producer is killed after it has stored: what lies in shared memory can still be had, nothing ever hangs."""
    producer, consumer = peer(), make()
    _, _, metadata = producer.call("put", "key", 1 << 20, 4)
    producer.kill()
    begun_s = time.monotonic()
    try:
        got = get(consumer, "key", metadata, **KEEP)
    except TransferError:
        got = None
    assert time.monotonic() - begun_s < 5
    assert got is None or (got["seed"] == 4 and intact(got))


def test_a_consumer_that_is_killed_while_it_looks_holds_nothing_back(make: Make, peer: Callable[..., Peer]) -> None:
    """1. a consumer looks at a hand-off; while it does, its segment is not used again
    2. it is killed: of three hand-offs, two of them at a time, two segments are enough
    """
    producer, consumer = make(), peer()
    metadata = put(producer, "a", payload(200_000, 1))
    assert consumer.call("hold", "a", metadata | KEEP)
    producer.cleanup("a")
    put(producer, "b", payload(200_000, 2))
    assert consumer.call("holds", "a")
    consumer.kill()
    time.sleep(0.3)
    put(producer, "c", payload(200_000, 3))
    assert producer.health()["segments_made"] == 2


def test_a_deadline_that_has_passed_is_an_error_or_not_needed(make: Make) -> None:
    producer, consumer = make(), make()
    metadata = put(producer, "key", payload(1000, 1))
    try:
        got = get(consumer, "key", metadata, timeout_s=0.0, **KEEP)
    except TransferTimeoutError:
        return
    assert intact(got)


def test_cancel_of_what_is_not_under_way_is_silent(make: Make) -> None:
    connector = make()
    connector.cancel("unknown")
    metadata = put(connector, "key", {"a": 1})
    connector.cancel("key")
    assert get(make(), "key", metadata) == {"a": 1}


def test_puts_and_gets_of_many_threads_do_not_mix(make: Make) -> None:
    producer, consumer = make(), make()
    wrong: list[int] = []

    def go(base: int) -> None:
        for number in range(base, base + 15):
            metadata = put(producer, f"k{number}", payload(70_000 + number, number))
            got = get(consumer, f"k{number}", metadata, **KEEP)
            if got is None or got["seed"] != number or not intact(got):
                wrong.append(number)
            producer.cleanup(f"k{number}")

    threads = [threading.Thread(target=go, args=(base,)) for base in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert producer.health()["pending"] == 0


def test_the_factory_knows_its_connectors_and_takes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OmniConnectorFactory, "_registry", dict(OmniConnectorFactory._registry))
    names = OmniConnectorFactory.list_registered_connectors()
    assert names == [
        "AutoConnector", "MooncakeStoreConnector", "MooncakeTransferEngineConnector", "SharedMemoryConnector",
        "TcpConnector", "YuanrongConnector", "YuanrongTransferEngineConnector",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'Nobody' is not known; there are: AutoConnector"):
        OmniConnectorFactory.create_connector(ConnectorSpec("Nobody"))
    with pytest.raises(ValueError, match="already registered"):
        OmniConnectorFactory.register_connector("SharedMemoryConnector", SharedMemoryConnector)


def test_an_old_name_means_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OmniConnectorFactory, "_registry", dict(OmniConnectorFactory._registry))
    monkeypatch.setitem(OmniConnectorFactory._registry, "MooncakeStoreConnector", SharedMemoryConnector)
    with OmniConnectorFactory.create_connector(ConnectorSpec("MooncakeConnector")) as connector:
        assert isinstance(connector, SharedMemoryConnector)
    with pytest.raises(ValueError, match="already registered"):
        OmniConnectorFactory.register_connector("MooncakeConnector", SharedMemoryConnector)


def test_a_replicas_place_is_told_to_our_connectors_and_to_no_others() -> None:
    place = {"namespace": "n", "stage_id": 3, "bind_host": "::", "advertise_host": "::1"}
    for name in ("AutoConnector", "SharedMemoryConnector", "TcpConnector"):
        spec = ConnectorSpec(name, OmniConnectorFactory.place(name, **place))
        with OmniConnectorFactory.create_connector(spec) as connector:
            assert connector.config["namespace"] == "n"
    assert OmniConnectorFactory.place("Theirs", **place) == {}
    assert OmniConnectorFactory.place("MooncakeConnector", **place) == place


def test_the_base_serializes_for_all() -> None:
    data = OmniConnectorBase.serialize_obj({"a": torch.ones(2)})
    assert isinstance(data, bytes)
    assert torch.equal(OmniConnectorBase.deserialize_obj(data)["a"], torch.ones(2))
    assert OmniConnectorBase.supports_raw_data is False
    with pytest.raises(SerializationError):
        OmniConnectorBase.deserialize_obj(data[:-1])


def test_edges_without_a_connector_get_shared_memory() -> None:
    """Stage 2 takes from 0 and 1; the edge from 1 is named, the others are completed."""
    config = load_omni_transfer_config(
        config_dict={
            "stages": [{"stage_id": 0}, {"stage_id": 1}, {"stage_id": 2, "input_from": [0, 1]}],
            "edges": [{"from": 1, "to": 2, "connector": "mine", "window_size": 4, "max_inflight": -1}],
            "connectors": {"mine": {"name": "Mine", "extra": {"x": 1}}},
        },
        default_shm_threshold=7,
    )
    assert config is not None
    shared = ConnectorSpec("SharedMemoryConnector", {"shm_threshold_bytes": 7})
    mine = ConnectorSpec("Mine", {"x": 1, "window_size": 4, "max_inflight": -1})
    assert config.connectors == {("0", "1"): shared, ("0", "2"): shared, ("1", "2"): mine}
    assert config.get_connector_for_edge("1", "2") == mine
    assert load_omni_transfer_config() is None
    assert not OmniTransferConfig().has_connector_for_edge("0", "1")
    assert OmniTransferConfig().get_connector_for_edge("0", "1") is None


def test_an_edge_may_have_bounds_and_no_connector_of_its_own() -> None:
    config = load_omni_transfer_config(config_dict={"edges": [{"from": 0, "to": 1, "max_inflight": 3}]})
    assert config is not None
    spec = config.get_connector_for_edge("0", "1")
    assert spec == ConnectorSpec("SharedMemoryConnector", {"shm_threshold_bytes": 65536, "max_inflight": 3})


def test_an_edge_may_name_a_connector_that_is_not_declared() -> None:
    config = load_omni_transfer_config(config_dict={"edges": [{"from": 0, "to": 1, "connector": "TcpConnector"}]})
    assert config is not None
    assert config.get_connector_for_edge("0", "1") == ConnectorSpec("TcpConnector", {})


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
