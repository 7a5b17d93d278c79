"""The folder of the job store: modes, names, links, and what is removed from it."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub.jobs.cipher import JobKeys, job_key_of
from hub.jobs.errors import JobFileError, JobStoreUnavailableError
from hub.jobs.files import REQUEST, JobFiles, error_of_claim, video_of
from hub.jobs.folder import JobFolder
from omni_discovery.errors import ConfigError
from tests.support.filming import record_of

KEYS = JobKeys((job_key_of(b"\1" * 32), job_key_of(b"\2" * 32)))
ID, OTHER = f"video_{1:032x}", f"video_{2:032x}"
JOB, OTHER_JOB = (record_of(job_id, KEYS) for job_id in (ID, OTHER))


@pytest.fixture
def folder(tmp_path: Path) -> JobFiles:
    return files_of(tmp_path)


def files_of(tmp_path: Path, keys: JobKeys = KEYS) -> JobFiles:
    return JobFiles(JobFolder(tmp_path / "store", "team-a"), "team-a", keys)


def files_in(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "store" / "team-a").iterdir()}


def test_what_was_written_is_read_by_another_hub_with_the_same_keys(folder: JobFiles, tmp_path: Path) -> None:
    folder.write_file(JOB, REQUEST, b"a prompt")
    again = files_of(tmp_path, JobKeys((job_key_of(b"\2" * 32), job_key_of(b"\1" * 32))))
    assert again.read_file(JOB, REQUEST) == b"a prompt"
    length, pieces = again.open_file(JOB, REQUEST)
    assert (length, b"".join(pieces)) == (8, b"a prompt")


@pytest.mark.attack("J4")
def test_files_are_for_their_user_alone_and_hold_nothing_readable(folder: JobFiles, tmp_path: Path) -> None:
    folder.write_file(JOB, REQUEST, b"a cat in the rain")
    path = tmp_path / "store" / "team-a" / f"{ID}.request"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert b"rain" not in path.read_bytes()


@pytest.mark.attack("J4")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775], ids=oct)
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    inner = tmp_path / "store" / "team-a"
    inner.mkdir(parents=True)
    if mode == 0o775:
        os.chown(inner, -1, 65534)
    inner.chmod(mode)
    with pytest.raises(ConfigError, match="--job-store: others can write to"):
        JobFolder(tmp_path / "store", "team-a")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], check=False).returncode:
        pytest.skip("mounting a disk takes a superuser")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.attack("Z32")
def test_videos_leave_some_of_the_disk_free_for_others(small_disk: Path) -> None:
    folder = files_of(small_disk)
    folder.write_file(JOB, video_of(1), b"v" * (3 << 20))
    for part in (REQUEST, video_of(2)):
        with pytest.raises(JobStoreUnavailableError, match="has no room: delete videos"):
            folder.write_file(OTHER_JOB, part, b"v" * 900_000)
    folder.write_file(OTHER_JOB, error_of_claim(2), b"why")
    assert files_in(small_disk) == {f"{ID}.1.video", f"{OTHER}.2.error"}
    folder.remove_files(JOB)
    folder.write_file(OTHER_JOB, video_of(2), b"v" * (3 << 20))


def test_a_disk_that_is_full_is_no_defect_of_the_job(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub.jobs.folder._LEFT_FREE", 0)
    folder = files_of(small_disk)
    (small_disk / "of others").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 8192))
    with pytest.raises(JobStoreUnavailableError, match="has no room"):
        folder.write_file(JOB, error_of_claim(1), b"v" * 200_000)
    assert not files_in(small_disk)


def test_a_folder_that_can_not_be_made_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: Not a directory"):
        JobFolder(tmp_path / "file", "team-a")


@pytest.mark.attack("J4")
@pytest.mark.parametrize("job_id", ["../../etc/passwd", "", f"{ID}/..", f"{ID}\0", ID.upper()])
def test_an_id_that_is_none_leads_nowhere(folder: JobFiles, job_id: str) -> None:
    with pytest.raises(JobFileError):
        folder.open_file(record_of(job_id, KEYS), REQUEST)
    with pytest.raises(JobFileError):
        folder.write_file(record_of(job_id, KEYS), REQUEST, b"")


@pytest.mark.attack("J4")
def test_links_pipes_and_huge_files_are_not_read(folder: JobFiles, tmp_path: Path) -> None:
    place = tmp_path / "store" / "team-a" / f"{ID}.request"
    folder.write_file(OTHER_JOB, REQUEST, b"x")
    place.symlink_to(place.with_name(f"{OTHER}.request"))
    with pytest.raises(JobFileError, match="can't be read"):
        folder.open_file(JOB, REQUEST)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(JobFileError, match="none that a hub has written"):
        folder.open_file(JOB, REQUEST)
    place.unlink()
    with place.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(JobFileError, match="none that a hub has written"):
        folder.open_file(JOB, REQUEST)


@pytest.mark.attack("J4")
def test_a_file_of_another_job_or_claim_is_not_taken_for_this_ones(folder: JobFiles, tmp_path: Path) -> None:
    folder.write_file(JOB, video_of(1), b"mine")
    inner = tmp_path / "store" / "team-a"
    for other in (f"{OTHER}.1.video", f"{ID}.2.video"):
        (inner / other).write_bytes((inner / f"{ID}.1.video").read_bytes())
    for job, claim in ((OTHER_JOB, 1), (JOB, 2)):
        with pytest.raises(JobFileError, match="changed, or moved"):
            folder.read_file(job, video_of(claim))


def test_what_is_too_long_is_refused_and_leaves_nothing(folder: JobFiles, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="more than a job may have"):
        folder.write_file(JOB, REQUEST, bytes(17 << 20))
    assert files_in(tmp_path) == set()


def test_a_job_goes_with_all_its_files_and_orphans_once_they_are_old(folder: JobFiles, tmp_path: Path) -> None:
    """1. of two jobs one is removed; files that no hub has written stay
    2. what lies there of unknown jobs stays while it is young, such as a file whose record is about to be written
    """
    inner = tmp_path / "store" / "team-a"
    for job in (JOB, OTHER_JOB):
        for part in (REQUEST, video_of(1), video_of(2)):
            folder.write_file(job, part, b"x")
    (inner / "readme.txt").touch()
    (inner / f".{ID}.request.tmp_1").touch()
    folder.remove_files(JOB)
    kept = {f"{OTHER}.request", f"{OTHER}.1.video", f"{OTHER}.2.video", "readme.txt"}
    assert files_in(tmp_path) == kept
    assert folder.remove_orphans(()) == 0
    for path in inner.iterdir():
        os.utime(path, (1.0, 1.0))
    assert folder.remove_orphans([OTHER_JOB]) == 0
    assert folder.remove_orphans(()) == 3
    assert files_in(tmp_path) == {"readme.txt"}
