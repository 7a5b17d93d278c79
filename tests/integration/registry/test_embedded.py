"""The embedded etcd as a child process: it starts, it serves this machine, and it never outlives its owner."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_discovery.errors import EmbeddedEtcdError
from omni_discovery.etcd.embedded import EmbeddedEtcd, find_binary
from tests.support.processes import wait_for
from tests.support.registry import etcdctl

ROOT = Path(__file__).resolve().parents[3]

OWNER = """
import sys, threading, time
from omni_discovery.etcd.embedded import EmbeddedEtcd
etcd = EmbeddedEtcd()
# The thread that starts it ends at once; etcd must not end with it.
starter = threading.Thread(target=etcd.start)
starter.start()
starter.join()
print(etcd.endpoint, etcd.pid, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def owner_of_an_etcd() -> tuple[subprocess.Popen[str], str, int]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as said:
        endpoint, pid = said.readline().split()
    return owner, endpoint, int(pid)


def test_it_answers_and_leaves_nothing_behind() -> None:
    threads_before = set(threading.enumerate())
    etcd = EmbeddedEtcd()
    endpoint = etcd.start()
    assert endpoint == etcd.endpoint
    etcdctl(endpoint, "put", "k", "v")
    assert etcdctl(endpoint, "get", "k").split() == ["k", "v"]
    pid = etcd.pid
    folder = Path(f"/proc/{pid}/cwd").readlink()
    assert folder.exists()
    etcd.stop()
    etcd.stop()
    assert not is_running(pid)
    assert not folder.exists()
    assert set(threading.enumerate()) <= threads_before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_owner_however_that_dies(number: signal.Signals) -> None:
    owner, endpoint, pid = owner_of_an_etcd()
    assert is_running(pid)
    etcdctl(endpoint, "get", "k")
    owner.send_signal(number)
    owner.wait(10.0)
    wait_for("etcd to die", lambda: not is_running(pid), timeout_s=4.0)


def test_what_a_killed_owner_left_on_disk_is_removed_by_the_next() -> None:
    owner, _, pid = owner_of_an_etcd()
    folder = Path(f"/proc/{pid}/cwd").readlink()
    owner.kill()
    owner.wait(10.0)
    wait_for("etcd to die", lambda: not is_running(pid), timeout_s=4.0)
    assert folder.exists()
    with EmbeddedEtcd():
        assert not folder.exists()


def test_ctrl_c_in_the_terminal_is_not_for_it() -> None:
    with EmbeddedEtcd() as etcd:
        assert os.getpgid(etcd.pid) != os.getpgid(0)


def test_many_that_start_at_once_all_get_ports() -> None:
    with ThreadPoolExecutor(6) as pool:
        etcds = [EmbeddedEtcd() for _ in range(6)]
        try:
            assert len(set(pool.map(lambda etcd: etcd.start(), etcds))) == 6
        finally:
            list(pool.map(lambda etcd: etcd.stop(), etcds))


def test_a_binary_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedEtcdError, match="no-etcd"):
        EmbeddedEtcd(binary=tmp_path / "no-etcd").start()


def test_a_binary_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(EmbeddedEtcdError, match="out of luck"):
        EmbeddedEtcd(binary=broken).start()


def test_without_the_wheel_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedEtcdError, match=r"omni-discovery\[embedded\]"):
        find_binary(None)


def test_starting_twice_is_refused() -> None:
    with EmbeddedEtcd() as etcd, pytest.raises(EmbeddedEtcdError, match="already"):
        etcd.start()


@pytest.mark.attack("O10")
def test_whose_folder_has_gone_says_so_once_and_goes_on_once_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    """1. the folder is removed, as by something that cleans /tmp, and etcd ends: it can't be started
    2. it is tried again, the later the more often, and the log has one line
    3. the folder is made again: etcd is, too
    """
    tries: list[float] = []
    with EmbeddedEtcd() as etcd:
        spawn = etcd._spawn

        def counted(binary: Path, folder: Path) -> subprocess.Popen[bytes]:
            tries.append(time.monotonic())
            return spawn(binary, folder)

        etcd._spawn = counted  # type: ignore[method-assign]
        folder = Path(f"/proc/{etcd.pid}/cwd").readlink()
        shutil.rmtree(folder)
        os.kill(etcd.pid, signal.SIGKILL)
        wait_for("no third try", lambda: len(tries) == 3)
        folder.mkdir(mode=0o700)
        wait_for("no etcd", lambda: etcd.pid)
        wait_for("no line", lambda: len(events_in(caplog)) == 2)
    assert events_in(caplog) == ["embedded_etcd.not_restarted", "embedded_etcd.restarting"]
    # Each pause is twice the last; half a second each, it would be tried on for ever.
    assert tries[2] - tries[1] >= 1.9


def events_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    return [line.split()[0] for line in lines if line.startswith("embedded_etcd.")]
