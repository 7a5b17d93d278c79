"""What a store of jobs' files has to do, of a folder and of a real Mooncake store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hub.jobs.cipher import JobKeys, job_key_of
from hub.jobs.config import MooncakeMaster
from hub.jobs.errors import JobFileError, JobStoreUnavailableError
from hub.jobs.files import REQUEST, JobFiles, JobStore, error_of_claim, video_of
from hub.jobs.folder import JobFolder
from hub.jobs.mooncake.client import MooncakeClient
from hub.jobs.mooncake.names import SLICE_BYTES, file_prefix, head_names, slice_name
from hub.jobs.mooncake.objects import JobObjects
from omni_discovery.errors import ConfigError
from omni_discovery.records.jobs import JobRecord
from tests.support.filming import record_of
from tests.support.mooncake import MASTER_PORT, StoreHost
from tests.support.processes import wait_for

KEYS = JobKeys((job_key_of(b"\1" * 32),))
NAMESPACE = "team.a"
HOUR_S = 3600.0
#: More than two slices, and no whole number of segments.
LONG = os.urandom(2 * SLICE_BYTES + 12_345)

Make = Callable[[], JobStore]


@pytest.fixture(scope="module")
def mooncake() -> Iterator[StoreHost]:
    with StoreHost() as host:
        yield host


@pytest.fixture(params=["folder", "mooncake"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """What makes stores, all of the same place."""
    made: list[JobStore] = []

    def keep(store: JobStore) -> JobStore:
        made.append(store)
        return store

    if request.param == "mooncake":
        host: StoreHost = request.getfixturevalue("mooncake")
        with host.inside():
            yield lambda: keep(JobObjects(client_of(host), NAMESPACE))
    else:
        yield lambda: keep(JobFolder(tmp_path / "store", NAMESPACE))
    for store in made:
        store.close()


def client_of(host: StoreHost) -> MooncakeClient:
    return MooncakeClient(MooncakeMaster(host.host.address, MASTER_PORT))


@pytest.fixture
def files(make: Make) -> JobFiles:
    return JobFiles(make(), NAMESPACE, KEYS)


def job_made(hours_ago: float = 0.0) -> JobRecord:
    return record_of(f"video_{uuid.uuid4().hex}", KEYS, time.time() - hours_ago * HOUR_S)


@pytest.mark.parametrize("content", [b"", b"a prompt", LONG], ids=["nothing", "short", "long"])
def test_what_one_hub_has_written_another_reads(make: Make, files: JobFiles, content: bytes) -> None:
    job = job_made()
    files.write_file(job, video_of(1), content)
    length, pieces = JobFiles(make(), NAMESPACE, KEYS).open_file(job, video_of(1))
    assert length == len(content)
    assert b"".join(pieces) == content


def test_a_file_may_be_written_again(files: JobFiles) -> None:
    job = job_made()
    for content in (LONG, b"short"):
        files.write_file(job, video_of(1), content)
        assert files.read_file(job, video_of(1)) == content


def test_a_file_and_a_job_go_by_themselves(files: JobFiles) -> None:
    """Neither what is named alike nor what is not there is hit."""
    job, other = job_made(), job_made()
    kept = [(job, REQUEST), (job, video_of(11)), (other, video_of(1))]
    for each, part in [*kept, (job, video_of(1))]:
        files.write_file(each, part, part.encode())
    for _ in range(2):
        files.remove_file(job, video_of(1))
    with pytest.raises(JobFileError):
        files.read_file(job, video_of(1))
    assert [files.read_file(each, part).decode() for each, part in kept] == [part for _, part in kept]
    files.remove_files(job)
    files.remove_files(job)
    for part in (REQUEST, video_of(11)):
        with pytest.raises(JobFileError):
            files.read_file(job, part)
    assert files.read_file(other, video_of(1)) == b"1.video"


def test_what_a_job_has_not_is_an_error_that_says_so(files: JobFiles) -> None:
    with pytest.raises(JobFileError, match=r"can't be read|does not have"):
        files.open_file(job_made(), error_of_claim(1))


def test_a_file_that_no_hub_may_write_is_not_read(files: JobFiles, make: Make) -> None:
    job = job_made()
    make().write_sealed(job, error_of_claim(1), [bytes(300 << 10)])
    with pytest.raises(JobFileError, match="none that a hub has written"):
        files.open_file(job, error_of_claim(1))


# ---- what only a Mooncake store does


@pytest.fixture
def client(mooncake: StoreHost) -> Iterator[MooncakeClient]:
    made = client_of(mooncake)
    with mooncake.inside():
        yield made
    made.close()


def test_orphans_go_by_the_hour_of_their_jobs(client: MooncakeClient) -> None:
    """1. of three old hours, one has a job that is known: files of others of that hour stay for now
    2. young ones stay, and so do those of other namespaces; nothing is looked for twice
    3. the job expires: its hour goes
    """
    files = JobFiles(JobObjects(client, NAMESPACE), NAMESPACE, KEYS)
    known, beside, old, older, young = (job_made(hours) for hours in (10, 10, 11, 9, 0))
    for job in (known, beside, old, older, young):
        files.write_file(job, REQUEST, b"x")
    neighbour = JobFiles(JobObjects(client, "team-a"), "team-a", KEYS)
    neighbour.write_file(old, REQUEST, b"theirs")

    assert files.remove_orphans([known]) == 2
    assert [files.read_file(job, REQUEST) for job in (known, beside, young)] == [b"x"] * 3
    assert neighbour.read_file(old, REQUEST) == b"theirs"
    assert files.remove_orphans([known]) == 0
    assert files.remove_orphans([]) == 2
    assert files.read_file(young, REQUEST) == b"x"
    for job in (known, beside, old, older):
        with pytest.raises(JobFileError):
            files.read_file(job, REQUEST)


@pytest.mark.attack("J4")
def test_objects_hold_nothing_readable_and_are_refused_when_they_were_changed(client: MooncakeClient) -> None:
    """1. all that lies in the store is names, lengths and noise
    2. a slice that another took the place of, or that is gone, is an error; so is a head of anything else
    """
    files, job = JobFiles(JobObjects(client, NAMESPACE), NAMESPACE, KEYS), job_made()
    prompt = b"a cat in the rain" * (SLICE_BYTES // 10)
    files.write_file(job, video_of(1), prompt)
    prefix = file_prefix(NAMESPACE, job, video_of(1))
    head = client.get(head_names(prefix)[0])
    assert head is not None
    token = next(part for part in head.split(b"\xb0") if part[:16].isalnum())[:16].decode()
    second = client.get(slice_name(prefix, token, 1))
    assert second is not None
    assert b"rain" not in head + second
    assert client.put(slice_name(prefix, token, 1), second[:-1] + bytes([second[-1] ^ 1]))
    with pytest.raises(JobFileError, match="was changed"):
        files.read_file(job, video_of(1))
    client.remove_matching(f"^{slice_name(prefix, token, 1)}$".replace(".", "[.]"))
    with pytest.raises(JobFileError, match="does not have all"):
        files.read_file(job, video_of(1))
    assert client.put(head_names(prefix)[0], b"anything")
    with pytest.raises(JobFileError, match="none that a hub has written"):
        files.read_file(job, video_of(1))


#: Begins to write an object, and is killed.
HALF = """
import os, sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store, master, name = MooncakeDistributedStore(), *sys.argv[1:]
assert not store.setup(master.partition(":")[0], "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", master)
assert store.batch_put_session_start([name], [100], ReplicateConfig()) == [0]
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_hub_has_half_written_is_in_nobodys_way(client: MooncakeClient, mooncake: StoreHost) -> None:
    """Mooncake says of a second object of that name that it was written, and keeps nothing of it."""
    files, job = JobFiles(JobObjects(client, NAMESPACE), NAMESPACE, KEYS), job_made()
    name = head_names(file_prefix(NAMESPACE, job, REQUEST))[0]
    master = f"{mooncake.host.address}:{MASTER_PORT}"
    half = subprocess.run([sys.executable, "-c", HALF, master, name], check=False, timeout=60, capture_output=True)
    assert half.returncode == -9, half.stderr
    assert client.get(name) is None
    assert not client.put(name, b"x")
    files.write_file(job, REQUEST, b"whole")
    assert files.read_file(job, REQUEST) == b"whole"


def test_the_clients_process_is_started_again_and_ends_with_its_hub(client: MooncakeClient) -> None:
    """1. the process is killed between two calls: the next one starts another; 2. closed, it is gone at once"""
    assert client.put("omni-jobs/test/1", b"x")
    assert client._process is not None
    first = client._process.process
    first.kill()
    assert client.get("omni-jobs/test/1") == b"x"
    second = client._process.process
    client.close()
    assert second.returncode is not None


def test_a_master_that_stands_still_holds_a_call_for_its_time_only(
    client: MooncakeClient, mooncake: StoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a master that is connected to, and one that is not: each call ends with an error; the next one at once
    2. the master goes on: so does the client, with what is there
    """
    assert client.put("omni-jobs/test/still", b"x")
    monkeypatch.setattr("hub.jobs.mooncake.client._CALL_S", 1.0)
    mooncake.master.send_signal(signal.SIGSTOP)
    try:
        # Its threads stop one by one, when they are next given a processor.
        threads = list(Path(f"/proc/{mooncake.master.pid}/task").glob("*/stat"))
        wait_for("all of it to stand still", lambda: all(") T " in thread.read_text() for thread in threads))
        for _ in range(2):
            with pytest.raises(JobStoreUnavailableError, match="has not answered within 1 s"):
                client.get("omni-jobs/test/still")
            begun_s = time.monotonic()
            with pytest.raises(JobStoreUnavailableError, match="has not answered within 1 s"):
                client.get("omni-jobs/test/still")
            assert time.monotonic() - begun_s < 1.0
            time.sleep(2.0)
    finally:
        mooncake.master.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    assert client.get("omni-jobs/test/still") == b"x"


def test_without_mooncake_a_hub_does_not_start_and_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    client = MooncakeClient(MooncakeMaster("127.0.0.1", 1))
    with pytest.raises(ConfigError, match=r"libibverbs.so.1.*: pip install 'omni-discovery\[job-store\]'"):
        client.start()
    client.close()
