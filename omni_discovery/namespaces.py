"""Which namespaces there are on an etcd, for who has looked into an empty one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from omni_discovery import keys
from omni_discovery.errors import RegistryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_discovery.registry_security import RegistrySecurity

_ANSWER_S: Final = 3.0


def names_in(listed: Iterable[str]) -> list[str]:
    """The namespaces that keys belong to, in order."""
    found = {key.removeprefix(keys.ROOT).split("/")[0] for key in listed if key.startswith(keys.ROOT)}
    return sorted(name for name in found if name)


def tell_of_others(namespace: str, names: Iterable[str] | None) -> str:
    """What to say of a namespace that holds nothing, by those that there are; None if they can't be seen."""
    empty = f"nothing is in namespace {namespace!r}"
    if names is None:
        return f"{empty}; this user may not see which others there are"
    others = [name for name in names if name != namespace]
    return f"{empty}; there are: {', '.join(others)}" if others else f"{empty}, nor in any other on this etcd"


def read_namespaces(endpoints: str, security: RegistrySecurity) -> list[str] | None:
    """All that hold anything; None if we may not see them, or etcd does not answer."""
    from omni_discovery.etcd import EtcdKV

    async def read() -> list[str]:
        kv = EtcdKV(endpoints, security=security, call_timeout_s=_ANSWER_S)
        try:
            return names_in(item.key for item in (await kv.list(keys.ROOT)).items)
        finally:
            await kv.close()

    try:
        return asyncio.run(read())
    except RegistryError:
        return None
