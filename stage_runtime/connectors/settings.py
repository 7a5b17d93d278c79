"""Checks of the settings in a connector's ``extra``, made before the connector is."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from omni_discovery.deploy.trust.connector_settings import OF_MODEL_CODE
from omni_discovery.errors import ConfigError
from stage_runtime.connectors.store.store import Limits

#: The settings of every connector that stores hand-offs.
COMMON: Final = frozenset(
    {
        "by_key",
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
    """Raise ConfigError for settings that the connector does not have; ``kind`` is its name.

    Those of vLLM-Omni's model code are taken: the model code that reads them is not here.
    """
    unknown = sorted(str(name) for name in set(config) - set(known) - OF_MODEL_CODE)
    if unknown:
        told = "; ".join(_hint(name, known) for name in unknown)
        raise ConfigError(f"{kind}: {told}; known are {', '.join(sorted(known))}")


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, [*known, *OF_MODEL_CODE], n=1)
    return f"{name!r} is not known" + (f" (did you mean {near[0]!r}?)" if near else "")


def number(config: Mapping[str, Any], name: str, default: float, least: float = 0) -> float:
    """Return a setting that is a number. Raise ConfigError for any other value and for one below ``least``."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ConfigError(f"{name} is {value!r}; a number not below {least:g} is wanted")
    return value


def limits_of(config: Mapping[str, Any], directory: Path | None) -> Limits:
    """Return the bounds of an edge. Defaults are parts of the directory's file system, or of memory without one."""
    total = _memory_bytes() if directory is None else _file_system_bytes(directory)
    return Limits(
        max_inflight_bytes=int(number(config, "max_inflight_bytes", total // 2, 1)),
        pool_bytes=int(number(config, "pool_bytes", min(_MOST_KEPT_FREE, total // 8))),
        ttl_s=float(number(config, "ttl_s", _TTL_S)),
        window_size=_count(config, "window_size"),
        max_inflight=_count(config, "max_inflight"),
    )


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a setting that is true or false. Raise ConfigError for any other value."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; true or false is wanted")
    return value


def port(config: Mapping[str, Any], name: str) -> int:
    """Return a setting that is a port; 0, the default and ``auto``, is any. Raise ConfigError for any other value."""
    value = config.get(name) or 0
    if value == "auto":
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 65536:
        raise ConfigError(f"{name} is {value!r}; a port is wanted, or 0 for any")
    return value


def _count(config: Mapping[str, Any], name: str) -> int | None:
    # Documents written for vLLM-Omni have -1 for "no bound".
    value = config.get(name)
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; a whole number from 1 is wanted, or -1 for no bound")
    return value


def _memory_bytes() -> int:
    # Half of the memory, as the default size of a file system in memory.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _file_system_bytes(directory: Path) -> int:
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"{directory} is no folder to put hand-offs into: {error}") from error
    return status.f_frsize * status.f_blocks
