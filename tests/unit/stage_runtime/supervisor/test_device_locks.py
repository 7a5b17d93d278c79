"""Two supervisors that want the same devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_discovery.errors import ConfigError
from stage_runtime.supervisor.device_locks import DeviceLocks, Holder

Make = Callable[..., DeviceLocks]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[DeviceLocks] = []

    def build(*devices: str, stage_id: int = 0, namespace: str = "default", pid: int = 1) -> DeviceLocks:
        made.append(DeviceLocks(tmp_path, devices, Holder(pid=pid, namespace=namespace, stage_id=stage_id)))
        return made[-1]

    yield build
    for locks in made:
        locks.close()


class _Clock:
    """Time passes by waiting only; ``on_wait`` is what happens meanwhile."""

    def __init__(self, on_wait: Callable[[float], None] = lambda now_s: None) -> None:
        self.now_s = 0.0
        self._on_wait = on_wait

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self._on_wait(self.now_s)


def test_the_second_is_told_who_has_it_after_a_short_wait(make: Make) -> None:
    make("0", "1", pid=4711).acquire()
    clock = _Clock()
    with pytest.raises(ConfigError) as refused:
        make("1", "2").acquire(clock, clock.sleep)
    told = "device 1 is in use by process 4711, which runs stage 0 of namespace 'default'; stop that, or give"
    assert told in str(refused.value)
    assert 0 < clock.now_s < 10
    make("2").acquire()


def test_another_namespace_is_refused_and_another_stage_of_the_same_document_is_not(make: Make) -> None:
    make("0").acquire()
    make("0", stage_id=1).acquire()
    clock = _Clock()
    with pytest.raises(ConfigError, match=r"runs stage \d of namespace 'default'"):
        make("0", stage_id=2, namespace="other").acquire(clock, clock.sleep)


def test_one_that_drains_is_waited_for(make: Make) -> None:
    """1. the first says that it is leaving, and takes a minute for it; 2. then the second has the device"""
    first = make("0")
    first.acquire()
    first.mark_leaving()
    clock = _Clock(lambda now_s: first.close() if now_s > 60 else None)
    make("0").acquire(clock, clock.sleep)
    assert clock.now_s > 60


def test_who_is_gone_holds_nothing_and_leaves_no_file_for_long(make: Make, tmp_path: Path) -> None:
    first = make("0", namespace="old")
    first.acquire()
    first.close()
    make("0").acquire()
    assert [path.name for path in (tmp_path / "devices").iterdir()] == ["0@default@0"]


def test_devices_with_strange_names_have_files_of_their_own(make: Make, tmp_path: Path) -> None:
    make("MIG-GPU-1/2/3", "1").acquire()
    make("11").acquire()
    assert len(list((tmp_path / "devices").iterdir())) == 3


def test_without_devices_nothing_is_touched(make: Make, tmp_path: Path) -> None:
    make().acquire()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_write_to_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices").chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to"):
        make("0").acquire()


def test_a_folder_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        DeviceLocks(tmp_path / "file", ("0",), Holder(pid=1, namespace="n", stage_id=0)).acquire()
