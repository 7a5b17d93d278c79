"""How other commands of one user find the embedded etcd of a hub."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from omni_discovery.errors import ConfigError
from omni_discovery.etcd.embedded_file import (
    embedded_among,
    embedded_namespaces,
    read_embedded,
    remove_endpoint,
    write_endpoint,
)
from omni_discovery.processes import process_mark, runtime_dir
from tests.support.other_user import require_root


def test_what_a_living_process_wrote_is_found_until_it_takes_it_back(tmp_path: Path) -> None:
    file = write_endpoint(tmp_path, "default", "127.0.0.1:1")
    found = read_embedded(tmp_path, "default")
    assert found is not None
    assert (found.endpoint, found.pid) == ("127.0.0.1:1", os.getpid())
    assert file.stat().st_mode & 0o777 == 0o600
    remove_endpoint(tmp_path, "default")
    assert read_embedded(tmp_path, "default") is None
    remove_endpoint(tmp_path, "default")


def test_endpoints_that_mean_the_embedded_etcd_are_told_from_others(tmp_path: Path) -> None:
    write_endpoint(tmp_path, "a", "127.0.0.1:1")
    assert embedded_among(tmp_path, "a", "127.0.0.1:1") == "127.0.0.1:1"
    assert embedded_among(tmp_path, "a", "127.0.0.1:2") == ""
    assert embedded_among(tmp_path, "b", "127.0.0.1:1") == ""


def test_namespaces_have_files_of_their_own(tmp_path: Path) -> None:
    write_endpoint(tmp_path, "a", "127.0.0.1:1")
    assert read_embedded(tmp_path, "b") is None


def test_the_file_of_a_dead_process_and_a_damaged_one_count_as_none(tmp_path: Path) -> None:
    file = write_endpoint(tmp_path, "default", "127.0.0.1:1")
    file.write_text('{"endpoint": "127.0.0.1:1", "pid": 4194305}')
    assert read_embedded(tmp_path, "default") is None
    file.write_text("{")
    assert read_embedded(tmp_path, "default") is None
    remove_endpoint(tmp_path, "default")
    assert file.exists()


def test_who_killed_the_owner_takes_its_file_back_and_no_others(tmp_path: Path) -> None:
    file = write_endpoint(tmp_path, "default", "127.0.0.1:1")
    remove_endpoint(tmp_path, "default", pid=os.getpid() + 1)
    assert file.exists()
    file.write_text('{"endpoint": "127.0.0.1:1", "pid": 4194305}')
    remove_endpoint(tmp_path, "default", pid=4194305)
    assert not file.exists()


def test_a_namespace_can_not_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_endpoint(tmp_path, "../x", "127.0.0.1:1")


def test_the_folder_is_the_users_own() -> None:
    assert runtime_dir("/run/user/7") == Path("/run/user/7/omni")
    assert str(os.getuid()) in str(runtime_dir(None))


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_others_can_write_to_is_neither_believed_nor_written_to(tmp_path: Path, link: bool) -> None:
    """1. another user was first in the temporary folder, and left an endpoint of his own there
    2. his etcd is not taken for ours, and ours is not announced there, where he could put a link in the way
    """
    folder = tmp_path / "omni"
    write_endpoint(folder, "default", "127.0.0.1:1")
    if link:
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "omni")
    else:
        folder.chmod(0o777)
    assert read_embedded(folder, "default") is None
    with pytest.raises(ConfigError, match="is a link" if link else "others can write"):
        write_endpoint(folder, "default", "127.0.0.1:2")


def test_the_namespaces_of_a_folder_are_those_whose_etcd_runs(tmp_path: Path) -> None:
    """And none of a folder that others can write to."""
    folder = tmp_path / "omni"
    assert embedded_namespaces(folder) == []
    for name in ("b", "a", "gone"):
        write_endpoint(folder, name, "127.0.0.1:1")
    (folder / "gone.etcd.json").write_text('{"endpoint": "127.0.0.1:1", "pid": 4194305}')
    (folder / "half.etcd.json").write_text("{")
    assert embedded_namespaces(folder) == ["a", "b"]
    folder.chmod(0o777)
    assert embedded_namespaces(folder) == []


@pytest.mark.attack("Z62")
@pytest.mark.parametrize("mark", ["", "another/1/2/3"], ids=["of an earlier release", "of a process that has ended"])
def test_the_file_of_a_process_whose_id_another_one_has_counts_as_none(tmp_path: Path, mark: str) -> None:
    """Another user's, which may have made a socket of that name, too; or, if it is not said which, any of another's."""
    require_root()
    file = write_endpoint(tmp_path, "default", "127.0.0.1:1")
    stranger = subprocess.Popen(["sleep", "60"], user=65534, group=65534, extra_groups=[])
    try:
        pid = stranger.pid if not mark else os.getpid()
        file.write_text(json.dumps({"endpoint": "127.0.0.1:1", "pid": pid, "process": mark}))
        assert read_embedded(tmp_path, "default") is None
        file.write_text(json.dumps({"endpoint": "127.0.0.1:1", "pid": os.getpid()}))
        assert read_embedded(tmp_path, "default") is not None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.attack("Z62")
def test_the_file_of_another_container_counts_by_the_owner_of_its_socket(tmp_path: Path) -> None:
    """Its processes have other ids there. One that is left from before this machine was started counts as none."""
    require_root()
    boot, _, rest = process_mark(os.getpid()).partition("/")
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    file = write_endpoint(tmp_path, "default", "127.0.0.1:1")
    written = {"endpoint": f"unix://{sockets}/etcd:2379", "pid": 1, "process": f"{boot}/1/1/1"}
    for told, is_found in ((written, True), (written | {"process": f"{boot[::-1]}/{rest}"}, False)):
        file.write_text(json.dumps(told))
        assert (read_embedded(tmp_path, "default") is not None) is is_found
    file.write_text(json.dumps(written))
    os.chown(sockets, 65534, 65534)
    assert read_embedded(tmp_path, "default") is None
    file.write_text(json.dumps(written | {"endpoint": "127.0.0.1:1"}))
    assert read_embedded(tmp_path, "default") is None
