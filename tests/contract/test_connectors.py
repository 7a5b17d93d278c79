"""What every connector promises; run over each one that works on this machine."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

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
    TcpConnector,
    TransferError,
    load_omni_transfer_config,
)
from stage_runtime.testing import ConnectorContract
from tests.support.connector_peer import Peer, intact, payload
from tests.support.mooncake import mooncake_host, mooncake_master
from tests.support.netns import Host
from tests.support.processes import wait_for
from tests.support.quiet import soon_s
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
        # What is read from one producer has half of it.
        extra["memory_pool_size"] = 2 * (LARGEST_BYTES + (64 << 20))
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


class TestContract(ConnectorContract):
    """What is asked of the connectors of others, asked of each of ours; hand-offs hold tensors."""

    offers = frozenset({"limits", "pending", "ttl"})

    @pytest.fixture
    def make(self, make: Make) -> Make:
        return make

    def payload(self, size_bytes: int, seed: int = 0) -> dict[str, Any]:
        return payload(size_bytes, seed)

    def is_intact(self, value: Mapping[str, Any]) -> bool:
        return intact(dict(value))


def test_what_travels_in_the_metadata_needs_no_room(make: Make) -> None:
    producer = make(window_size=1, shm_threshold_bytes=500, by_key=False)
    put(producer, "a", payload(1000))
    assert producer.put("0", "1", "b", payload(1000)) == (False, 0, None)
    put(producer, "small", {"a": 1})


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["stored", "inline"])
def test_what_one_puts_the_other_gets(make: Make, value: Any, threshold: int) -> None:
    producer, consumer = make(shm_threshold_bytes=threshold, by_key=False), make()
    stored, size, metadata = producer.put("0", "1", "key", value)
    assert stored
    got = consumer.get("0", "1", "key", metadata)
    assert got is not None
    assert same(value, got[0])
    assert got[1] == size


def thinkers_pieces() -> list[dict[str, Any]]:
    """What a thinker of vLLM-Omni hands to its talker, piece by piece: hidden states as the model has them."""
    rows = torch.randn(9, 64).bfloat16()
    first = {
        "payload": {
            "embed": {"prefill": rows[:8], "tts_bos": rows[8:].reshape(1, 1, 64)},
            "hidden_states": {"output": rows[:8].clone()},
            "ids": {"prompt": [1, 2, 3], "all": list(range(8))},
            "meta": {"finished": torch.tensor(False)},
        },
        "source": {"prompt_token_ids": [1, 2, 3]},
    }
    later = [
        {"payload": {"embed": {"decode": row.reshape(1, 64)}, "meta": {"finished": torch.tensor(last)}}}
        for row, last in ((rows[0], False), (rows[1], True))
    ]
    return [first, *later]


@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["stored", "inline"])
def test_hidden_states_in_pieces_arrive_in_order_and_in_their_own_dtype(make: Make, threshold: int) -> None:
    """bfloat16 stays bfloat16, bit by bit. All are stored before the first is fetched, and go with one ``cleanup``."""
    producer, consumer = make(shm_threshold_bytes=threshold, by_key=False), make()
    pieces = thinkers_pieces()
    told = [put(producer, f"r_{number}", piece) for number, piece in enumerate(pieces)]
    for number, (piece, metadata) in enumerate(zip(pieces, told, strict=True)):
        for _ in range(2):
            assert same(piece, get(consumer, f"r_{number}", metadata, **KEEP))
    producer.cleanup("r")
    assert producer.health()["pending"] == 0


def test_stages_may_be_given_by_their_numbers(make: Make) -> None:
    """A hand-off that was put with numbers is got with texts, and the other way round; raw tensors are no exception."""
    producer, consumer = make(), make()
    for number, value in enumerate([{"a": 1}, torch.arange(64, dtype=torch.uint8)]):
        stored, size_bytes, metadata = producer.put(0, 1, f"n{number}", value)  # type: ignore[arg-type]
        assert stored, producer.last_error
        got = consumer.get("0", "1", f"n{number}", metadata)
        assert got is not None
        assert got[1] == size_bytes
    metadata = put(producer, "text", {"a": 1})
    got = consumer.get(0, 1, "text", metadata | KEEP)  # type: ignore[arg-type]
    assert got is not None
    assert got[0] == {"a": 1}
    before = producer.health()["pending"]
    producer.cleanup("text", from_stage=0, to_stage=1)  # type: ignore[call-arg]
    assert producer.health()["pending"] < before


def test_a_very_large_hand_off_crosses_to_another_process(make: Make, peer: Callable[..., Peer]) -> None:
    producer = make()
    metadata = put(producer, "key", payload(LARGEST_BYTES, 7))
    assert peer().call("get", "key", metadata | KEEP)[:2] == (True, 7)


def test_small_hand_offs_travel_in_the_metadata(make: Make) -> None:
    producer = make(shm_threshold_bytes=65536, by_key=False)
    metadata = put(producer, "key", {"a": 1})
    assert isinstance(metadata["inline"], bytes)
    assert metadata["size"] == len(metadata["inline"])
    assert producer.health()["pending"] == 0


def test_a_small_hand_off_that_is_found_by_key_is_freed_as_any_other(make: Make) -> None:
    """By a consumer, by ``cleanup``, and at the end of its time; TcpConnector finds nothing by key and stores none."""
    producer, consumer = make(shm_threshold_bytes=65536), make()
    metadata = put(producer, "consumed", {"a": 1})
    if isinstance(producer, TcpConnector):
        assert metadata["inline"]
        return
    assert "inline" not in metadata
    assert producer.health()["pending"] == 1
    assert get(consumer, "consumed", metadata) == {"a": 1}
    assert get(consumer, "consumed", metadata) is None
    put(producer, "cleaned", {"a": 1})
    producer.cleanup("cleaned")
    wait_for("the first two to be dropped", lambda: _tidied(producer) == 1)
    brief = make(shm_threshold_bytes=65536, ttl_s=1.0)
    put(brief, "expires", {"a": 1})
    time.sleep(1.2)
    wait_for("the last one to be dropped", lambda: _tidied(brief) == 1)


def _tidied(producer: OmniConnectorBase) -> int:
    # What was consumed or has expired is dropped at the next call.
    producer.get("0", "1", "nobody", {"consume": False})
    producer.put("0", "1", "fresh", {"a": 1})
    return int(producer.health()["pending"])


def test_health_says_what_happened(make: Make) -> None:
    producer, consumer = make(), make()
    metadata = put(producer, "a", {"a": 1})
    put(producer, "b", {"a": 1})
    producer.put("0", "1", "c", print)
    assert get(consumer, "a", metadata, **KEEP)
    said = {"status": "healthy", "puts": 2, "gets": 0, "failures": 1, "pending": 2}
    assert said.items() <= producer.health().items()
    assert {"status": "healthy", "gets": 1, "lent": 0}.items() <= consumer.health().items()


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
    assert time.monotonic() - begun_s < soon_s(5)
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
    place: dict[str, Any] = {"namespace": "n", "stage_id": 3, "bind_host": "::", "advertise_host": "::1"}
    for name in ("AutoConnector", "SharedMemoryConnector", "TcpConnector"):
        spec = ConnectorSpec(name, OmniConnectorFactory.place(name, **place))
        with OmniConnectorFactory.create_connector(spec) as connector:
            assert cast(Any, connector).config["namespace"] == "n"
    assert OmniConnectorFactory.place("Theirs", **place) == {}
    assert OmniConnectorFactory.place("MooncakeConnector", **place) == place | {"by_key": False}


def test_the_base_serializes_for_all() -> None:
    data = OmniConnectorBase.serialize_obj({"a": torch.ones(2)})
    assert isinstance(data, bytes)
    assert torch.equal(OmniConnectorBase.deserialize_obj(data)["a"], torch.ones(2))
    assert OmniConnectorBase.supports_raw_data is False
    with pytest.raises(SerializationError):
        OmniConnectorBase.deserialize_obj(data[:-1])


def test_edges_without_a_connector_get_the_one_that_replicas_take() -> None:
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
    shared = ConnectorSpec("AutoConnector", {"shm_threshold_bytes": 7})
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
    assert spec == ConnectorSpec("AutoConnector", {"shm_threshold_bytes": 65536, "max_inflight": 3})


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
    with pytest.raises(ConfigError, match="the edge 0 to 1 wants connector 'x'"):
        load_omni_transfer_config(config_dict={"edges": [{"from": 0, "to": 1, "connector": "x"}]})
    with pytest.raises(ConfigError, match="no-such-file"):
        load_omni_transfer_config(tmp_path / "no-such-file")
