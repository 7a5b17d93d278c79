"""Checks of etcd by command lines, before anything is started: can it be read, which TTLs, which namespaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from omni_discovery.errors import (
    ConfigError,
    RegistryDeniedError,
    RegistryError,
    RegistryTlsError,
    RegistryUnavailableError,
)
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.records import keys
from omni_discovery.records.keys import namespace_prefix, pipeline_key, waits_prefix
from omni_discovery.records.waits import describe_waits, waits_among
from omni_discovery.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_discovery.kv import KVStore

_TRY_S: Final = 1.5
_PAUSE_S: Final = 0.2


def check_registry(
    config: RegistryConfig, patience_s: float, is_stopped: Callable[[], bool] = lambda: False
) -> bytes | None:
    """Wait until the namespace can be read; return its deploy document, None if it has none or ``is_stopped()``.

    Raise RegistryRefusedError or RegistryTlsError at once, RegistryUnavailableError after ``patience_s``: the message
    names the endpoint and what to correct. Blocks: not for a thread that has an event loop.
    """
    return asyncio.run(_check(config, patience_s, is_stopped))


def check_ttl(config: RegistryConfig) -> None:
    """Raise ConfigError if etcd would grant no lease as short as ``config.ttl_s``; it counts whole seconds.

    An etcd that does not answer passes the check: clients accept the TTL that they are granted. Blocks.
    """
    granted_s = asyncio.run(_granted_s(config))
    if granted_s >= config.ttl_s + 1:
        raise ConfigError(
            f"a TTL of {config.ttl_s:g} s is too short for etcd at {','.join(config.endpoints)}, whose elections are "
            f"slow: it grants {granted_s:g} s at least; give --omni-heartbeat-timeout {granted_s:g}"
        )


async def _granted_s(config: RegistryConfig) -> float:
    kv = EtcdKV(config.endpoints, security=config.security, try_timeout_s=_TRY_S, call_timeout_s=_TRY_S)
    try:
        grant = await kv.grant(config.ttl_s)
        await kv.revoke(grant.lease_id)
    except RegistryError:
        return 0.0
    finally:
        await kv.close()
    return grant.ttl_s


async def _check(config: RegistryConfig, patience_s: float, is_stopped: Callable[[], bool]) -> bytes | None:
    deadline_s = time.monotonic() + patience_s
    kv = EtcdKV(config.endpoints, security=config.security, try_timeout_s=_TRY_S, call_timeout_s=_TRY_S)
    try:
        while not is_stopped():
            try:
                item = await kv.get(pipeline_key(config.namespace))
                return None if item is None else item.value
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
        return None
    finally:
        await kv.close()


def waiting_hosts(config: RegistryConfig) -> list[str]:
    """The hosts of the processes that say in the namespace what they wait for, sorted; none if that can't be read."""
    return asyncio.run(_waiting_hosts(config))


async def _waiting_hosts(config: RegistryConfig) -> list[str]:
    kv = EtcdKV(config.endpoints, security=config.security, try_timeout_s=_TRY_S, call_timeout_s=_TRY_S)
    try:
        items = (await kv.list(waits_prefix(config.namespace))).items
    except RegistryError:
        return []
    finally:
        await kv.close()
    return sorted({one_line(each.host) for each in waits_among(items, config.namespace)})


def namespaces_in(listed: Iterable[str]) -> list[str]:
    """The namespaces that the keys ``listed`` belong to, sorted."""
    found = {key.removeprefix(keys.ROOT).split("/")[0] for key in listed if key.startswith(keys.ROOT)}
    return sorted(name for name in found if name)


def empty_namespace_text(namespace: str, names: Iterable[str] | None) -> str:
    """The message for an empty namespace. ``names`` are the namespaces on this etcd, None if they can't be read."""
    empty = f"nothing is in namespace {namespace!r}"
    if names is None:
        return f"{empty}; this user may not see which others there are"
    match [name for name in names if name != namespace]:
        case []:
            return f"{empty}, nor in any other on this etcd"
        case [other]:
            return f"{empty}; there is {other!r}: add --namespace {other}"
        case others:
            return f"{empty}; there are: {', '.join(others)}; choose with --namespace"


#: Processes that wait and are named for an empty namespace.
_MOST_WAITING: Final = 3


async def explain_empty(kv: KVStore, namespace: str) -> str:
    """Return the message for a namespace that has no key, or none but of processes that wait, and "" for another.

    Raise RegistryError.
    """
    if items := (await kv.list(namespace_prefix(namespace), keys_only=True)).items:
        if any(not item.key.startswith(waits_prefix(namespace)) for item in items):
            return ""
        waits = waits_among((await kv.list(waits_prefix(namespace))).items, namespace)
        told = "; ".join(describe_waits(each) for each in waits[:_MOST_WAITING])
        return f"nothing is in namespace {namespace!r} yet but {told}" if told else ""
    try:
        names = namespaces_in(item.key for item in (await kv.list(keys.ROOT, keys_only=True)).items)
    except RegistryError:
        names = None
    return empty_namespace_text(namespace, names)
