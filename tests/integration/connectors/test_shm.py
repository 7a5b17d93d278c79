"""Shared memory: names, permissions, what others may do to the files, and what the dead leave."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.errors import ConfigError
from stage_runtime.config import SerializationError
from stage_runtime.connectors import SharedMemoryConnector
from stage_runtime.connectors.store.layout import (
    HEADER_BYTES,
    Owner,
    Sweeper,
    claim_path,
    home_path,
    key_digest,
    me,
    payload_path,
)
from stage_runtime.connectors.store.shm_blocks import KEPT_FROM_BYTES, size_class
from tests.support.connector_peer import Peer, intact, payload

Make = Callable[..., SharedMemoryConnector]
KEEP = {"consume": False}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SharedMemoryConnector] = []

    def build(**extra: Any) -> SharedMemoryConnector:
        made.append(SharedMemoryConnector({"directory": str(tmp_path), "shm_threshold_bytes": 0, **extra}))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer("SharedMemoryConnector", directory=str(tmp_path), shm_threshold_bytes=0)
    yield peer
    peer.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_key_alone_finds_it_whatever_other_transports_say(make: Make) -> None:
    make().put("0", "1", "key", {"a": 1})
    assert make().get("0", "1", "key", {"source_host": "elsewhere", "source_port": 1}) is not None
    assert make().get("0", "1", "key") is None


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


@pytest.mark.attack("C22")
def test_only_its_owner_may_read_a_hand_off_and_its_name_tells_nothing(make: Make, tmp_path: Path) -> None:
    make().put("0", "1", "secret-request", {"a": 1})
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert str(path) == payload_path(str(tmp_path), key_digest("", "0", "1", "secret-request"))
    assert "secret" not in path.name


@pytest.mark.parametrize("content", [b"", b"x" * 200, b"OMNISHM3" + b"\xff" * 200, b"OMNISHM3\x02" + b"\1" * 200])
def test_a_file_that_is_no_hand_off_is_refused_and_its_owner_goes_on(
    make: Make, tmp_path: Path, content: bytes
) -> None:
    connector = make()
    connector.put("0", "1", "key", payload(100_000))
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    with pytest.raises(SerializationError):
        connector.get("0", "1", "key", KEEP)
    connector.cleanup("key")
    assert connector.put("0", "1", "key", payload(100_000))[0]
    assert connector.get("0", "1", "key") is not None


def test_a_file_of_another_user_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = make()
    connector.put("0", "1", "key", {"a": 1})
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SerializationError, match="no hand-off"):
        connector.get("0", "1", "key")


def test_a_link_is_not_followed(make: Make, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x" * 1000)
    Path(payload_path(str(tmp_path), key_digest("", "0", "1", "key"))).symlink_to(target)
    with pytest.raises(SerializationError, match="no regular file"):
        make().get("0", "1", "key")


def test_readers_never_see_half_of_a_hand_off_nor_another_one(make: Make, peer: Peer) -> None:
    """1. one process stores under one key again and again, and drops it in between
    2. another gets that key all the time, by name alone: each time it is whole, or not there
    """
    producer = make()
    stopped = threading.Event()
    stored = 0

    def store() -> None:
        nonlocal stored
        while not stopped.is_set():
            assert producer.put("0", "1", "key", payload(400_000, stored))[0]
            stored += 1
            if stored % 3 == 0:
                producer.cleanup("key")

    thread = threading.Thread(target=store)
    thread.start()
    seeds: list[int] = []
    deadline_s = time.monotonic() + 30
    try:
        while len(set(seeds)) < 100 and time.monotonic() < deadline_s:
            got = peer.call("get", "key", KEEP)
            if got is not None:
                assert got[0]
                seeds.append(got[1])
    finally:
        stopped.set()
        thread.join()
    assert len(set(seeds)) == 100
    assert seeds == sorted(seeds)


@pytest.mark.parametrize("pagemap", ["/proc/self/pagemap", "/proc/none"])
def test_a_segment_that_was_read_before_is_read_again_without_opening_it(
    make: Make, peer: Peer, monkeypatch: pytest.MonkeyPatch, pagemap: str
) -> None:
    """1. a consumer reads a hand-off, writes to it, and drops it; the segment returns
    2. the next hand-offs in the same segment come as they were put, and no file is opened for them

    So it is also where the kernel does not say which pages were written to.
    """
    mine = make()
    monkeypatch.setattr("stage_runtime.connectors.shm.reader.PAGEMAP", pagemap)

    def fetch(seed: int) -> dict[str, Any]:
        metadata = peer.call("put", f"k{seed}", 400_000, seed)[2]
        got = mine.get("0", "1", f"k{seed}", metadata | KEEP)
        assert got is not None
        peer.call("cleanup", f"k{seed}")
        value: dict[str, Any] = got[0]
        return value

    value = fetch(1)
    assert intact(value)
    value["tensor"][100:] = 0
    del value
    monkeypatch.setattr("stage_runtime.connectors.shm.reader.ShmReader._attach", lambda *_: None)
    for seed in (2, 3, 4):
        value = fetch(seed)
        assert intact(value)
        assert value["seed"] == seed
        value["tensor"][-1] = 0
        del value
    assert peer.call("health")["segments_made"] == 1


def test_what_was_said_of_an_earlier_hand_off_finds_none_of_the_later_ones(make: Make) -> None:
    """The segment and the key are the same, the generation is not."""
    producer, consumer = make(), make()
    stale = producer.put("0", "1", "key", payload(100_000, 1))[2]
    assert stale is not None
    assert consumer.get("0", "1", "key", stale | KEEP) is not None
    producer.cleanup("key")
    assert consumer.get("0", "1", "key", stale | KEEP) is None
    fresh = producer.put("0", "1", "key", payload(100_000, 2))[2]
    assert fresh is not None
    assert fresh["segment"] == stale["segment"]
    assert consumer.get("0", "1", "key", stale | KEEP) is None
    assert consumer.get("0", "1", "key", fresh | KEEP) is not None
    assert consumer.get("0", "1", "key", stale | KEEP) is None
    assert consumer.get("0", "1", "key", fresh) is not None
    assert consumer.get("0", "1", "key", fresh) is None


def test_views_of_one_hand_off_hold_its_segment_until_the_last_is_gone(make: Make) -> None:
    """One is released and one dropped; both were of the same segment, by different mappings."""
    producer, consumer = make(), make()
    metadata = (producer.put("0", "1", "key", payload(100_000, 1))[2] or {}) | KEEP
    one, other = (consumer.get("0", "1", "key", metadata) for _ in range(2))
    assert one is not None
    assert other is not None
    producer.cleanup("key")
    consumer.release(one[0])
    consumer.release(one[0])
    producer.put("0", "1", "next", payload(100_000, 2))
    assert producer.health()["segments_made"] == 2
    assert intact(other[0])
    assert consumer.health()["lent"] == 1
    del one, other
    producer.put("0", "1", "last", payload(100_000, 3))
    assert producer.health()["segments_made"] == 2
    assert consumer.health()["lent"] == 0


def test_a_forked_process_gives_nothing_back_that_its_parent_looks_at(make: Make) -> None:
    """The lock belongs to both; the child drops its copy of the view and ends."""
    producer, consumer = make(), make()
    metadata = (producer.put("0", "1", "key", payload(100_000, 1))[2] or {}) | KEEP
    got = consumer.get("0", "1", "key", metadata)
    child = os.fork()
    if not child:
        del got
        os._exit(0)
    os.waitpid(child, 0)
    producer.cleanup("key")
    producer.put("0", "1", "next", payload(100_000, 2))
    assert got is not None
    assert intact(got[0])
    assert producer.health()["segments_made"] == 2


@pytest.mark.parametrize("how", ["close", "kill", "close while viewed"])
def test_a_segment_that_is_given_up_takes_no_memory_though_a_reader_has_it_mapped(
    make: Make, peer: Peer, tmp_path: Path, how: str
) -> None:
    """The producer closes, or is killed and swept: the reader's mapping is of an empty file then."""
    mine = make()
    metadata = peer.call("put", "key", 400_000, 1)[2]
    got = mine.get("0", "1", "key", metadata | KEEP)
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        assert os.fstat(file.fileno()).st_blocks > 0
        if how != "close while viewed":
            del got
        peer.kill() if how == "kill" else peer.call("close")
        make()
        got = None
        assert os.fstat(file.fileno()).st_blocks == 0
    assert mine.get("0", "1", "key", metadata) is None


def test_free_segments_are_kept_within_their_bound(make: Make, tmp_path: Path) -> None:
    connector = make(pool_bytes=300_000)
    for number in range(10):
        connector.put("0", "1", f"k{number}", payload(100_000))
    for number in range(10):
        connector.cleanup(f"k{number}")
    assert 100_000 < connector.health()["pool_free_bytes"] <= 300_000
    assert len(names(tmp_path)) == 2
    connector.put("0", "1", "small", payload(1000))
    connector.cleanup("small")
    assert len(names(tmp_path)) == 2
    connector.close()
    connector.close()
    assert names(tmp_path) == []


def test_a_size_gets_little_more_than_itself() -> None:
    sizes = [1, 1000, KEPT_FROM_BYTES - 1, KEPT_FROM_BYTES, 65537, 10**6, 2**26, 2**26 + 1, 10**9]
    assert all(size <= size_class(size) <= max(size * 1.27, size + 4096) for size in sizes)
    assert size_class(size_class(10**6)) == size_class(10**6)


def test_a_full_file_system_is_an_answer_and_leaves_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = make()
    free = os.statvfs(tmp_path)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert connector.put("0", "1", "key", payload(100_000)) == (False, 0, None)
    assert "No space left" in connector.last_error
    assert names(tmp_path) == []
    assert connector.health()["inflight_bytes"] == 0
    assert connector.health()["status"] == "healthy", "by now there is room"
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([4096, 4096, 256, 10, 10, *free[5:]]))
    health = connector.health()
    assert health["status"] == "unhealthy"
    assert health["reason"].startswith(f"{tmp_path} is full: of 1 MiB, 40 KiB are free and a hand-off takes 97.")
    assert health["reason"].endswith(" KiB; this replica keeps 0 B there for its next stages")
    monkeypatch.undo()
    assert connector.put("0", "1", "key", payload(100_000))[0]


def test_an_edge_beyond_its_limits_says_so_until_a_hand_off_is_dropped(make: Make) -> None:
    connector = make(max_inflight=1)
    assert connector.put("0", "1", "first", payload(1000))[0]
    assert connector.health()["status"] == "healthy"
    assert not connector.put("0", "1", "second", payload(1000))[0]
    assert connector.health()["reason"] == "1 hand-offs are in flight; max_inflight is 1"
    connector.cleanup("first")
    assert connector.health()["status"] == "healthy"


def test_what_a_killed_producer_left_is_swept_at_the_next_start(make: Make, peer: Peer, tmp_path: Path) -> None:
    """1. a producer puts three hand-offs; while it lives, a new start takes nothing from it
    2. it is killed: a consumer that knows a key still gets that one
    3. the next connector that starts sweeps the rest away, but not what the living own
    """
    mine = make()
    mine.put("0", "1", "mine", {"a": 1})
    for number in range(3):
        peer.call("put", f"k{number}", 100_000, number)
    make()
    assert len(names(tmp_path)) == 4
    peer.kill()
    assert mine.get("0", "1", "k0") is not None
    make()
    assert len(names(tmp_path)) == 1
    assert mine.get("0", "1", "mine") is not None


def test_a_connector_that_runs_sweeps_now_and_then(
    make: Make, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage_runtime.connectors.store.store.SWEEP_EVERY_S", 0.0)
    mine = make()
    peer.call("put", "k", 100_000, 0)
    peer.kill()
    assert len(names(tmp_path)) == 1
    mine.put("0", "1", "next", {"a": 1})
    mine.cleanup("next")
    assert names(tmp_path) == []


def test_files_of_the_dead_are_swept_and_those_of_strangers_are_not(tmp_path: Path) -> None:
    """A process id that was given anew has another start time; one of another container says nothing to us."""
    dead = Owner(me().pid, me().started + 1, me().pid_namespace)
    elsewhere = Owner(1 << 22, 1, me().pid_namespace + 1)
    for owner in (dead, elsewhere):
        Path(home_path(str(tmp_path), owner, 0)).write_bytes(b"half")
        claimed = claim_path(payload_path(str(tmp_path), bytes(16)), owner, 0)
        Path(claimed).write_bytes(bytes(HEADER_BYTES))
    (tmp_path / "omni-something-else").write_bytes(b"not ours")
    assert Sweeper(tmp_path).sweep_for(1.0)
    assert len(names(tmp_path)) == 3


def test_a_consumer_that_dies_as_it_consumes_leaves_a_name_that_is_swept(make: Make, tmp_path: Path) -> None:
    """It had taken the name and not yet given the segment back; the owner lives on and stores the next one."""
    connector = make()
    connector.put("0", "1", "key", payload(100_000))
    (path,) = tmp_path.iterdir()
    path.rename(claim_path(str(path), Owner(me().pid, me().started + 1, me().pid_namespace), 0))
    make()
    assert names(tmp_path) == []
    connector.cleanup("key")
    connector.put("0", "1", "key", payload(100_000, 5))
    got = connector.get("0", "1", "key")
    assert got is not None
    assert intact(got[0])


def test_what_is_cleaned_up_while_it_is_consumed_leaves_no_name(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer has taken the name and not yet given the segment back when its owner finds no name of it."""
    producer, consumer = make(), make()
    producer.put("0", "1", "key", payload(100_000))

    def late(*of: Any) -> str:
        producer.cleanup("key")
        return home_path(*of)

    monkeypatch.setattr("stage_runtime.connectors.shm.reader.home_path", late)
    got = consumer.get("0", "1", "key")
    assert got is not None
    assert intact(got[0])
    assert names(tmp_path) == []


@pytest.mark.parametrize("cleaned_up", [False, True])
def test_who_consumes_and_finds_another_hand_off_under_the_name_puts_it_back(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleaned_up: bool
) -> None:
    """Another producer stored under the key in this moment; or did so and cleaned up, and leaves no name behind."""
    first, second, consumer = make(), make(), make()
    first.put("0", "1", "key", payload(100_000, 1))

    def late(*of: Any) -> str:
        monkeypatch.undo()
        if cleaned_up:
            monkeypatch.setattr(os, "link", link)
        second.put("0", "1", "key", payload(100_000, 2))
        return claim_path(*of)

    def link(*names: Any) -> None:
        monkeypatch.undo()
        second.cleanup("key")
        os.link(*names)

    monkeypatch.setattr("stage_runtime.connectors.shm.reader.claim_path", late)
    got = consumer.get("0", "1", "key")
    assert (None if got is None else got[0]["seed"]) == (None if cleaned_up else 2)
    first.close()
    second.close()
    assert names(tmp_path) == []


def test_a_process_that_ends_with_hand_offs_in_its_hands_ends_without_a_word(make: Make, tmp_path: Path) -> None:
    """The last views go when the interpreter has torn down its modules already."""
    make().put("0", "1", "key", payload(100_000))
    script = f"""
        from stage_runtime.connectors import SharedMemoryConnector
        connector = SharedMemoryConnector({{"directory": {str(tmp_path)!r}}})
        got = connector.get("0", "1", "key", {{"consume": False}})
        assert got is not None
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.parametrize("directory", ["/no/such/folder", "/proc/version"])
def test_a_folder_that_is_none_is_refused(directory: str) -> None:
    with pytest.raises((ConfigError, OSError)):
        SharedMemoryConnector({"directory": directory, "pool_bytes": "x"})
