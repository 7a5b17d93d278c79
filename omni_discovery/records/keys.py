"""The layout of the registry's keys: how they are built and what a key means.

Every prefix ends in ``/``, so that namespace ``a`` never sees the keys of ``ab``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from omni_discovery.errors import ConfigError

ROOT = "/omni/v1/"
#: Of the jobs of all namespaces, see ``jobs.py``.
JOBS_ROOT = "/omni/v1-jobs/"

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class ReplicaKey:
    """``replicas/<stage_id>/<replica_id>``."""

    stage_id: int
    replica_id: int


@dataclass(frozen=True, slots=True)
class HubKey:
    """``hubs/<hub_id>``."""

    hub_id: str


@dataclass(frozen=True, slots=True)
class BeatKey:
    """``beats/<hub_id>``."""

    hub_id: str


@dataclass(frozen=True, slots=True)
class ReplicaControlKey:
    """``control/<stage_id>/<replica_id>``."""

    stage_id: int
    replica_id: int


@dataclass(frozen=True, slots=True)
class HubControlKey:
    """``control/hubs/<hub_id>``."""

    hub_id: str


@dataclass(frozen=True, slots=True)
class PipelineKey:
    """``pipeline``."""


@dataclass(frozen=True, slots=True)
class ApiKeyKey:
    """``keys/<name>``."""

    name: str


@dataclass(frozen=True, slots=True)
class WaitKey:
    """``waits/<name>``, of a process that waits."""

    name: str


RegistryKey = ReplicaKey | HubKey | BeatKey | ReplicaControlKey | HubControlKey | PipelineKey | ApiKeyKey | WaitKey


def check_hub_id(hub_id: str) -> str:
    """Return ``hub_id`` if it is valid in a key, else raise ConfigError."""
    if not _HUB_ID.fullmatch(hub_id):
        raise ConfigError(
            f"{hub_id!r} is no hub's id: those start with a letter or digit, "
            "then letters, digits, '.', '_' or '-', 63 at most; `omni hubs` shows them"
        )
    return hub_id


def check_key_name(name: str) -> str:
    """Return ``name`` if a key can be called so, else raise ConfigError."""
    if not _KEY_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} can't be a key's name: start with a letter or digit, then letters, digits, '.', '_' or '-', 63"
            " at most"
        )
    return name


def is_key_name(name: str) -> bool:
    """Whether a key can be called so."""
    return _KEY_NAME.fullmatch(name) is not None


def check_namespace(namespace: str) -> str:
    """Return ``namespace`` if it is valid in a key, else raise ConfigError."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace {namespace!r} can't be used: start with a letter or digit, "
            "then letters, digits, '.', '_' or '-', 63 at most"
        )
    return namespace


def namespace_prefix(namespace: str) -> str:
    """The prefix of all keys of one namespace."""
    return f"{ROOT}{check_namespace(namespace)}/"


def replicas_prefix(namespace: str, stage_id: int | None = None) -> str:
    """The prefix of all replica records, or of one stage's."""
    prefix = f"{namespace_prefix(namespace)}replicas/"
    return prefix if stage_id is None else f"{prefix}{stage_id}/"


def replica_key(namespace: str, stage_id: int, replica_id: int) -> str:
    """The leased key of one replica."""
    return f"{replicas_prefix(namespace, stage_id)}{replica_id}"


def hubs_prefix(namespace: str) -> str:
    """The prefix of all hub keys: the only hub keys that replicas watch."""
    return f"{namespace_prefix(namespace)}hubs/"


def hub_key(namespace: str, hub_id: str) -> str:
    """The leased key of one hub."""
    return f"{hubs_prefix(namespace)}{hub_id}"


def beats_prefix(namespace: str) -> str:
    """The prefix of all hubs' beats."""
    return f"{namespace_prefix(namespace)}beats/"


def beat_key(namespace: str, hub_id: str) -> str:
    """The leased key that a hub rewrites to prove its view fresh."""
    return f"{beats_prefix(namespace)}{hub_id}"


def replica_control_key(namespace: str, stage_id: int, replica_id: int) -> str:
    """The key by which an operator controls one replica."""
    return f"{namespace_prefix(namespace)}control/{stage_id}/{replica_id}"


def hub_controls_prefix(namespace: str) -> str:
    """The prefix of the keys by which an operator revokes hubs."""
    return f"{namespace_prefix(namespace)}control/hubs/"


def hub_control_key(namespace: str, hub_id: str) -> str:
    """The key by which an operator revokes one hub."""
    return f"{hub_controls_prefix(namespace)}{hub_id}"


def waits_prefix(namespace: str) -> str:
    """The prefix of what processes without a record wait for."""
    return f"{namespace_prefix(namespace)}waits/"


def wait_key(namespace: str, name: str) -> str:
    """The leased key in which a process says what it waits for; ``name`` tells such processes apart."""
    return f"{waits_prefix(namespace)}{name}"


def pipeline_key(namespace: str) -> str:
    """The key of the deploy document in force."""
    return f"{namespace_prefix(namespace)}pipeline"


def api_keys_prefix(namespace: str) -> str:
    """The prefix of the hashes of all API keys, which only hubs and operators have to read."""
    return f"{namespace_prefix(namespace)}keys/"


def api_key_key(namespace: str, name: str) -> str:
    """The key that holds the hash of one API key."""
    return f"{api_keys_prefix(namespace)}{name}"


def parse_key(namespace: str, key: str) -> RegistryKey | None:
    """Parse a key of this namespace; None for a key that this project does not use."""
    prefix = namespace_prefix(namespace)
    if not key.startswith(prefix):
        return None
    match key[len(prefix) :].split("/"):
        case ["pipeline"]:
            return PipelineKey()
        case ["replicas", stage_id, replica_id] if _are_numbers(stage_id, replica_id):
            return ReplicaKey(int(stage_id), int(replica_id))
        case ["control", "hubs", hub_id] if _HUB_ID.fullmatch(hub_id):
            return HubControlKey(hub_id)
        case ["control", stage_id, replica_id] if _are_numbers(stage_id, replica_id):
            return ReplicaControlKey(int(stage_id), int(replica_id))
        case ["hubs", hub_id] if _HUB_ID.fullmatch(hub_id):
            return HubKey(hub_id)
        case ["beats", hub_id] if _HUB_ID.fullmatch(hub_id):
            return BeatKey(hub_id)
        case ["keys", name] if _KEY_NAME.fullmatch(name):
            return ApiKeyKey(name)
        case ["waits", name] if _HUB_ID.fullmatch(name):
            return WaitKey(name)
        case _:
            return None


def _are_numbers(*parts: str) -> bool:
    return all(_NUMBER.fullmatch(part) for part in parts)
