"""``join``: an AsyncOmni on the running loop that follows an etcd, as one more hub of its pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from os import PathLike
from typing import TYPE_CHECKING, Final

from hub.omni import read_flags
from hub.serve.running_hub import RunningHub
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.errors import ConfigError, StageUnavailableError

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni
    from hub.replicas.factory import RemoteReplicaFactory

_CHECK_S: Final = 0.05


@asynccontextmanager
async def join(
    endpoints: str | Sequence[str],
    deploy: str | PathLike[str] | DeployConfig | None = None,
    flags: Sequence[str] = (),
    *,
    ready_timeout_s: float | None = 60.0,
    remote_replica_factory: RemoteReplicaFactory | None = None,
) -> AsyncGenerator[AsyncOmni, None]:
    """A hub in this process, beside all others of the etcd at ``endpoints``; it runs no stage itself.

    ``deploy`` is a deploy YAML or a DeployConfig, which must be the one in force if there is one; None: the one in
    force. ``flags`` are those of ``omni serve``, such as ``["--namespace", "prod"]``. It is entered once every stage
    has a replica that takes work (``ready_timeout_s`` None: without waiting for that), and withdraws when it is left.
    Raise OmniError: ConfigError for wrong flags or another document, RegistryError if etcd can't be used, and
    StageUnavailableError if a stage had no replica in time.
    """
    at = endpoints if isinstance(endpoints, str) else ",".join(endpoints)
    config = await asyncio.to_thread(read_flags, deploy, ["--hub-only", "--etcd-endpoints", at, *flags])
    async with AsyncExitStack() as stack:
        hub = RunningHub(config, at, "", asyncio.Event(), remote_replica_factory=remote_replica_factory)
        started = await hub.start(stack)
        if started is None:
            raise ConfigError("the hub was stopped before it had started")
        omni, _ = started
        if ready_timeout_s is not None:
            await _ready(omni, ready_timeout_s)
        yield omni


async def _ready(omni: AsyncOmni, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not all(stage.pickable for stage in omni.stage_status()):  # noqa: ASYNC110
                await asyncio.sleep(_CHECK_S)
    except TimeoutError:
        missing = [stage for stage in omni.stage_status() if not stage.pickable]
        text = "; ".join(f"stage {stage.stage_id}: {stage.why_absent}" for stage in missing)
        first = missing[0].stage_id if missing else omni.graph.stage_ids[0]
        raise StageUnavailableError(first, f"not every stage could take work within {timeout_s:g} s: {text}") from None
