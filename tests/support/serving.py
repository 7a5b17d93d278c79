"""Hubs before real replicas or a real etcd, as several tests start them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.running_hub import ServeConfig
from omni_discovery.registry_security import RegistrySecurity
from omni_discovery.security import KeyPair
from tests.support.hub_fakes import ONE_STAGE, deploy_of, show, until


@asynccontextmanager
async def hub_of(deploy: str, keys: KeyPair, config: HubConfig, *replicas: Any) -> AsyncIterator[AsyncOmni]:
    """A hub with that identity, once it can pick all of these replicas, which stay when it is closed."""
    omni = AsyncOmni(deploy_of(deploy), "hub-1", keys, config, "round-robin")
    await omni.start()
    try:
        show(omni, *(each.info for each in replicas))
        await until(lambda: sum(stage.pickable for stage in omni.stage_status()) == len(replicas), 20.0)
        yield omni
    finally:
        await omni.close()


def serve_config(folder: Path, endpoints: str, namespace: str, ttl_s: float, **more: Any) -> ServeConfig:
    """What ``omni serve`` makes of flags for a hub without local stages."""
    return ServeConfig(
        deploy=deploy_of(ONE_STAGE),
        hub=HubConfig(),
        endpoints=endpoints,
        security=RegistrySecurity(),
        security_flags=(),
        namespace=namespace,
        ttl_s=ttl_s,
        policy="least-load",
        host="127.0.0.1",
        port=0,
        local_stages=(),
        replica_address=None,
        runtime_dir=folder,
        etcd_binary=None,
        **more,
    )
