"""The start of a hub's jobs: the store of their files, and the service that works on them."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hub.api.videos.schema import makes_videos
from hub.jobs.registry import JobRegistry
from hub.jobs.work import make_video
from omni_discovery.processes import OwnedFolder, remove_orphaned

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from hub.async_omni import AsyncOmni
    from hub.jobs.config import JobsConfig, MooncakeMaster
    from hub.jobs.files import JobStore
    from hub.jobs.service import JobService
    from omni_discovery.clients import OmniCoordClientForHub
    from omni_discovery.deploy.document import DeployConfig

#: What the folder of a hub begins with that keeps its jobs to itself.
_OWN_PREFIX: Final = "omni-jobs-"


async def make_jobs(
    stack: AsyncExitStack,
    config: JobsConfig,
    deploy: DeployConfig,
    namespace: str,
    omni: AsyncOmni,
    client: OmniCoordClientForHub,
) -> JobService | None:
    """The jobs of a hub, not started yet; None for a pipeline without videos. Raise ConfigError."""
    if not makes_videos(deploy):
        return None
    # Not at the top: hubs without jobs don't need what encrypts them.
    from hub.jobs.cipher import KEY_BYTES, JobKeys, job_key_of
    from hub.jobs.files import JobFiles
    from hub.jobs.folder import JobFolder
    from hub.jobs.service import JobService

    if config.store is not None and config.keys is not None:
        files = JobFiles(await asyncio.to_thread(_store_of, config.store, namespace), namespace, config.keys)
    else:
        # Of hubs that were killed.
        await asyncio.to_thread(remove_orphaned, _OWN_PREFIX)
        own = OwnedFolder(_OWN_PREFIX, "-")
        stack.callback(own.remove)
        # The key is in this process alone: the files of a hub that was killed are nothing but noise.
        keys = JobKeys((job_key_of(os.urandom(KEY_BYTES)),))
        files = JobFiles(JobFolder(own.path, namespace), namespace, keys)
    stack.push_async_callback(asyncio.to_thread, files.close)
    return JobService(
        JobRegistry(client.calls(), namespace, omni.hub_id, lambda: client.lease_id),
        files,
        partial(make_video, omni),
        config.bounds,
        keeps=config.store is None,
        stages_begun=omni.stages_begun,
        can_serve=lambda: omni.is_running and not omni.is_revoked,
    )


def _store_of(store: Path | MooncakeMaster, namespace: str) -> JobStore:
    """The store that the flag names. Raise ConfigError for a folder that others can write to, or without Mooncake."""
    from hub.jobs.folder import JobFolder

    if isinstance(store, Path):
        return JobFolder(store, namespace)
    from hub.jobs.mooncake.client import MooncakeClient
    from hub.jobs.mooncake.objects import JobObjects

    client = MooncakeClient(store)
    client.start()
    return JobObjects(client, namespace)
