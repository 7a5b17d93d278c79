"""What a process takes of its machine before it begins, and the folder in which it finds others of its user."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_discovery import processes
from omni_discovery.errors import ConfigError
from omni_discovery.processes import (
    LEAST_FILES,
    check_parents,
    check_unshared,
    is_private,
    make_private,
    open_private,
    raise_descriptor_limit,
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
