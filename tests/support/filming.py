"""A stage that makes short videos, of ordinary Python without a model; and hubs that serve them as jobs."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from hub.async_omni import AsyncOmni
from hub.jobs.cipher import JobKeys, job_key_of
from hub.jobs.files import JobFiles
from hub.jobs.folder import JobFolder
from hub.jobs.job import JobBounds
from hub.jobs.registry import JobRegistry
from hub.jobs.service import JobService
from hub.jobs.work import make_video
from omni_discovery.records import keys
from omni_discovery.records.jobs import JobRecord, JobState
from omni_discovery.testing import FakeKV, ManualClock
from tests.support.hub import Hub
from tests.support.processes import Child

#: One stage that films.
FILMER = """
model: filmer
stages:
  - stage_id: 0
    engine: torch
    engine_args: {target: "tests.support.filming:film", capacity: 8, frame_rate_hz: 10}
    final_output: video
"""
ROOT = Path(__file__).resolve().parents[2]
#: Names the folder in which a film that has begun leaves a file, and in which it looks for the leave to go on.
FOLDER = "OMNI_TEST_FILMS"


_Side = Annotated[int, msgspec.Meta(ge=2, le=256)]


class Scene(msgspec.Struct):
    """What is to be filmed. Parameters that it does not have are refused."""

    prompt: str = ""
    text: str = ""
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=480)] = 4
    width: _Side = 32
    height: _Side = 16
    fps: int = 10
    messages: list[Any] = []


def film(scene: Scene) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]] | None]:
    """Grey frames that turn bright, or with a picture dark.

    The word FAIL fails; HOLD waits until the test's folder has a file ``go``, and lets others pass meanwhile.
    """
    if "FAIL" in scene.prompt:
        raise RuntimeError(f"it was told to fail by {scene.prompt!r}")
    if "HOLD" in scene.prompt:
        folder = Path(os.environ[FOLDER])
        (folder / f"begun-{time.monotonic_ns()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
            yield None
    has_picture = any(isinstance(each.get("content"), list) for each in scene.messages)
    grey = np.linspace(*((255, 0) if has_picture else (0, 255)), scene.num_frames, dtype=np.uint8)
    yield np.broadcast_to(grey[:, None, None, None], (scene.num_frames, scene.height, scene.width, 3)).copy()


def key_file(folder: Path, *keys: str) -> Path:
    """A file with keys of jobs: a new one unless some are given."""
    file = folder / "job-keys"
    file.write_text("\n".join(keys or [secrets.token_hex(32)]))
    file.chmod(0o600)
    return file


def record_of(job_id: str, keys: JobKeys, created_at: float = 0.0) -> JobRecord:
    """The record of a job whose files are encrypted with the first of these keys."""
    return JobRecord(
        job_id=job_id,
        state=JobState.QUEUED,
        created_at=created_at,
        expires_at=created_at + 86_400,
        secret=keys.first.name,
    )


@asynccontextmanager
async def jobs_of(omni: AsyncOmni, *, bounds: JobBounds | None = None) -> AsyncIterator[JobService]:
    """The jobs of a hub in this process, over a registry in memory and a folder of its own."""
    kv = FakeKV(ManualClock())
    lease_id = (await kv.grant(60.0)).lease_id
    await kv.put(keys.hub_key("test", omni.hub_id), b"{}", lease_id)
    with tempfile.TemporaryDirectory() as place:
        files = JobFiles(JobFolder(Path(place), "test"), "test", JobKeys((job_key_of(secrets.token_bytes(32)),)))
        registry = JobRegistry(kv, "test", omni.hub_id, lambda: lease_id)
        jobs = JobService(
            registry,
            files,
            partial(make_video, omni),
            bounds or JobBounds(),
            keeps=False,
            stages_begun=omni.stages_begun,
        )
        jobs.start()
        try:
            yield jobs
        finally:
            await jobs.close()


class Studio:
    """An etcd's namespace with one replica that films, and any number of hubs without replicas."""

    def __init__(self, folder: Path, endpoint: str, namespace: str, ttl_s: float = 3.0) -> None:
        self.folder, self.endpoint, self.namespace, self._ttl_s = folder, endpoint, namespace, ttl_s
        self.document = folder / "deploy.yaml"
        self.document.write_text(FILMER)
        self.films = folder / "films"
        self.films.mkdir()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._variables = {"PYTHONPATH": path, FOLDER: str(self.films)}
        self.children: list[Child] = []
        self.hubs: list[Hub] = []

    @property
    def begun(self) -> int:
        """How many films that wait have begun."""
        return len(list(self.films.glob("begun-*")))

    def hold(self) -> None:
        """Let films wait from now on, and count them anew."""
        for file in self.films.iterdir():
            file.unlink()

    def go_on(self) -> None:
        """Let all films go on."""
        (self.films / "go").touch()

    def start_replica(self) -> Child:
        flags = ["--headless", "--stage-id", "0", "--etcd-endpoints", self.endpoint, "--namespace", self.namespace]
        flags += ["--allow", "target=tests.support.filming"]
        child = Child(["serve", *flags], self.folder, "replica", variables=self._variables)
        self.children.append(child)
        return child

    def start_hub(self, name: str, *flags: str) -> Hub:
        """A hub that listens somewhere; wait for it with ``wait_ready``."""
        own = Path(tempfile.mkdtemp(prefix=name, dir=self.folder))
        words = ["--deploy-config", str(self.document), "--hub-only", "--etcd-endpoints", self.endpoint]
        ttl = ["--omni-heartbeat-timeout", str(self._ttl_s)]
        hub = Hub(own, [*words, *ttl, *flags], self.namespace, variables=self._variables)
        self.hubs.append(hub)
        return hub

    def kill_hubs(self) -> None:
        """End all hubs at once."""
        for hub in self.hubs:
            hub.process.kill()
            hub.process.wait()
        self.hubs.clear()

    def close(self) -> None:
        """End all processes."""
        self.go_on()
        self.kill_hubs()
        for child in self.children:
            child.stop()
