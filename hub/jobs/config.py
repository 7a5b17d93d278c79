"""JobsConfig: where a hub keeps its jobs, and how many. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hub.jobs.job import JobBounds

if TYPE_CHECKING:
    from hub.jobs.cipher import JobKeys


@dataclass(frozen=True, slots=True)
class JobsConfig:
    """The settings of jobs. Without a ``store`` and its ``keys``, a hub keeps its jobs to itself."""

    store: Path | None = None
    keys: JobKeys | None = None
    bounds: JobBounds = field(default_factory=JobBounds)
