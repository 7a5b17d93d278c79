"""References come from hubs and producers: what they name in a store that others share is not believed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stage_runtime.connectors.mooncake import store as mooncake
from stage_runtime.connectors.mooncake.store import MooncakeStoreConnector
from stage_runtime.connectors.serialization import serialize
from stage_runtime.connectors.store.memory import PooledBuffer
from stage_runtime.connectors.yuanrong import store as yuanrong
from stage_runtime.connectors.yuanrong.store import YuanrongConnector

OF_REPLICA = {"by_key": False}


class ObjectStore:
    """The objects of a store by name, as each connector's client has them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, name: str, *_: Any) -> PooledBuffer | None:
        found = self.objects.get(name)
        return None if found is None else np.frombuffer(bytearray(found), np.uint8).view(PooledBuffer)

    def remove(self, name: str, _deadline_s: float) -> bool:
        return self.objects.pop(name, None) is not None


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    objects = ObjectStore()
    monkeypatch.setattr(mooncake, "client_of", lambda _: objects)
    return objects


@pytest.mark.attack("Z21")
@pytest.mark.parametrize(
    "name", ["omni-jobs/NS/job", f"omni-key-{bytes(16).hex()}", "omni-x", f"omni-{'0' * 64}-fetched"]
)
@pytest.mark.parametrize("consume", [True, False])
def test_a_mooncake_store_is_asked_for_hand_offs_only(objects: ObjectStore, name: str, consume: bool) -> None:
    """Whatever else lies there under any name is neither read nor removed."""
    objects.objects[name] = serialize({"a": 1})
    with MooncakeStoreConnector(OF_REPLICA) as connector:
        assert connector.get("0", "1", "key", {"mooncake_key": name, "consume": consume}) is None
    assert list(objects.objects) == [name]


def test_a_mooncake_store_gives_a_hand_off_to_who_has_its_name(objects: ObjectStore) -> None:
    name = f"omni-{os.urandom(32).hex()}"
    objects.objects[name] = serialize({"a": 1})
    with MooncakeStoreConnector(OF_REPLICA) as connector:
        got = connector.get("0", "1", "key", {"mooncake_key": name})
    assert got is not None
    assert got[0] == {"a": 1}
    assert objects.objects == {}


@pytest.mark.attack("Z21")
def test_a_replica_asks_no_index_for_a_key(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys can be guessed: nothing is found by one alone, in Mooncake's store or in Yuanrong's."""
    asked: list[str] = []
    monkeypatch.setattr(objects, "get", lambda name, *_: asked.append(name))
    with MooncakeStoreConnector(OF_REPLICA) as connector:
        assert connector.get("0", "1", "key", {"mooncake_key": None}) is None
    monkeypatch.setattr(yuanrong, "load_package", lambda: SimpleNamespace(SetParam=SimpleNamespace))
    monkeypatch.setattr(yuanrong.YuanrongClient, "read", lambda _self, name, _copy: asked.append(name))
    with YuanrongConnector(OF_REPLICA) as connector:
        assert connector.get("0", "1", "key", {"generation": "x"}) is None
    assert asked == []
