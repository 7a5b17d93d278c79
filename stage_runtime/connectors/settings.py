"""What a connector's ``extra`` may hold, checked before anything is built."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.store.store import Limits

#: What every connector that stores takes.
COMMON: Final = frozenset(
    {
        "device",
        "max_inflight",
        "max_inflight_bytes",
        "namespace",
        "pool_bytes",
        "shm_threshold_bytes",
        "stage_id",
        "ttl_s",
        "window_size",
    }
)
_MIB: Final = 1 << 20
_MOST_KEPT_FREE: Final = 512 * _MIB
_TTL_S: Final = 3600.0


def check_known(kind: str, config: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for a setting that the connector does not have."""
    if unknown := sorted(set(config) - set(known)):
        raise ConfigError(f"{kind}: unknown {unknown}; known are {sorted(known)}")


def number(config: Mapping[str, Any], name: str, default: float, least: float = 0) -> float:
    """A setting that is a number, at least ``least``. Raise ConfigError."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ConfigError(f"{name} is {value!r}; a number not below {least:g} is wanted")
    return value


def limits_of(config: Mapping[str, Any], directory: Path | None) -> Limits:
    """The bounds of an edge. Without ``directory`` they are parts of the machine's memory, else of its file system."""
    total = _memory_bytes() if directory is None else _file_system_bytes(directory)
    return Limits(
        max_inflight_bytes=int(number(config, "max_inflight_bytes", total // 2, 1)),
        pool_bytes=int(number(config, "pool_bytes", min(_MOST_KEPT_FREE, total // 8))),
        ttl_s=float(number(config, "ttl_s", _TTL_S)),
        window_size=_count(config, "window_size"),
        max_inflight=_count(config, "max_inflight"),
    )


def _count(config: Mapping[str, Any], name: str) -> int | None:
    # -1 is how pipelines of other makers write "no bound".
    value = config.get(name)
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; a whole number from 1 is wanted, or -1 for no bound")
    return value


def _memory_bytes() -> int:
    # Half of what is given to an edge, as a directory in memory would be.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _file_system_bytes(directory: Path) -> int:
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"{directory} is no folder to put hand-offs into: {error}") from error
    return status.f_frsize * status.f_blocks
