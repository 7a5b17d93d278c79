"""The folder of the job store: modes, names, links, and what is removed from it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hub.jobs.cipher import JobKeys, job_key_of
from hub.jobs.errors import JobFileError
from hub.jobs.folder import REQUEST, JobFolder, video_of
from omni_discovery.errors import ConfigError

KEYS = JobKeys((job_key_of(b"\1" * 32), job_key_of(b"\2" * 32)))
ID, OTHER = f"video_{1:032x}", f"video_{2:032x}"


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "store", "team-a", KEYS)


def files_in(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "store" / "team-a").iterdir()}


def test_what_was_written_is_read_by_another_hub_with_the_same_keys(folder: JobFolder, tmp_path: Path) -> None:
    folder.write_file(ID, REQUEST, folder.secret, b"a prompt")
    again = JobFolder(tmp_path / "store", "team-a", JobKeys((job_key_of(b"\2" * 32), job_key_of(b"\1" * 32))))
    assert again.read_file(ID, REQUEST, folder.secret) == b"a prompt"
    length, pieces = again.open_file(ID, REQUEST, folder.secret)
    assert (length, b"".join(pieces)) == (8, b"a prompt")


@pytest.mark.attack("H21")
def test_files_are_for_their_user_alone_and_hold_nothing_readable(folder: JobFolder, tmp_path: Path) -> None:
    folder.write_file(ID, REQUEST, folder.secret, b"a cat in the rain")
    path = tmp_path / "store" / "team-a" / f"{ID}.request"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert b"rain" not in path.read_bytes()


@pytest.mark.attack("H21")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775], ids=oct)
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    inner = tmp_path / "store" / "team-a"
    inner.mkdir(parents=True)
    if mode == 0o775:
        os.chown(inner, -1, 65534)
    inner.chmod(mode)
    with pytest.raises(ConfigError, match="--job-store: others can write to"):
        JobFolder(tmp_path / "store", "team-a", KEYS)


def test_a_folder_that_can_not_be_made_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: Not a directory"):
        JobFolder(tmp_path / "file", "team-a", KEYS)


@pytest.mark.attack("H21")
@pytest.mark.parametrize("job_id", ["../../etc/passwd", "", f"{ID}/..", f"{ID}\0", ID.upper()])
def test_an_id_that_is_none_leads_nowhere(folder: JobFolder, job_id: str) -> None:
    with pytest.raises(JobFileError):
        folder.open_file(job_id, REQUEST, folder.secret)
    with pytest.raises(JobFileError):
        folder.write_file(job_id, REQUEST, folder.secret, b"")


@pytest.mark.attack("H21")
def test_links_pipes_and_huge_files_are_not_read(folder: JobFolder, tmp_path: Path) -> None:
    place = tmp_path / "store" / "team-a" / f"{ID}.request"
    folder.write_file(OTHER, REQUEST, folder.secret, b"x")
    place.symlink_to(place.with_name(f"{OTHER}.request"))
    with pytest.raises(JobFileError, match="can't be read"):
        folder.open_file(ID, REQUEST, folder.secret)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(JobFileError, match="none that a hub has written"):
        folder.open_file(ID, REQUEST, folder.secret)
    place.unlink()
    with place.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(JobFileError, match="none that a hub has written"):
        folder.open_file(ID, REQUEST, folder.secret)


@pytest.mark.attack("H21")
def test_a_file_of_another_job_or_claim_is_not_taken_for_this_ones(folder: JobFolder, tmp_path: Path) -> None:
    folder.write_file(ID, video_of(1), folder.secret, b"mine")
    inner = tmp_path / "store" / "team-a"
    for other in (f"{OTHER}.1.video", f"{ID}.2.video"):
        (inner / other).write_bytes((inner / f"{ID}.1.video").read_bytes())
    for job_id, claim in ((OTHER, 1), (ID, 2)):
        with pytest.raises(JobFileError, match="changed, or moved"):
            folder.read_file(job_id, video_of(claim), folder.secret)


def test_what_is_too_long_is_refused_and_leaves_nothing(folder: JobFolder, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="more than a job may have"):
        folder.write_file(ID, REQUEST, folder.secret, bytes(17 << 20))
    assert files_in(tmp_path) == set()


def test_a_job_goes_with_all_its_files_and_orphans_once_they_are_old(folder: JobFolder, tmp_path: Path) -> None:
    """1. of two jobs one is removed; files that no hub has written stay
    2. what lies there of unknown jobs stays while it is young, such as a file whose record is about to be written
    """
    inner = tmp_path / "store" / "team-a"
    for job_id in (ID, OTHER):
        for part in (REQUEST, video_of(1), video_of(2)):
            folder.write_file(job_id, part, folder.secret, b"x")
    (inner / "readme.txt").touch()
    (inner / f".{ID}.request.tmp_1").touch()
    folder.remove_files(ID)
    kept = {f"{OTHER}.request", f"{OTHER}.1.video", f"{OTHER}.2.video", "readme.txt"}
    assert files_in(tmp_path) == kept
    assert folder.remove_orphans(()) == 0
    for path in inner.iterdir():
        os.utime(path, (1.0, 1.0))
    assert folder.remove_orphans({OTHER}) == 0
    assert folder.remove_orphans(()) == 3
    assert files_in(tmp_path) == {"readme.txt"}
