"""One look at etcd before anything is started on it, so that what is wrong with it is said at once and by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from omni_discovery.config import RegistryConfig
from omni_discovery.errors import RegistryDeniedError, RegistryTlsError, RegistryUnavailableError
from omni_discovery.etcd import EtcdKV
from omni_discovery.keys import pipeline_key

_TRY_S: Final = 1.5
_PAUSE_S: Final = 0.2


def check_registry(config: RegistryConfig, patience_s: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Return as soon as etcd lets us read our namespace, or when we are stopped.

    Raise RegistryRefusedError or RegistryTlsError at once, RegistryUnavailableError after ``patience_s``: each says
    which endpoint, and what to correct. Blocks: not for a thread that has an event loop.
    """
    asyncio.run(_check(config, patience_s, is_stopped))


async def _check(config: RegistryConfig, patience_s: float, is_stopped: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patience_s
    kv = EtcdKV(config.endpoints, security=config.security, try_timeout_s=_TRY_S, call_timeout_s=_TRY_S)
    try:
        while not is_stopped():
            try:
                await kv.get(pipeline_key(config.namespace))
                return
            except RegistryDeniedError as error:
                raise RegistryDeniedError(
                    f"etcd user {config.security.user!r} may not read namespace {config.namespace!r}: let an "
                    f"administrator run 'omni etcd grant-namespace {config.namespace} --user {config.security.user}' "
                    f"({error})"
                ) from error
            except RegistryTlsError:
                raise
            except RegistryUnavailableError as error:
                if time.monotonic() >= deadline_s:
                    text = f"no etcd answered within {patience_s:g} s: start it, or correct --etcd-endpoints ({error})"
                    raise RegistryUnavailableError(text) from error
            await asyncio.sleep(_PAUSE_S)
    finally:
        await kv.close()
