"""The roles of etcd users in one namespace: which families of keys each may read, and which it may write. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from omni_discovery.records.jobs import jobs_root
from omni_discovery.records.keys import namespace_prefix

#: The families of a namespace's keys, as they begin; ``pipeline`` is one key, ``keys/`` has the hashes of API keys.
BEATS, CONTROL, HUBS, REPLICAS, WAITS = "beats/", "control/", "hubs/", "replicas/", "waits/"
PIPELINE, API_KEYS = "pipeline", "keys/"
#: What everybody in a namespace may read.
OPEN_FAMILIES: Final = (BEATS, CONTROL, HUBS, PIPELINE, REPLICAS, WAITS)

HUB, REPLICA, OPERATOR, OBSERVER = "hub", "replica", "operator", "observer"
#: What each role may write. Hubs and operators read all of the namespace, the others the open families. An operator may
#: delete the records of replicas that do not exist.
WRITES: Final = {
    HUB: (BEATS, HUBS, PIPELINE, WAITS),
    REPLICA: (REPLICAS, WAITS),
    OPERATOR: (CONTROL, PIPELINE, API_KEYS, REPLICAS),
    OBSERVER: (),
}
_READ_ALL: Final = (HUB, OPERATOR)
#: The roles that read and write what concerns jobs, which has a root of its own.
_WITH_JOBS: Final = (HUB,)


@dataclass(frozen=True, slots=True)
class Access:
    """Keys that a role may read, and with ``writes`` also write: all under a prefix, or one key."""

    key: str
    writes: bool = False

    @property
    def is_prefix(self) -> bool:
        """Whether all keys are meant that begin so."""
        return self.key.endswith("/")


def access_of(namespace: str, role: str) -> tuple[Access, ...]:
    """What a role may do in a namespace. Raise KeyError for an unknown role."""
    prefix, writes = namespace_prefix(namespace), WRITES[role]
    whole = (Access(prefix),) if role in _READ_ALL else ()
    read = () if role in _READ_ALL else OPEN_FAMILIES
    families = tuple(dict.fromkeys((*read, *writes)))
    jobs = (Access(jobs_root(namespace), writes=True),) if role in _WITH_JOBS else ()
    return (*whole, *(Access(f"{prefix}{family}", family in writes) for family in families), *jobs)


def access_of_all(namespace: str) -> tuple[Access, ...]:
    """All rights in a namespace, and in no other."""
    return Access(namespace_prefix(namespace), writes=True), Access(jobs_root(namespace), writes=True)


def roles_that_write(families: Collection[str]) -> tuple[str, ...]:
    """The roles that are whole for a user who may write these families; an observer writes nothing."""
    return tuple(role for role, writes in WRITES.items() if writes and set(writes) <= set(families))
