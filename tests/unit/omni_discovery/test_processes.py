"""What a process takes of its machine before it begins, and the folder in which it finds others of its user."""

from __future__ import annotations

import itertools
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_discovery import processes
from omni_discovery.errors import ConfigError
from omni_discovery.processes import (
    LEAST_FILES,
    OwnedFolder,
    check_parents,
    check_unshared,
    is_private,
    make_private,
    open_private,
    raise_descriptor_limit,
    reads_own_files,
    remove_orphaned,
)
from tests.support.other_user import NOBODY, require_root


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard, as the kernel would keep them."""
    kept = [64, LEAST_FILES]
    monkeypatch.setattr(processes.resource, "getrlimit", lambda _: tuple(kept))
    monkeypatch.setattr(processes.resource, "setrlimit", lambda _, both: kept.__setitem__(slice(2), list(both)))
    return kept


@pytest.mark.parametrize("hard", [LEAST_FILES, 100_000, resource.RLIM_INFINITY])
def test_all_the_files_that_are_allowed_are_taken(limits: list[int], hard: int) -> None:
    limits[1] = hard
    raise_descriptor_limit("a hub")
    assert limits == [hard, hard]


def test_too_few_are_refused_with_whom_how_many_and_what_to_do(limits: list[int]) -> None:
    limits[:] = [60, LEAST_FILES - 1]
    with pytest.raises(ConfigError, match=r"only 255 files .* a hub needs 256 at least; raise the hard limit"):
        raise_descriptor_limit("a hub")
    assert limits == [60, 255]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, "/nonexistent"),
        ("", "/nonexistent"),
        (":", "/nonexistent"),
        ("/opt/lib", "/opt/lib"),
        ("/opt/lib::/usr/local/lib:", "/opt/lib:/usr/local/lib"),
        (";lib;../lib:.:/opt/lib:$ORIGIN/lib", "/opt/lib:$ORIGIN/lib"),
    ],
)
def test_libraries_are_looked_for_in_no_current_folder(given: str | None, kept: str) -> None:
    environment = {} if given is None else {"LD_LIBRARY_PATH": given}
    assert reads_own_files(environment)["LD_LIBRARY_PATH"] == kept


def test_an_operators_own_settings_of_gnutls_are_kept() -> None:
    name = "GNUTLS_SYSTEM_PRIORITY_FILE"
    assert (reads_own_files({})[name], reads_own_files({name: "/etc/mine"})[name]) == ("/dev/null", "/etc/mine")


def test_a_private_folder_is_made_with_what_is_missing_above_it(tmp_path: Path) -> None:
    folder = tmp_path / "user" / "omni"
    assert not is_private(folder)
    with pytest.raises(FileNotFoundError):
        open_private(folder)
    make_private(folder)
    make_private(folder)
    assert is_private(folder)
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700, 0o700]


def test_a_folder_where_others_may_write_but_not_swap_may_be_above_it(tmp_path: Path) -> None:
    """As in the temporary folder of all users."""
    tmp_path.chmod(0o1777)
    make_private(tmp_path / "omni")
    check_parents(tmp_path)


@pytest.mark.attack("A21")
@pytest.mark.parametrize("above", [True, False])
def test_where_others_may_write_nothing_is_believed(tmp_path: Path, above: bool) -> None:
    folder = tmp_path / "user" / "omni"
    make_private(folder)
    changed = folder.parent if above else folder
    changed.chmod(0o777)
    assert not is_private(folder)
    with pytest.raises(ConfigError, match=f"others can write to {changed}.*set XDG_RUNTIME_DIR"):
        make_private(folder)
    with pytest.raises(ConfigError, match=f"others can write to {changed}"):
        check_parents(folder)


@pytest.mark.attack("A21")
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_what_another_user_made_first_is_refused_with_the_users_name(tmp_path: Path, above: bool, mode: int) -> None:
    require_root()
    folder = tmp_path / "user" / "omni"
    make_private(folder)
    changed = folder.parent if above else folder
    os.chown(changed, NOBODY, NOBODY)
    changed.chmod(mode)
    assert not is_private(folder)
    with pytest.raises(ConfigError, match=f"{changed} belongs to user 'nobody'.*set XDG_RUNTIME_DIR"):
        make_private(folder)


@pytest.mark.attack("A21")
def test_a_link_is_followed_only_if_it_is_ours_and_above(tmp_path: Path) -> None:
    require_root()
    ours, link = tmp_path / "ours", tmp_path / "link"
    make_private(ours / "omni")
    link.symlink_to(ours)
    assert is_private(link / "omni")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    assert not is_private(link / "omni")
    with pytest.raises(ConfigError, match=f"{link} is a link made by user 'nobody'"):
        make_private(link / "omni")
    (tmp_path / "omni").symlink_to(ours / "omni")
    with pytest.raises(ConfigError, match="is a link or no folder: remove it"):
        make_private(tmp_path / "omni")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a link or no folder: remove it"):
        make_private(tmp_path / "file")


@pytest.mark.attack("D1")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
@pytest.mark.parametrize("above", [True, False])
def test_a_folder_is_unshared_if_nobody_else_can_put_files_there(tmp_path: Path, mode: int, above: bool) -> None:
    """Above it, others may add files of theirs, as in the temporary folder, but not swap what is there."""
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    check_unshared(folder)
    changed = folder.parent if above else folder
    changed.chmod(mode)
    if above and mode == 0o1777:
        check_unshared(folder)
    else:
        with pytest.raises(ConfigError, match=f"others can write to {changed}$"):
            check_unshared(folder)


@pytest.mark.parametrize(
    ("group", "members", "is_unshared"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "other"], False), ("team", [], False)],
)
def test_a_group_of_one_user_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, members: list[str], is_unshared: bool
) -> None:
    """Many systems make a group for each user, and folders that it may write to."""
    gid = tmp_path.stat().st_gid
    user = SimpleNamespace(pw_name="me", pw_gid=gid)
    monkeypatch.setattr(processes.pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(processes.grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    tmp_path.chmod(0o775)
    if is_unshared:
        check_unshared(tmp_path)
    else:
        with pytest.raises(ConfigError, match="others can write to"):
            check_unshared(tmp_path)


def test_a_folder_of_another_user_is_not_unshared(tmp_path: Path) -> None:
    require_root()
    os.chown(tmp_path, NOBODY, -1)
    with pytest.raises(ConfigError, match="belongs to user"):
        check_unshared(tmp_path)


def test_a_folder_behind_a_link_of_another_user_is_not_unshared(tmp_path: Path) -> None:
    require_root()
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    check_unshared(tmp_path / "link")
    os.lchown(tmp_path / "link", NOBODY, -1)
    for folder in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(ConfigError, match=r"is a link made by user [^:]*$"):
            check_unshared(folder)


def test_an_owned_folder_is_removed_when_its_owner_and_its_forks_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. it stays while a process lives that was forked from its owner
    2. when that is killed, it goes; another user's of such a name stays
    """
    monkeypatch.setattr(processes, "_places", lambda: [str(tmp_path)])
    foreign = tmp_path / f"test-{os.getuid()}-foreign"
    foreign.mkdir()
    (foreign / "owner").touch()
    foreign.chmod(0o777)
    owned = OwnedFolder("test-", "s")
    child = os.fork()
    if not child:
        signal.pause()
    owned._lock.close()
    remove_orphaned("test-")
    assert owned.path.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    remove_orphaned("test-")
    assert not owned.path.exists()
    assert foreign.exists()
    owned.remove()


@pytest.mark.attack("H8")
def test_folders_of_others_with_such_names_are_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user makes them by the thousand; to open one takes as long as to ask for the owners of a hundred."""
    this_user = os.getuid()
    monkeypatch.setattr(processes, "_places", lambda: [str(tmp_path)])
    monkeypatch.setattr(processes.os, "getuid", lambda: this_user + 1)
    for number in range(100):
        (tmp_path / f"test-{this_user + 1}-{number}").mkdir()
    opened: list[Path] = []
    monkeypatch.setattr(processes, "open_private", opened.append)
    assert remove_orphaned("test-")
    assert opened == []
    assert len(list(tmp_path.iterdir())) == 100


@pytest.mark.attack("H8")
@pytest.mark.parametrize("name", ["test-{}-left", "others-{}"])
def test_what_could_not_be_looked_at_in_time_is_left_to_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """1. time runs out over what lies there, whatever its name: it stays, and the log says so
    2. the next call has the time for all
    """
    monkeypatch.setattr(processes, "_places", lambda: [str(tmp_path)])
    left = tmp_path / name.format(os.getuid())
    left.mkdir()
    (left / "owner").touch()
    assert not remove_orphaned("test-", itertools.count(0.0, 5.0).__next__)
    assert left.exists()
    assert f"folders.left prefix=test-: [Errno 110] not all of {tmp_path} was looked at within 3 s" in caplog.text
    assert remove_orphaned("test-")
    assert left.exists() == name.startswith("others")


def test_an_owned_folder_that_can_be_made_nowhere_says_why_for_each_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "white space").mkdir()
    places = [str(tmp_path / name) for name in ("open", "white space", "missing", "n" * 100)]
    (tmp_path / ("n" * 100)).mkdir()
    monkeypatch.setattr(processes, "_places", lambda: places)
    why = r"others can write to .*/open.*characters.*missing.*no socket can be made in .*nnn"
    with pytest.raises(ConfigError, match=why):
        OwnedFolder("test-", "s")
    assert [list(Path(place).iterdir()) for place in (places[0], places[1], places[3])] == [[], [], []]


@contextmanager
def descriptors_to_spare(count: int) -> Iterator[None]:
    """So many files more may be opened by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probes = [os.open("/dev/null", os.O_RDONLY) for _ in range(count + 1)]
    for each in probes:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probes[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.attack("D2")
@pytest.mark.parametrize("spare", range(6))
def test_what_is_left_for_want_of_descriptors_is_found_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """1. an orphan with files and folders in it; no call raises, however few descriptors there are
    2. what is left keeps its lock's file, so that the next call knows it for an orphan
    """
    monkeypatch.setattr(processes, "_places", lambda: [str(tmp_path)])
    owned = OwnedFolder("test-", "s")
    (owned.path / "below" / "further").mkdir(parents=True)
    (owned.path / "below" / "further" / "file").touch()
    (owned.path / "file").touch()
    (owned.path / "link").symlink_to(tmp_path)
    owned._lock.close()
    with descriptors_to_spare(spare):
        is_done = remove_orphaned("test-")
    assert is_done == (not owned.path.exists())
    assert is_done or (owned.path / "owner").exists()
    assert is_done or spare < 5
    assert not is_done or spare > 0
    assert remove_orphaned("test-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.attack("D2")
def test_a_folder_that_could_not_be_made_for_want_of_descriptors_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_places", lambda: [str(tmp_path)])
    with descriptors_to_spare(0), pytest.raises(OSError, match="Too many open files"):
        OwnedFolder("test-", "s")
    assert list(tmp_path.iterdir()) == []


def test_without_a_descriptor_the_places_beside_the_temporary_folder_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder is found by making a file in it."""
    monkeypatch.setattr(processes.tempfile, "tempdir", None)
    with descriptors_to_spare(0):
        assert not remove_orphaned("test-")
    assert remove_orphaned("test-")


def test_a_folder_that_the_operator_vouches_for_is_as_good_as_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod's volume, which is open to everybody; its sub-folders are not vouched for."""
    monkeypatch.setattr(processes, "_vouched_for", set())
    volume = tmp_path / "volume"
    (volume / "open").mkdir(parents=True)
    for folder in (volume, volume / "open"):
        folder.chmod(0o2777)
    for refused in (make_private, check_unshared):
        with pytest.raises(ConfigError, match="others can write"):
            refused(volume / "own" if refused is make_private else volume)
    processes.trust_folders(f":{volume}:")
    check_unshared(volume)
    check_parents(volume)
    make_private(volume / "own")
    assert is_private(volume / "own")
    with pytest.raises(ConfigError, match="others can write"):
        make_private(volume / "open" / "own")
    with pytest.raises(ConfigError, match="OMNI_TRUSTED_FOLDERS: tmp is no path from the root"):
        processes.trust_folders("/x:tmp")


def test_a_folder_of_somebody_else_is_not_made_good_by_vouching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_root()
    monkeypatch.setattr(processes, "_vouched_for", set())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    processes.trust_folders(str(theirs))
    with pytest.raises(ConfigError, match="belongs to"):
        make_private(theirs / "own")
