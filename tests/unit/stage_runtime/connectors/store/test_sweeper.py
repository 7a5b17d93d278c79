"""The sweep of shared memory: other users may put any number of names there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stage_runtime.connectors import SharedMemoryConnector
from stage_runtime.connectors.store import layout
from stage_runtime.connectors.store.layout import Owner, Sweeper, home_path, me
from stage_runtime.connectors.store.shm_blocks import KEPT_FROM_BYTES
from stage_runtime.connectors.store.store import Limits, Store


class SteppingClock:
    """Seconds that pass with each look at the clock."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def leave_files(folder: Path, count: int) -> None:
    """Files of a process that has ended."""
    dead = Owner(me().pid, me().started + 1, me().pid_namespace)
    for number in range(count):
        Path(home_path(str(folder), dead, number)).touch()


def count_of(folder: Path) -> int:
    return len(list(folder.iterdir()))


@pytest.mark.attack("Z19")
def test_a_folder_is_swept_in_slices_of_time_that_follow_each_other(tmp_path: Path) -> None:
    """Each begins where the last one ended, so that names in front never hide what is behind them."""
    leave_files(tmp_path, 20)
    sweeper = Sweeper(tmp_path, SteppingClock(1.0))
    ended = []
    while not ended or not ended[-1]:
        ended.append(sweeper.sweep_for(5.0))
        assert count_of(tmp_path) == max(0, 20 - 5 * len(ended))
    assert ended == [False, False, False, False, True]
    leave_files(tmp_path, 1)
    assert sweeper.sweep_for(5.0)
    assert count_of(tmp_path) == 0


@pytest.mark.attack("Z19")
def test_names_of_others_are_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_files(tmp_path, 20)
    opened: list[str] = []
    monkeypatch.setattr(layout, "open_own_file", lambda path, _folder: opened.append(path))
    this_user = os.geteuid()
    monkeypatch.setattr(layout.os, "geteuid", lambda: this_user + 1)
    assert Sweeper(tmp_path).sweep_for(5.0)
    assert opened == []
    assert count_of(tmp_path) == 20


@pytest.mark.attack("Z19")
def test_a_store_sweeps_a_short_while_and_goes_on_a_second_later(tmp_path: Path) -> None:
    """1. at its start, for a second
    2. then 5 ms between two hand-offs, in the engine's thread, and not at each of them
    """
    leave_files(tmp_path, 150)
    clock = SteppingClock(0.01)
    store = Store("", tmp_path, Limits(1 << 20, 1 << 20, 60.0), in_memory=False, clock=clock)
    left = count_of(tmp_path)
    assert 45 <= left <= 55
    store.tidy()
    assert count_of(tmp_path) == left
    clock.now_s += 1.0
    store.tidy()
    store.tidy()
    assert count_of(tmp_path) == left - 1
    clock.now_s += 1.0
    clock.step_s = 0.0
    store.tidy()
    assert count_of(tmp_path) == 0
    store.close()


@pytest.mark.attack("Z19")
def test_free_blocks_are_released_in_time_however_long_the_sweep_takes(tmp_path: Path) -> None:
    """1. a hand-off is dropped, and its block kept for the next; so many names lie there that no sweep ends
    2. two minutes later the block is released
    """
    leave_files(tmp_path, 400)
    clock = SteppingClock(0.01)
    store = Store("", tmp_path, Limits(1 << 20, 1 << 20, 60.0), in_memory=False, clock=clock)
    store.put(("0", "1", "key"), [bytes(KEPT_FROM_BYTES)], KEPT_FROM_BYTES)
    store.cleanup("key")
    kept_bytes = []
    for _ in range(3):
        kept_bytes.append(store.counts()["pool_free_bytes"])
        clock.now_s += 60.0
        store.tidy()
    assert kept_bytes[0] == kept_bytes[1] >= KEPT_FROM_BYTES
    assert kept_bytes[2] == 0
    # The sweep is still at it.
    assert count_of(tmp_path) > 100
    store.close()


@pytest.mark.attack("Z19")
def test_a_closed_store_holds_no_part_of_a_folder(tmp_path: Path) -> None:
    leave_files(tmp_path, 9)
    before = count_of(Path("/proc/self/fd"))
    sweeper = Sweeper(tmp_path, SteppingClock(1.0))
    assert not sweeper.sweep_for(5.0)
    sweeper.close()
    assert sweeper.sweep_for(5.0)
    assert count_of(Path("/proc/self/fd")) == before
    assert count_of(tmp_path) == 4


@pytest.mark.attack("Z19")
def test_a_sweep_that_takes_too_many_slices_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_files(tmp_path, 70)
    sweeper = Sweeper(tmp_path, SteppingClock(1.0))
    while not sweeper.sweep_for(1.0):
        pass
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warned] == [
        f"shm.sweep_late folder={tmp_path} names=60: too many names lie there to go through them in time, and what "
        "ended processes left stays meanwhile; ls -l says whose they are: have that user remove them"
    ]


def test_what_a_burst_has_left_goes_although_no_large_hand_off_comes(tmp_path: Path) -> None:
    """1. a large hand-off is dropped, and its block kept for the next; 2. small ones follow, which lie in no block"""
    connector = SharedMemoryConnector({"directory": str(tmp_path), "shm_threshold_bytes": 1000, "by_key": False})
    clock = SteppingClock(0.01)
    connector._store._clock, connector._store._shrink_at_s = clock, 60.0
    connector.put("0", "1", "large", bytes(KEPT_FROM_BYTES))
    connector.cleanup("large")
    assert connector.health()["pool_free_bytes"] >= KEPT_FROM_BYTES
    for _ in range(3):
        clock.now_s += 61.0
        metadata = connector.put("0", "1", "small", b"x")[2]
        assert metadata is not None
        assert connector.is_inline(metadata)
    assert connector.health()["pool_free_bytes"] == 0
    connector.close()
