"""Hubs before real replicas or a real etcd, as several tests start them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.serve.running_hub import ServeConfig
from omni_discovery.curve import KeyPair
from omni_discovery.etcd.config import RegistrySecurity
from tests.support.hub_fakes import ONE_STAGE, QUICK, deploy_of, started_hub

KEYS = KeyPair.generate()
#: The hubs that a replica of such a test knows.
HUBS = {KEYS.public: "hub-1"}
CONFIG = replace(QUICK, request_timeout_s=20.0, accept_timeout_s=2.0, accept_limit_s=5.0, silence_grace_s=0.5)


@asynccontextmanager
async def hub_of(deploy: str, *replicas: Any, config: HubConfig = CONFIG) -> AsyncIterator[AsyncOmni]:
    """A hub that these replicas know, once it can pick them all; they stay when it is closed."""
    omni = AsyncOmni(deploy_of(deploy), "hub-1", KEYS, config, "round-robin")
    async with started_hub(omni, *(each.info for each in replicas), timeout_s=20.0):
        yield omni


def serve_config(folder: Path, endpoints: str, namespace: str, ttl_s: float, **more: Any) -> ServeConfig:
    """What ``omni serve`` makes of flags for a hub without local stages."""
    return ServeConfig(
        deploy=deploy_of(ONE_STAGE),
        hub=HubConfig(),
        endpoints=endpoints,
        security=RegistrySecurity(),
        namespace=namespace,
        ttl_s=ttl_s,
        policy="least-load",
        host="127.0.0.1",
        port=0,
        local_stages=(),
        runtime_dir=folder,
        etcd_binary=None,
        **more,
    )
