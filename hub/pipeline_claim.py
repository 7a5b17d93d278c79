"""The deploy document of a namespace: put by the first hub, compared by every other."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from omni_discovery.deploy import DeployConfig, decode_deploy, describe_difference, encode_deploy
from omni_discovery.errors import ConfigError, RegistryError
from omni_discovery.keys import pipeline_key

if TYPE_CHECKING:
    from omni_discovery.clients import OmniCoordClientForHub

logger = logging.getLogger(__name__)

_RETRY_S: Final = 1.0


def claim_pipeline(client: OmniCoordClientForHub, deploy: DeployConfig, namespace: str) -> None:
    """Put the document if there is none. Raise ConfigError if there is another, RegistryError."""
    claim = client.create_pipeline(encode_deploy(deploy))
    if not claim.won and claim.current is not None:
        check_pipeline(claim.current.value, deploy, namespace)


def check_pipeline(in_force: bytes, deploy: DeployConfig, namespace: str) -> None:
    """Raise ConfigError if the document in force is another than ours."""
    difference = describe_difference(deploy, decode_deploy(in_force, pipeline_key(namespace)))
    if difference:
        raise ConfigError(
            f"namespace {namespace!r} already runs another pipeline: {difference}. "
            "Serve the same document, take another --namespace, or replace it with 'omni pipeline apply FILE'"
        )


async def claim_pipeline_later(client: OmniCoordClientForHub, deploy: DeployConfig, namespace: str) -> None:
    """Claim it as soon as etcd answers. A hub that serves already goes on, whatever the answer is."""
    while True:
        await asyncio.sleep(_RETRY_S)
        if not client.is_synced:
            continue
        try:
            await asyncio.to_thread(claim_pipeline, client, deploy, namespace)
        except ConfigError as error:
            logger.error("hub.pipeline_differs %s", error)
        except RegistryError as error:
            logger.info("hub.pipeline_not_claimed reason=%s", error)
            continue
        return
