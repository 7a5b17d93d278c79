"""The deploy document of a namespace: put by the first hub, compared by every other."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from omni_discovery.deploy.document import DeployConfig, decode_deploy, encode_deploy
from omni_discovery.deploy.load import describe_difference
from omni_discovery.errors import ConfigError, RegistryError, RegistryTlsError, RegistryUnavailableError
from omni_discovery.etcd.check import check_registry, check_ttl
from omni_discovery.records.keys import pipeline_key

if TYPE_CHECKING:
    from omni_discovery.clients import OmniCoordClientForHub
    from omni_discovery.etcd.config import RegistryConfig

logger = logging.getLogger(__name__)

_RETRY_S: Final = 1.0


def check_before_joining(config: RegistryConfig, deploy: DeployConfig) -> bool:
    """Raise ConfigError for another document in force or too short a TTL, before this hub registers.

    Return whether etcd has answered. Raise RegistryError if it refuses the login or certificate. Blocks like
    ``check_registry``.
    """
    try:
        in_force = check_registry(config, 0.0)
    except RegistryTlsError:
        raise
    except RegistryUnavailableError:
        return False
    if in_force is not None:
        check_pipeline(in_force, deploy, config.namespace)
    check_ttl(config)
    return True


def claim_pipeline(client: OmniCoordClientForHub, deploy: DeployConfig, namespace: str) -> int:
    """Put the document if there is none; return the revision of the put, 0 if there was one already.

    Raise ConfigError if there is another, RegistryError.
    """
    document = encode_deploy(deploy)
    try:
        claim = client.create_pipeline(document)
    except RegistryUnavailableError as error:
        if not error.may_have_run:
            raise
        # Whether it ran can't be told; what is in force now can.
        claim = client.create_pipeline(document)
    if not claim.won and claim.current is not None:
        check_pipeline(claim.current.value, deploy, namespace)
    return claim.revision if claim.won else 0


def check_pipeline(in_force: bytes, deploy: DeployConfig, namespace: str) -> None:
    """Raise ConfigError if the document in force is another than ours."""
    difference = describe_difference(deploy, decode_deploy(in_force, pipeline_key(namespace)))
    if difference:
        raise ConfigError(
            f"namespace {namespace!r} already runs another pipeline: {difference}. "
            "Serve the same document, take another --namespace, or replace it with 'omni pipeline apply FILE'"
        )


async def keep_pipeline(client: OmniCoordClientForHub, deploy: DeployConfig, namespace: str) -> None:
    """Put the document whenever the registry has none: after a wipe, or when etcd was unreachable at the start.

    The document is the one in force last, which an operator may have replaced. Ends only by cancellation.
    """
    in_force = encode_deploy(deploy)
    while True:
        await asyncio.sleep(_RETRY_S)
        view = client.view()
        if not client.is_synced or view.stale_since_s is not None:
            continue
        if view.pipeline is not None:
            # An operator may have replaced it; the orchestrator handles that for the requests.
            in_force = view.pipeline
            continue
        try:
            claim = await asyncio.to_thread(client.create_pipeline, in_force)
            if claim.won:
                logger.info("hub.pipeline_put namespace=%s", namespace)
        except RegistryError as error:
            logger.info("hub.pipeline_not_put reason=%s", error)
