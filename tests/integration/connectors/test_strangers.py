"""Shared memory among strangers: whatever other users put into the folder, a replica neither hangs nor breaks."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.config import SerializationError
from stage_runtime.connectors import AutoConnector, SharedMemoryConnector
from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.connectors.store.layout import Owner, Sweeper, home_path, key_digest, me, payload_path
from stage_runtime.connectors.store.shm_blocks import ShmBlock
from tests.support.connector_peer import intact, payload
from tests.support.other_user import as_ordinary_user

KEEP = {"consume": False}


def fifo(path: str) -> None:
    os.mkfifo(path)
    Path(path).chmod(0o666)


def unix_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
    Path(path).chmod(0o666)


def link(path: str) -> None:
    Path(path).symlink_to("/dev/zero")


def folder(path: str) -> None:
    Path(path).mkdir()
    (Path(path) / "something").touch()


Squat = Callable[[str], None]
squats = pytest.mark.parametrize("squat", [fifo, unix_socket, link, folder])


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /dev/shm: everybody may make files there, and remove none but their own."""
    made = Path(tempfile.mkdtemp(prefix="strangers-"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


def there_and_back(connector: OmniConnectorBase, key: str = "key") -> bool:
    """Whether a hand-off that the connector stores comes back whole."""
    stored, _, metadata = connector.put("0", "1", key, payload(100_000))
    assert stored, connector.last_error
    got = connector.get("0", "1", key, {**(metadata or {}), **KEEP})
    return got is not None and intact(got[0])


@pytest.mark.attack("A7")
@squats
@pytest.mark.parametrize("kind", [SharedMemoryConnector, AutoConnector])
def test_whatever_has_a_name_like_a_segment_stops_no_start(
    shared: Path, squat: Squat, kind: type[SharedMemoryConnector | AutoConnector]
) -> None:
    """A connector sweeps the folder as it starts, and what its own user's dead processes left goes all the same."""
    squat(str(shared / "omni-x"))
    squat(home_path(str(shared), Owner(os.getpid(), 1, me().pid_namespace), 1))

    def start() -> list[Any]:
        left = Path(home_path(str(shared), Owner(os.getpid(), 1, me().pid_namespace), 2))
        left.write_bytes(b"left")
        with kind({"directory": str(shared), "shm_threshold_bytes": 0}) as connector:
            return [left.exists(), there_and_back(connector)]

    assert as_ordinary_user(start) == [False, True]
    assert len(list(shared.iterdir())) == 2


@pytest.mark.attack("A7")
def test_a_second_name_of_a_living_block_takes_nothing_from_it(shared: Path) -> None:
    """Where the kernel lets anybody link to any file, somebody may give a block the name of a dead owner's."""
    with SharedMemoryConnector({"directory": str(shared), "shm_threshold_bytes": 0}) as connector:
        connector.put("0", "1", "key", payload(100_000))
        os.link(
            payload_path(str(shared), key_digest("", "0", "1", "key")),
            home_path(str(shared), Owner(me().pid, me().started + 1, me().pid_namespace), 1),
        )
        assert Sweeper(shared).sweep_for(1.0)
        assert len(list(shared.iterdir())) == 1
        got = connector.get("0", "1", "key")
        assert got is not None
        assert intact(got[0])


@pytest.mark.attack("A7")
@squats
def test_what_is_no_file_is_no_hand_off(shared: Path, squat: Squat) -> None:
    squat(payload_path(str(shared), key_digest("", "0", "1", "key")))

    def get() -> str:
        with SharedMemoryConnector({"directory": str(shared)}) as connector:
            try:
                return str(connector.get("0", "1", "key", KEEP))
            except SerializationError as error:
                return str(error)

    assert "no hand-off" in as_ordinary_user(get)


@pytest.mark.attack("A16")
@pytest.mark.parametrize("kind", [SharedMemoryConnector, AutoConnector])
def test_the_names_of_the_next_segments_can_not_be_taken_before(
    shared: Path, kind: type[SharedMemoryConnector | AutoConnector]
) -> None:
    """Everybody sees a process id and its start time, and could count from there."""

    def store() -> str:
        with kind({"directory": str(shared), "shm_threshold_bytes": 0}) as connector:
            for number in range(50):
                Path(home_path(str(shared), me(), number)).mkdir()
            assert all(there_and_back(connector, f"key-{number}") for number in range(3))
            metadata = connector.put("0", "1", "key", payload(100_000))[2]
            assert metadata is not None
            return str(metadata["shm"])

    assert as_ordinary_user(store).startswith("omni-")


@pytest.mark.attack("A16")
@squats
def test_where_the_name_of_a_hand_off_is_taken_it_goes_over_the_network(shared: Path, squat: Squat) -> None:
    squat(payload_path(str(shared), key_digest("", "0", "1", "key")))

    def store() -> list[Any]:
        extra = {"directory": str(shared), "shm_threshold_bytes": 0}
        with AutoConnector(extra) as producer, AutoConnector(extra) as consumer:
            stored, _, metadata = producer.put("0", "1", "key", payload(100_000))
            assert stored, producer.last_error
            got = consumer.get("0", "1", "key", {**(metadata or {}), **KEEP})
            return [got is not None and intact(got[0]), consumer.health()["by_network"], there_and_back(producer, "2")]

    # Where the tests do not run as root, both are one user, who may replace all but the folder.
    taken = os.geteuid() == 0 or squat is folder
    assert as_ordinary_user(store) == [True, int(taken), True]


@pytest.mark.attack("A16")
def test_a_folder_that_can_not_be_written_to_counts_as_full(shared: Path) -> None:
    shared.chmod(0o555)

    def store() -> list[Any]:
        extra = {"directory": str(shared), "shm_threshold_bytes": 0}
        with AutoConnector(extra) as automatic, SharedMemoryConnector(extra) as memory:
            return [there_and_back(automatic), memory.put("0", "1", "key", payload(100_000))[0], memory.last_error]

    back, stored, error = as_ordinary_user(store)
    assert back is True
    assert stored is False
    assert "Permission denied" in error


@pytest.mark.attack("A16")
@pytest.mark.parametrize("over_network", [False, True])
def test_a_segments_name_that_is_taken_while_it_is_read_costs_nothing(shared: Path, over_network: bool) -> None:
    """Everybody saw it before the hand-off was published, and the consumer gives the segment that name again."""
    extra = {"directory": str(shared), "shm_threshold_bytes": 0}
    elsewhere = shared / "elsewhere"
    elsewhere.mkdir()
    with AutoConnector(extra) as producer:
        with AutoConnector({**extra, "directory": str(elsewhere)} if over_network else extra) as consumer:
            metadata = producer.put("0", "1", "key", payload(100_000))[2]
            assert metadata is not None
            (shared / f"omni-segment.{metadata['segment']}").mkdir()
            got = consumer.get("0", "1", "key", metadata)
            assert got is not None
            assert intact(got[0])
        del got
        assert there_and_back(producer, "next")
    assert sorted(path.name for path in shared.iterdir()) == ["elsewhere", f"omni-segment.{metadata['segment']}"]


@pytest.mark.attack("A16")
def test_a_block_whose_name_is_taken_takes_another(shared: Path) -> None:
    block = ShmBlock(str(shared), 1000)
    try:
        taken = block.path
        assert taken is not None
        block.publish(str(shared / "omni-published"))
        Path(taken).mkdir()
        assert block.hide()
        assert block.path not in (taken, None)
        assert block.path == str(shared / f"omni-segment.{block.id}")
    finally:
        block.drop()
    assert [str(path) for path in shared.iterdir()] == [taken]
