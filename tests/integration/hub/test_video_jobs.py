"""Videos as jobs, of real hubs as processes over a real etcd: what becomes of a job when its hub dies or freezes."""

from __future__ import annotations

import io
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import msgspec
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.support.filming import Studio, key_file
from tests.support.hub import Hub
from tests.support.processes import wait_for
from tests.support.registry import etcdctl

PROMPT = "HOLD a cat in the rain"


#: OpenAI gives its own service up; the shapes stay.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture(scope="module")
def filming(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    """One replica for all of these tests."""
    made = Studio(tmp_path_factory.mktemp("studio"), endpoint, f"test-{uuid.uuid4().hex}")
    try:
        made.start_replica()
        yield made
    finally:
        made.close()


@pytest.fixture
def studio(filming: Studio) -> Iterator[Studio]:
    filming.hold()
    yield filming
    filming.go_on()
    filming.kill_hubs()


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    return ["--job-store", str(tmp_path / "store"), "--job-key-file", str(key_file(tmp_path))]


def client_of(hub: Hub, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{hub.url}/v1", api_key=key, max_retries=0)


def ended(client: OpenAI, video_id: str) -> Any:
    def probe() -> Any:
        video = client.videos.retrieve(video_id)
        return video if video.status in {"completed", "failed"} else None

    return wait_for("the video", probe)


def frames_of(file: bytes) -> int:
    with av.open(io.BytesIO(file)) as container:
        return sum(1 for _ in container.decode(video=0))


def values_in(endpoint: str) -> bytes:
    """All that etcd holds, of all namespaces."""
    return etcdctl(endpoint, "get", "--prefix", "").encode()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name.partition(".")[2]: path.read_bytes() for path in folder.rglob("video_*")}


def test_what_the_replica_says_that_it_can_not_make_is_no_job(studio: Studio, store: list[str], endpoint: str) -> None:
    """1. the replica's record names the fields of its function, with the bounds of numbers
    2. a hub that has no replica of its own refuses by that: 400, and nothing is written
    """
    hub = studio.start_hub("a", *store).wait_ready()
    record = etcdctl(endpoint, "get", f"/omni/v1/{studio.namespace}/replicas/0/0", "--print-value-only")
    assert msgspec.json.decode(record)["params"]["width"] == {"type": "integer", "minimum": 2, "maximum": 256}
    with client_of(hub) as client:
        with pytest.raises(BadRequestError, match="'size' can't be 640x16 at stage 0: width is 640, and it is at most"):
            client.videos.create(prompt="a cat", size="640x16")  # type: ignore[arg-type]
        assert client.videos.list().data == []


@pytest.mark.attack("J4")
def test_a_job_is_finished_once_by_another_hub_when_its_own_is_killed(
    studio: Studio, store: list[str], tmp_path: Path
) -> None:
    """1. hub a takes a job and works on it; nothing of the prompt is in etcd or readable in the store
    2. hub a is killed; hub b claims the job once the lease of hub a is over, and ends it
    3. the video is the same from everywhere, and the replica has filmed for each of the two hubs once
    """
    a = studio.start_hub("a", *store).wait_ready()
    with client_of(a) as asked:
        video = asked.videos.create(prompt=PROMPT, seconds="1", size="64x32", extra_body={"fps": 8})
    wait_for("the film to begin", lambda: studio.begun == 1)
    b = studio.start_hub("b", *store).wait_ready()
    with client_of(b) as asked:
        assert asked.videos.retrieve(video.id).status == "in_progress"
        assert set(files_of(tmp_path / "store")) == {"request"}
        assert b"rain" not in values_in(studio.endpoint)
        assert not any(b"rain" in content for content in files_of(tmp_path / "store").values())
        a.process.kill()
        a.process.wait()
        wait_for("the film to begin again", lambda: studio.begun == 2)
        studio.go_on()
        found = ended(asked, video.id)
        assert (found.status, found.progress, found.seconds, found.size) == ("completed", 100, "1", "64x32")
        assert frames_of(asked.videos.download_content(video.id).read()) == 8
    assert set(files_of(tmp_path / "store")) == {"request", "2.video"}
    assert "jobs.claimed" in b.text
    assert f"jobs.completed job={video.id} claim=2" in b.text
    assert studio.begun == 2
    assert b"rain" not in values_in(studio.endpoint)


def test_a_hub_that_was_frozen_beyond_its_lease_tells_nothing(studio: Studio, store: list[str], tmp_path: Path) -> None:
    """1. hub a works on a job and is frozen; hub b claims the job when the lease is over
    2. hub a goes on, and the film that it waits for is there: it is hub b's job, and hub b ends it
    """
    a = studio.start_hub("a", *store).wait_ready()
    with client_of(a) as asked:
        video = asked.videos.create(prompt=PROMPT, extra_body={"num_frames": 5})
    wait_for("the film to begin", lambda: studio.begun == 1)
    b = studio.start_hub("b", *store).wait_ready()
    os.kill(a.process.pid, signal.SIGSTOP)
    try:
        wait_for("the film to begin again", lambda: studio.begun == 2)
        studio.go_on()
        with client_of(b) as asked:
            assert ended(asked, video.id).status == "completed"
            file = asked.videos.download_content(video.id).read()
    finally:
        os.kill(a.process.pid, signal.SIGCONT)
    wait_for("hub a to see it", lambda: "jobs.fenced" in a.text or "jobs.stopped" in a.text)
    assert "jobs.completed" not in a.text
    with client_of(a) as asked:
        again = wait_for("hub a to serve", lambda: asked.videos.retrieve(video.id))
        assert again.status == "completed"
        assert asked.videos.download_content(video.id).read() == file
        assert frames_of(file) == 5
    wait_for("what hub a had made to go", lambda: set(files_of(tmp_path / "store")) == {"request", "2.video"})


@pytest.mark.attack("J6")
def test_keys_see_their_own_videos_and_a_hub_without_a_store_its_own(studio: Studio, tmp_path: Path) -> None:
    """1. of two hubs without a store, the one that has the video shows it to its key, and to no other
    2. the other hub says whose it is
    3. the hub stops: the job is gone with it
    """
    keys = tmp_path / "keys"
    keys.write_text("alice:key-of-alice\nbob:key-of-bob\n")
    keys.chmod(0o600)
    a, b = (studio.start_hub(name, "--api-key-file", str(keys)).wait_ready() for name in "ab")
    with client_of(a, "key-of-alice") as alice, client_of(a, "key-of-bob") as bob:
        video = alice.videos.create(prompt="a cat", extra_body={"num_frames": 3})
        assert video.model_extra is not None
        assert ended(alice, video.id).status == "completed"
        assert frames_of(alice.videos.download_content(video.id).read()) == 3
        assert [each.id for each in alice.videos.list()] == [video.id]
        assert list(bob.videos.list()) == []
        for ask in (bob.videos.retrieve, bob.videos.delete, bob.videos.download_content):
            with pytest.raises(NotFoundError, match="there is no video"):
                ask(video.id)
    with client_of(b, "key-of-alice") as alice:
        with pytest.raises(NotFoundError, match=f"hub {video.model_extra['hub']} keeps it to itself"):
            alice.videos.retrieve(video.id)
        assert a.stop() == []
        with pytest.raises(NotFoundError, match="it has expired, was deleted, or is not yours"):
            alice.videos.retrieve(video.id)


def test_a_stopped_hub_hands_its_job_over_at_once(studio: Studio, store: list[str]) -> None:
    """It does not wait for the lease to end, and the job counts no loss."""
    a = studio.start_hub("a", *store).wait_ready()
    with client_of(a) as asked:
        video = asked.videos.create(prompt=PROMPT)
    wait_for("the film to begin", lambda: studio.begun == 1)
    b = studio.start_hub("b", *store).wait_ready()
    assert a.stop() == []
    assert f"jobs.released job={video.id}" in a.text
    studio.go_on()
    with client_of(b) as asked:
        assert ended(asked, video.id).status == "completed"
    assert f"jobs.claimed job={video.id} claim=2 after=-" in b.text


@pytest.mark.attack("J4")
def test_a_store_that_others_can_write_to_ends_the_start(tmp_path: Path, studio: Studio, store: list[str]) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    hub = studio.start_hub("a", *store)
    assert hub.process.wait(60) != 0
    assert "--job-store: others can write to" in hub.text
