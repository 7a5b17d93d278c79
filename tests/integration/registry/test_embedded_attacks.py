"""Attacks on the embedded etcd: by another user of the machine, by web pages, and by folders made first."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.etcd.config import socket_path
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.etcd.embedded_file import read_embedded, write_endpoint
from omni_discovery.etcd.http import get_text
from omni_discovery.records.keys import pipeline_key
from tests.support.hub import ECHO_PAIR
from tests.support.other_user import NOBODY, as_ordinary_user, require_root
from tests.support.processes import Child
from tests.support.registry import etcdctl

#: As a web page asks for all keys, without a preflight.
RANGE = b'{"key": "AA==", "range_end": "AA=="}'


@pytest.fixture(scope="module", autouse=True)
def _two_users() -> None:
    require_root()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as etcd:
        yield etcd


@pytest.fixture
def announced(etcd: EmbeddedEtcd) -> Iterator[Path]:
    """The folder in which it is announced, where others may look for it."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    write_endpoint(place / "omni", "default", etcd.endpoint)
    yield place / "omni"
    shutil.rmtree(place)


def open_ports(pid: int) -> list[str]:
    """The TCP ports on which a process listens, of both families, with the addresses as the kernel writes them."""
    files = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in files]


def reach(endpoint: str) -> list[str]:
    """What this process can do with an etcd whose paths it knows: the names of the attempts that succeed."""
    folder = Path(socket_path(endpoint)).parent
    succeeded = []

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError:
            return
        succeeded.append(name)

    def connect(name: str) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / name))

    attempt("list the folder", lambda: list(folder.iterdir()))
    attempt("read its log", (folder / "etcd.log").read_bytes)
    attempt("read its data", (folder / "data/member/snap/db").read_bytes)
    attempt("connect as a client", lambda: connect("etcd:2379"))
    attempt("connect as a peer", lambda: connect("etcd:2380"))
    attempt("ask in HTTP", lambda: get_text(endpoint, "/health"))
    return succeeded


@pytest.mark.attack("A1", "A2")
def test_it_listens_on_no_port_of_any_network(etcd: EmbeddedEtcd) -> None:
    assert open_ports(etcd.pid) == []


@pytest.mark.attack("A1", "A2")
def test_another_user_who_knows_everything_reaches_no_socket_and_no_file(etcd: EmbeddedEtcd) -> None:
    """1. this user writes a pipeline; 2. another one, who knows all paths, gets nowhere; 3. this user does"""
    etcdctl(etcd.endpoint, "put", pipeline_key("default"), "ours")
    assert as_ordinary_user(lambda: reach(etcd.endpoint)) == []
    assert len(reach(etcd.endpoint)) == 6


@pytest.mark.attack("A1", "A2")
def test_another_user_can_not_swap_its_folder_or_its_endpoint(etcd: EmbeddedEtcd, announced: Path) -> None:
    def swap() -> list[str]:
        moved = []
        for place in (Path(socket_path(etcd.endpoint)).parent, announced / "default.etcd.json", announced):
            try:
                place.rename(place.with_name("mine"))
            except OSError:
                continue
            moved.append(str(place))
        return moved

    assert as_ordinary_user(swap) == []
    assert as_ordinary_user(lambda: read_embedded(announced, "default") is None)
    found = read_embedded(announced, "default")
    assert found is not None
    assert found.endpoint == etcd.endpoint


@pytest.mark.attack("A20")
@pytest.mark.parametrize(
    ("host", "path", "status"),
    [("evil.example", "/v3/kv/range", 421), ("evil.example", "/health", 421), ("localhost", "/v3/kv/range", 404)],
)
def test_a_web_page_that_something_lets_through_to_the_socket_is_refused(
    etcd: EmbeddedEtcd, host: str, path: str, status: int
) -> None:
    """No browser reaches a socket; what an operator forwards to it still serves no page of another site."""
    asked = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: https://evil.example\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {len(RANGE)}\r\nConnection: close\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30.0)
        client.connect(socket_path(etcd.endpoint))
        client.sendall(asked.encode() + RANGE)
        answer = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert "access-control-allow-origin" not in answer.lower()


@pytest.mark.attack("A21")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_a_hub_whose_runtime_folder_lies_in_another_users_says_so_and_ends(tmp_path: Path, mode: int) -> None:
    """1. another user was first, with a folder of any mode and a false endpoint in it; 2. a hub starts"""
    theirs = tmp_path / "theirs"
    false = write_endpoint(theirs / "omni", "test", "unix:///tmp/evil/etcd:2379")
    for each in (theirs, theirs / "omni", false):
        os.chown(each, NOBODY, NOBODY)
    theirs.chmod(mode)
    assert read_embedded(theirs / "omni", "test") is None
    (tmp_path / "deploy.yaml").write_text(ECHO_PAIR)
    arguments = ["serve", "--port", "0", "--namespace", "test", "--deploy-config", str(tmp_path / "deploy.yaml")]
    hub = Child(arguments, tmp_path, runtime_dir=theirs)
    try:
        assert hub.process.wait(60.0) == 2
    finally:
        hub.stop()
    last = hub.text.strip().splitlines()[-1]
    assert f"omni: {theirs} belongs to user" in last
    assert "set XDG_RUNTIME_DIR to a folder of your own" in last
    assert "Traceback" not in hub.text


def test_a_temporary_folder_with_a_long_path_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has 107 bytes at most."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with EmbeddedEtcd() as etcd:
        assert len(socket_path(etcd.endpoint)) <= 107
        etcdctl(etcd.endpoint, "put", "k", "v")


@pytest.mark.attack("A21")
def test_what_others_put_beside_its_folder_neither_stops_it_nor_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. another user makes a folder with our name for one, and a pipe where we look for its owner"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    bait = tmp_path / f"omni-etcd-{os.getuid()}-bait"
    bait.mkdir(mode=0o777)
    os.mkfifo(bait / "owner", 0o666)
    os.chown(bait, NOBODY, NOBODY)
    with EmbeddedEtcd() as etcd:
        assert etcd.endpoint.startswith(f"unix://{tmp_path}/")
        assert bait.exists()
