"""The deploy document in force, read from etcd by a supervisor and by its replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from omni_discovery.deploy.document import DeployConfig, decode_deploy
from omni_discovery.errors import ConfigError, RegistryError, RegistryTlsError, RegistryUnavailableError
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records.keys import pipeline_key
from stage_runtime.config import ReplicaConfig

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.5


def read_pipeline(
    endpoints: str,
    namespace: str,
    *,
    absent_wait_s: float,
    unreachable_wait_s: float = 30.0,
    security: RegistrySecurity | None = None,
    on_wait: Callable[[str], None] = lambda _reason: None,
) -> DeployConfig:
    """The namespace's deploy document; waits while it is absent, and tells ``on_wait`` why, whenever that changes.

    Raise RegistryRefusedError and RegistryTlsError at once, RegistryUnavailableError if etcd is silent for
    ``unreachable_wait_s``, ConfigError if there is no document after ``absent_wait_s`` or it can't be read.
    """
    return asyncio.run(_read(endpoints, security, namespace, absent_wait_s, unreachable_wait_s, on_wait))


async def _read(
    endpoints: str,
    security: RegistrySecurity | None,
    namespace: str,
    absent_wait_s: float,
    unreachable_wait_s: float,
    on_wait: Callable[[str], None],
) -> DeployConfig:
    key = pipeline_key(namespace)
    kv = EtcdKV(endpoints, security=security)
    begun_s = answered_s = time.monotonic()
    logged = ""
    try:
        while True:
            failure: RegistryError | None = None
            try:
                item = await kv.get(key)
            except RegistryTlsError:
                raise
            except RegistryUnavailableError as error:
                failure = error
            now_s = time.monotonic()
            if failure is not None:
                if now_s - answered_s >= unreachable_wait_s:
                    raise RegistryUnavailableError(
                        f"no etcd answered at {endpoints} for {unreachable_wait_s:g} s; "
                        f"check --etcd-endpoints and that etcd runs ({failure})"
                    ) from failure
            elif item is not None:
                return decode_deploy(item.value, key)
            else:
                answered_s = now_s
                if now_s - begun_s >= absent_wait_s:
                    raise ConfigError(
                        f"{key} is not in etcd; start a hub with 'omni serve --deploy-config FILE' in this namespace"
                    )
            reason = "no etcd answers" if failure is not None else "no hub has written it yet"
            if reason != logged:
                logged = reason
                on_wait(f"no pipeline: {reason}")
                logger.info("pipeline.waiting key=%s reason=%s", key, reason)
            await asyncio.sleep(_RETRY_S)
    finally:
        await kv.close()


def deploy_of_replica(config: ReplicaConfig) -> DeployConfig:
    """The document in force; while etcd is unreachable, the one that the supervisor has read.

    Raise what ``read_pipeline`` raises.
    """
    try:
        wait_s = 3.0 if config.known_pipeline else 30.0
        return read_pipeline(
            config.endpoints,
            config.namespace,
            absent_wait_s=config.pipeline_wait_s,
            unreachable_wait_s=wait_s,
            security=config.security,
        )
    except RegistryUnavailableError:
        if not config.known_pipeline:
            raise
        logger.warning("pipeline.from_supervisor reason=no etcd answers")
        return decode_deploy(config.known_pipeline.encode("utf-8"), "the supervisor's copy")
