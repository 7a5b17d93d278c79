"""JobsConfig: where a hub keeps its jobs, and how many. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hub.jobs.job import JobBounds
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from hub.jobs.cipher import JobKeys

#: Its processes find each other by IPv4 only.
_MASTER: Final = re.compile(r"mooncake://(?P<host>[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class MooncakeMaster:
    """Where the master of a Mooncake store listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """As ``--job-store`` has it."""
        return f"mooncake://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class JobsConfig:
    """The settings of jobs. Without a ``store`` and its ``keys``, a hub keeps its jobs to itself."""

    store: Path | MooncakeMaster | None = None
    keys: JobKeys | None = None
    bounds: JobBounds = field(default_factory=JobBounds)


def job_store_of(text: str) -> Path | MooncakeMaster:
    """The store that ``--job-store`` names: a folder, or a store by its URL. Raise ConfigError for any other URL."""
    if "://" not in text:
        return Path(text)
    found = _MASTER.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        wanted = "a folder or mooncake://HOST:PORT is wanted, the latter of a mooncake_master, with a name or by IPv4"
        raise ConfigError(f"--job-store {text}: {wanted}")
    return MooncakeMaster(found["host"], int(found["port"]))
