"""The view on disk: written whole, checked when read, and never a reason not to start."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.kv import KeyValue, Listing
from omni_discovery.records import keys
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.registration.registrars import HubRegistrar
from omni_discovery.testing import FakeKV, ManualClock, settle
from omni_discovery.view import saved_view
from omni_discovery.view.hub_watcher import HubWatcher, ViewOptions
from omni_discovery.view.saved_view import SavedView
from omni_discovery.view.table import View

NS = "default"
LISTING = Listing(7, 99, (KeyValue(keys.replica_key(NS, 0, 0), b"\xff\x00", 3, 5, 77),))


def record(replica_id: int) -> bytes:
    return encode_record(
        ReplicaRecord(stage_id=0, replica_id=replica_id, input_addr="i", output_addr="o", status=ReplicaStatus.UP)
    )


@pytest.fixture
def file(tmp_path: Path) -> SavedView:
    return SavedView(tmp_path / "hub-0" / "view", NS, "b:1,a:1")


def test_what_is_saved_is_read_again(file: SavedView) -> None:
    assert file.load() is None
    file.save(LISTING, 123.5)
    assert file.load() == (LISTING, 123.5)


def test_only_its_owner_may_read_it_and_nothing_else_is_left(file: SavedView) -> None:
    file.save(LISTING, 1.0)
    file.save(LISTING, 2.0)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert list(file.path.parent.iterdir()) == [file.path]


def test_the_order_of_the_endpoints_does_not_matter(file: SavedView) -> None:
    file.save(LISTING, 1.0)
    assert SavedView(file.path, NS, ["a:1", "b:1"]).load() == (LISTING, 1.0)


def flipped(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda content: content[:-1], lambda content: b"", lambda content: b"omni-view 2" + content[11:]],
)
def test_a_damaged_file_is_ignored_with_one_warning(
    file: SavedView, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    file.save(LISTING, 1.0)
    file.path.write_bytes(damage(file.path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert file.load() is None
    assert len(caplog.records) == 1
    assert "view.ignored" in caplog.text


@pytest.mark.parametrize(("namespace", "endpoints"), [("other", "a:1,b:1"), (NS, "a:1")])
def test_a_view_of_another_registry_is_ignored(
    file: SavedView, namespace: str, endpoints: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.save(LISTING, 1.0)
    assert SavedView(file.path, namespace, endpoints).load() is None
    assert "view.ignored" in caplog.text


class Scene:
    """A hub's watcher with a saved view."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.kv = FakeKV(self.clock)
        self.path = folder / "view"
        self.views: list[View] = []

    def watcher(self) -> HubWatcher:
        config = RegistryConfig("etcd:2379", namespace=NS)
        options = ViewOptions(saved_view=self.path)
        return HubWatcher(self.kv, config, lambda view, _: self.views.append(view), options, clock=self.clock)

    async def written(self) -> None:
        async with asyncio.timeout(5.0):
            while not self.path.exists():  # noqa: ASYNC110 - another thread writes it
                await asyncio.sleep(0.005)


async def test_a_hub_that_starts_while_etcd_is_away_begins_with_the_saved_view(tmp_path: Path) -> None:
    """1. a view is saved, and the hub ends; an hour later etcd is away
    2. the next life shows the replica at once, stale since the save
    3. etcd is back, with another replica: fresh
    """
    scene = Scene(tmp_path)
    await scene.kv.put(keys.replica_key(NS, 0, 0), record(0))
    first = scene.watcher()
    first.start()
    await scene.clock.advance(1.0)
    await scene.written()
    await first.close()
    await scene.clock.advance(3600.0)
    scene.kv.is_out = True
    second = scene.watcher()
    second.start()
    await settle()
    assert set(scene.views[-1].replicas) == {(0, 0)}
    assert scene.views[-1].stale_since_s == pytest.approx(1_000_000.0, abs=2.0)
    scene.kv.is_out = False
    await scene.kv.put(keys.replica_key(NS, 0, 1), record(1))
    await scene.clock.advance(3.0)
    assert set(scene.views[-1].replicas) == {(0, 0), (0, 1)}
    assert scene.views[-1].stale_since_s is None
    await second.close()


async def test_a_view_is_saved_with_the_moment_of_its_last_proof(tmp_path: Path) -> None:
    """The list at 0 s is the only proof when the file is written, half a second later."""
    scene = Scene(tmp_path)
    await scene.kv.put(keys.replica_key(NS, 0, 0), record(0))
    config = RegistryConfig("etcd:2379", namespace=NS)
    registrar = HubRegistrar(scene.kv, NS, HubRecord(hub_id="a"), ttl_s=10.0)
    options = ViewOptions(saved_view=scene.path)
    watcher = HubWatcher(scene.kv, config, lambda *_: None, options, "a", registrar, scene.clock)
    watcher.start()
    await scene.clock.advance(0.7)
    await scene.written()
    found = SavedView(scene.path, NS, "etcd:2379").load()
    assert found is not None
    assert found[1] == pytest.approx(1_000_000.0, abs=0.05)
    await watcher.close()


async def test_a_registry_that_was_wiped_meanwhile_is_told_from_one_that_lost_a_replica(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.kv.put(keys.replica_key(NS, 0, 0), record(0))
    first = scene.watcher()
    first.start()
    await scene.clock.advance(1.0)
    await scene.written()
    await first.close()
    scene.kv.wipe()
    second = scene.watcher()
    second.start()
    await settle()
    assert not scene.views[-1].replicas
    assert scene.views[-1].history == 1
    await second.close()


async def test_a_folder_that_can_not_be_written_costs_a_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path)
    (tmp_path / "plain").write_text("")
    scene.path = tmp_path / "plain" / "view"
    await scene.kv.put(keys.replica_key(NS, 0, 0), record(0))
    watcher = scene.watcher()
    watcher.start()
    await scene.clock.advance(1.0)
    assert set(scene.views[-1].replicas) == {(0, 0)}
    await watcher.close()
    assert "view.not_saved" in caplog.text


async def test_a_hub_without_a_saved_view_watches_all_the_same(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    watcher = HubWatcher(
        scene.kv, RegistryConfig("etcd:2379", namespace=NS), lambda view, _: scene.views.append(view), ViewOptions()
    )
    watcher.start()
    await settle()
    await watcher.close()
    assert scene.views
    assert not scene.path.exists()


async def test_what_is_not_known_to_be_fresh_is_not_saved(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    watcher = scene.watcher()
    assert watcher._fresh_list() is None
    watcher._hub_table.replace(LISTING, 1.0)
    found = watcher._fresh_list()
    assert found is not None
    assert found[0].revision == LISTING.revision
    watcher._hub_table.mark_stale(2.0)
    assert watcher._fresh_list() is None


@pytest.mark.attack("V2")
def test_a_view_that_is_too_large_is_not_encoded_to_find_that_out(
    file: SavedView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding holds up all threads of a hub, by seconds for a gigabyte, and is tried again every two seconds."""
    value, encoded = bytes(1 << 20), []
    large = Listing(7, 99, tuple(KeyValue(keys.replica_key(NS, 0, number), value, 3, 5, 77) for number in range(80)))
    monkeypatch.setattr(saved_view.msgspec.json, "encode", encoded.append)
    with pytest.raises(ValueError, match="more than"):
        file.save(large, 1.0)
    assert encoded == []
