"""Videos as jobs whose files lie in a real Mooncake store, of real hubs over a real etcd: hubs, master, stores lost."""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import pytest
from openai import APIStatusError, InternalServerError, OpenAI

from hub.jobs.config import MooncakeMaster
from hub.jobs.files import REQUEST, video_of
from hub.jobs.mooncake.client import MooncakeClient
from hub.jobs.mooncake.names import file_prefix, head_names, job_prefix, pattern_of
from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.kv import KeyValue
from omni_discovery.records.jobs import JobRecord, decode_job, job_key
from stage_runtime.demo.processes import alive
from tests.support.filming import Studio, key_file
from tests.support.hub import Hub
from tests.support.mooncake import MASTER_PORT, StoreHost
from tests.support.processes import wait_for
from tests.support.registry import etcdctl

PROMPT = "HOLD a cat in the rain"
TTL_S = 2

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Studio, StoreHost]]:
    """A host with one replica, a master, and one store process."""
    with StoreHost(TTL_S) as host, host.inside(), EmbeddedEtcd() as etcd:
        made = Studio(tmp_path_factory.mktemp("studio"), etcd.endpoint, f"test-{uuid.uuid4().hex}")
        try:
            made.start_replica()
            yield made, host
        finally:
            made.close()


@pytest.fixture
def studio(place: tuple[Studio, StoreHost]) -> Iterator[Studio]:
    studio, _ = place
    studio.hold()
    yield studio
    studio.go_on()
    studio.kill_hubs()


@pytest.fixture
def host(place: tuple[Studio, StoreHost]) -> StoreHost:
    return place[1]


@pytest.fixture
def store(tmp_path: Path, host: StoreHost) -> list[str]:
    url = f"mooncake://{host.host.address}:{MASTER_PORT}"
    return ["--job-store", url, "--job-key-file", str(key_file(tmp_path))]


def client_of(hub: Hub) -> OpenAI:
    return OpenAI(base_url=f"{hub.url}/v1", api_key="none", max_retries=0, timeout=60)


def ended(client: OpenAI, video_id: str) -> Any:
    def probe() -> Any:
        video = client.videos.retrieve(video_id)
        return video if video.status in {"completed", "failed"} else None

    return wait_for("the video", probe, 90)


def frames_of(file: bytes) -> int:
    with av.open(io.BytesIO(file)) as container:
        return sum(1 for _ in container.decode(video=0))


def record(studio: Studio, video_id: str) -> JobRecord:
    key = job_key(studio.namespace, video_id)
    return decode_job(KeyValue(key, etcdctl(studio.endpoint, "get", key, "--print-value-only").encode().strip(), 0, 0))


def refusal(client: OpenAI, video_id: str) -> tuple[int, str | None]:
    """Status and code of the answer to a request for the file; 200 without a code."""
    try:
        client.videos.download_content(video_id)
    except APIStatusError as error:
        return error.status_code, error.code
    return 200, None


def created(client: OpenAI, prompt: str) -> Any:
    """A new video, or None where the store does not answer."""
    try:
        return client.videos.create(prompt=prompt, extra_body={"num_frames": 3})
    except InternalServerError:
        return None


def meanwhile(host: StoreHost, hub: Hub, ask: Callable[[OpenAI], Any]) -> tuple[Any, float]:
    """What a question brings, and the longest that others of the hub have waited before."""

    def asked() -> Any:
        with host.inside(), client_of(hub) as client:
            return ask(client)

    longest_s = 0.0
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asked)
        while True:
            began_s = time.monotonic()
            assert hub.get("/health")[0] == 200
            longest_s = max(longest_s, time.monotonic() - began_s)
            if answer.done():
                return answer.result(), longest_s
            time.sleep(0.05)


def test_jobs_of_a_killed_hub_are_ended_once_by_another_from_the_store(
    studio: Studio, store: list[str], host: StoreHost
) -> None:
    """1. hub a has made a video and works on two more; the store loses the request of the last one; hub a is killed
    2. hub b sends the first one's file, makes the second one from its request, and ends the third one with the reason
    3. nothing of a prompt or a video is readable in etcd or in the store, and no hub gave memory to it
    4. a job is deleted: the store has nothing of it
    """
    given_bytes = host.given_bytes()
    looking = MooncakeClient(MooncakeMaster(host.host.address, MASTER_PORT))
    a = studio.start_hub("a", *store).wait_ready()
    with client_of(a) as asked:
        done = asked.videos.create(prompt="a cat", extra_body={"num_frames": 3})
        assert ended(asked, done.id).status == "completed"
        video = asked.videos.create(prompt=PROMPT, seconds="1", size="64x32", extra_body={"fps": 8})
        lost = asked.videos.create(prompt=PROMPT)
    wait_for("the films to begin", lambda: studio.begun == 2)
    b = studio.start_hub("b", *store).wait_ready()
    assert looking.remove_matching(pattern_of(job_prefix(studio.namespace, record(studio, lost.id)))) == 1
    processes = a.tree()
    assert len(processes) > 1, "the hub and its Mooncake client"
    a.process.kill()
    a.process.wait()
    wait_for("all processes of hub a to end", lambda: not alive(processes))
    with client_of(b) as asked:
        assert frames_of(asked.videos.download_content(done.id).read()) == 3
        wait_for("the film to begin again", lambda: studio.begun == 3, 60)
        studio.go_on()
        found = ended(asked, video.id)
        assert (found.status, found.progress, found.seconds, found.size) == ("completed", 100, "1", "64x32")
        file = asked.videos.download_content(video.id).read()
        assert frames_of(file) == 8
        assert f"jobs.completed job={video.id} claim=2" in b.text
        found = ended(asked, lost.id)
        assert (found.status, found.error.code) == ("failed", "job_store_failed")
        assert "what kept it was restarted" in found.error.message
        assert studio.begun == 3

        job = record(studio, video.id)
        names = [head_names(file_prefix(studio.namespace, job, part))[0] for part in (REQUEST, video_of(2))]
        for name in names:
            content = looking.get(name)
            assert content
            assert b"rain" not in content
            assert file[:200] not in content
        assert b"rain" not in etcdctl(studio.endpoint, "get", "--prefix", "").encode()
        assert host.given_bytes() == given_bytes
        asked.videos.delete(video.id)
        assert [looking.get(name) for name in names] == [None, None]
    looking.close()


def test_without_its_master_a_hub_serves_on_and_jobs_wait_for_the_next_one(
    studio: Studio, store: list[str], host: StoreHost
) -> None:
    """1. a hub starts while there is no master: who asks for a video gets a 503
    2. with a master, one job is done, one is being made; the master is killed
    3. the hub answers for the file with 503, within its bounds, and meanwhile all else at once
    4. the film ends while there is no master: the hub keeps it, and the job is completed when there is one again
    5. that one knows nothing of the first job's file, and the answer says so; new jobs are as before
    """
    host.end(host.master)
    hub = studio.start_hub("a", *store).wait_ready()
    with client_of(hub) as asked:
        with pytest.raises(InternalServerError, match="the job store can't be asked") as refused:
            asked.videos.create(prompt="a cat")
        assert (refused.value.status_code, refused.value.code) == (503, "job_store_unavailable")
        assert refused.value.response.headers["retry-after"] == "2"
        host.start_master()
        wait_for("the store process to be back", host.given_bytes)
        done = wait_for("the store to be asked again", lambda: created(asked, "a cat"))
        assert ended(asked, done.id).status == "completed"
        held = asked.videos.create(prompt=PROMPT, extra_body={"num_frames": 5})
        wait_for("the film to begin", lambda: studio.begun == 1)
        host.end(host.master)

        # The library needs four seconds to see that its master is gone.
        answer, longest_s = meanwhile(host, hub, lambda client: refusal(client, done.id))
        assert answer == (503, "job_store_unavailable")
        assert longest_s < 3.0
        assert asked.videos.retrieve(done.id).status == "completed"
        studio.go_on()
        wait_for("the hub to ask again", lambda: f"jobs.store_asked_again job={held.id}" in hub.text)
        assert asked.videos.retrieve(held.id).status == "in_progress"

        host.start_master()
        wait_for("the store process to be back", host.given_bytes)
        assert ended(asked, held.id).status == "completed"
        assert frames_of(asked.videos.download_content(held.id).read()) == 5
        assert refusal(asked, done.id) == (500, "job_store_failed")
        assert ended(asked, asked.videos.create(prompt="a cat").id).status == "completed"
    assert studio.begun == 1
    assert hub.text.count("jobs.store_away") >= 2
    assert hub.text.count("jobs.store_back") >= 2
    assert hub.stop() == []


def test_of_two_store_processes_one_may_be_lost(studio: Studio, store: list[str], host: StoreHost) -> None:
    """1. one of two store processes is killed: the file can be had from the other
    2. the other is killed, too: the file is gone, and the answer says so; a job is refused for want of room
    """
    second = host.start_keeper()
    hub = studio.start_hub("a", *store).wait_ready()
    with client_of(hub) as asked:
        done = created(asked, "a cat")
        assert ended(asked, done.id).status == "completed"
        file = asked.videos.download_content(done.id).read()
        host.end(host.keeper)
        wait_for("the file from the other one", lambda: refusal(asked, done.id)[0] == 200)
        assert asked.videos.download_content(done.id).read() == file
        host.end(second)
        wait_for("the master to forget it", lambda: not host.given_bytes())
        assert refusal(asked, done.id) == (500, "job_store_failed")
        with pytest.raises(InternalServerError, match="it has no room: its store processes are gone"):
            asked.videos.create(prompt="a dog")
