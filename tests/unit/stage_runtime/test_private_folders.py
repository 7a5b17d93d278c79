"""The temporary folder of one process, and where it keeps compiled code."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery import processes
from omni_discovery.errors import ConfigError, OmniError
from stage_runtime import private_folders as module
from stage_runtime.private_folders import private_folders, remove_left_folders
from tests.support.other_user import NOBODY, require_root

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
#: Those that are in the user's cache by default.
IN_CACHE = {"VLLM_CACHE_ROOT": "vllm", "TORCH_EXTENSIONS_DIR": "torch_extensions"}
FLASHINFER = "FLASHINFER_WORKSPACE_BASE"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as /tmp is, named by TMPDIR."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        for variable in (*CACHES, *IN_CACHE, FLASHINFER):
            monkeypatch.delenv(variable, raising=False)
        yield folder


@pytest.mark.attack("E10")
def test_a_process_has_a_folder_that_only_its_user_enters_and_it_goes_with_it(shared: Path, tmp_path: Path) -> None:
    before = dict(os.environ)
    with private_folders(os.environ):
        folder = Path(tempfile.gettempdir())
        assert folder.parent == shared
        assert os.environ["TMPDIR"] == str(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        names = [tmp_path / "cache" / "omni" / name for name in ("torchinductor", "triton")]
        assert [os.environ[variable] for variable in CACHES] == list(map(str, names))
        assert [stat.S_IMODE(name.stat().st_mode) for name in names] == [0o700, 0o700]
        remove_left_folders()
        assert folder.exists()
    assert not folder.exists()
    assert dict(os.environ) == before
    assert tempfile.gettempdir() == str(shared)


def test_a_folder_of_the_operators_own_stays_and_so_do_the_caches_he_names(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shared / "own"
    own.mkdir(0o700)
    monkeypatch.setenv("TMPDIR", str(own))
    for variable in CACHES:
        monkeypatch.setenv(variable, str(tmp_path / variable))
    before = dict(os.environ)
    with private_folders(os.environ):
        assert dict(os.environ) == before
        assert tempfile.gettempdir() == str(own)
    assert list(own.iterdir()) == []


def test_a_folder_that_others_write_to_is_none_of_the_operators_own(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = shared / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(open_to_all))
    with private_folders(os.environ):
        folder = Path(tempfile.gettempdir())
        assert open_to_all not in folder.parents
        assert folder.name.startswith("omni-tmp-")


def test_a_cache_that_others_write_to_is_not_used(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with private_folders(os.environ):
        for variable in CACHES:
            assert Path(os.environ[variable]).parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with private_folders(os.environ):
        assert Path(os.environ[CACHES[0]]).parent == Path(tempfile.gettempdir())


def test_a_path_too_long_for_vllms_sockets_is_not_used(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = shared / ("n" * 80)
    long.mkdir()
    long.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(long))
    with private_folders(os.environ):
        folder = Path(tempfile.gettempdir())
        assert long not in folder.parents
        assert len(str(folder / module._SOCKET_NAME)) <= 107


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOSPC])
def test_a_shortage_is_no_wrong_configuration(shared: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A supervisor would not try a wrong configuration again for a while, and a hub never."""

    def fail(**_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(processes.tempfile, "mkdtemp", fail)
    with pytest.raises(OmniError, match=os.strerror(number)) as raised, private_folders(os.environ):
        pass
    assert not isinstance(raised.value, ConfigError)
    assert os.environ["TMPDIR"] == str(shared)


def test_caches_in_a_folder_of_the_users_own_stay_where_they_are(shared: Path, tmp_path: Path) -> None:
    """Also one that was made before and is read-only, as in an image; and nothing is made for those not in use."""
    (tmp_path / "cache" / "vllm").mkdir(parents=True)
    (tmp_path / "cache" / "vllm").chmod(0o555)
    with private_folders(os.environ):
        assert not {*IN_CACHE, FLASHINFER} & set(os.environ)
    assert {each.name for each in (tmp_path / "cache").iterdir()} == {"omni", "vllm"}


@pytest.mark.attack("E10")
@pytest.mark.parametrize("planted", [False, True])
def test_below_a_home_that_others_write_to_no_cache_is_loaded(
    shared: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """HOME=/tmp, as in containers without users: others can be first there, or were."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(shared))
    if planted:
        require_root()
        for path in (shared / ".cache", *(shared / ".cache" / name for name in (*IN_CACHE.values(), "flashinfer"))):
            path.mkdir()
            os.chown(path, NOBODY, -1)
    with private_folders(os.environ):
        own = Path(tempfile.gettempdir())
        used = {each: Path(os.environ[each]).parent for each in (*CACHES, *IN_CACHE, FLASHINFER) if each in os.environ}
        # What is not set is below a folder that was made for the first two, and is the user's.
        assert used == dict.fromkeys((*CACHES, *IN_CACHE, FLASHINFER), own) if planted else set(used) == set(CACHES)
        assert planted or (shared / ".cache").stat().st_mode & 0o022 == 0


@pytest.mark.attack("E10")
def test_a_link_that_another_user_can_point_elsewhere_leads_to_no_cache(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_root()
    (tmp_path / "private").mkdir()
    (shared / "link").symlink_to(tmp_path / "private")
    os.lchown(shared / "link", NOBODY, -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "link"))
    with private_folders(os.environ):
        for variable in (*CACHES, *IN_CACHE):
            assert Path(os.environ[variable]).parent == Path(tempfile.gettempdir())


def test_without_a_home_nothing_is_loaded_from_the_folder_it_was_started_in(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with private_folders(os.environ):
        for variable in (*CACHES, *IN_CACHE, FLASHINFER):
            assert Path(os.environ[variable]).parent == Path(tempfile.gettempdir())
