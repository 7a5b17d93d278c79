"""How one stage's pool waits, trusts and spares its replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from omni_discovery.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Raise ConfigError if a value makes no sense."""

    #: How long a stage may have nobody who can be picked before those that wait are told so.
    pick_timeout_s: float = 10.0
    #: A load that a frame brought is trusted over the registry's for this long.
    load_fresh_s: float = 1.0
    #: How long a replica that joins others at work takes to come to its full weight; 0 for at once.
    slow_start_s: float = 10.0
    #: Where this hub is: replicas that have all of these labels are near, and come first.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Bounds of the time for which a replica that keeps failing is left out; it doubles each time.
    ejection_min_s: float = 1.0
    ejection_max_s: float = 60.0

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("pick_timeout_s", "load_fresh_s", "ejection_min_s", "ejection_max_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; it must be a number above 0")
        if not (math.isfinite(self.slow_start_s) and self.slow_start_s >= 0):
            raise ConfigError(f"slow_start_s is {self.slow_start_s}; it must be 0 or a number above it")
        if self.ejection_max_s < self.ejection_min_s:
            raise ConfigError("ejection_max_s must not be below ejection_min_s")
