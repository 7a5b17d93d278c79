"""RegistryConfig: how one process talks to the registry, with its times checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omni_discovery.endpoints import parse_endpoints
from omni_discovery.errors import ConfigError
from omni_discovery.keys import check_namespace
from omni_discovery.registry_security import RegistrySecurity


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """Frozen and complete. Raises ConfigError when built from values that can't work together."""

    #: Given in any way that parse_endpoints reads, kept as its tuple.
    endpoints: str | Sequence[str]
    namespace: str = "default"
    #: With TLS too where the endpoints ask for it.
    security: RegistrySecurity = field(default_factory=RegistrySecurity)
    #: Length of the lease asked for; a replica that stops renewing is gone after this.
    ttl_s: float = 10.0
    #: The load alone is published at most this often.
    load_interval_s: float = 0.5
    #: A withdrawal waits so long for the registry, then leaves the record to expire.
    close_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        """Check each value and how they fit together."""
        object.__setattr__(self, "security", self.security.for_endpoints(self.endpoints))
        object.__setattr__(self, "endpoints", parse_endpoints(self.endpoints))
        check_namespace(self.namespace)
        # etcd counts leases in whole seconds, and three renewals must fit into one.
        _check_length("ttl_s", self.ttl_s, 1.0, 3600.0)
        # Load that is older than a lease could be that of a dead replica.
        _check_length("load_interval_s", self.load_interval_s, 0.01, self.ttl_s)
        _check_length("close_timeout_s", self.close_timeout_s, 0.1, 60.0)

    @property
    def try_timeout_s(self) -> float:
        """One attempt of one call: three renewals must fit into one TTL."""
        return min(2.0, self.ttl_s / 3)

    @property
    def call_timeout_s(self) -> float:
        """No new attempt of a call begins later than this after the first."""
        return 2 * self.try_timeout_s


def _check_length(name: str, value_s: float, least_s: float, most_s: float) -> None:
    # Written so that NaN fails too.
    if not least_s <= value_s <= most_s:
        right = f"from {least_s:g} to {most_s:g} with the other times as they are"
        name = f"{name} (--omni-heartbeat-timeout)" if name == "ttl_s" else name
        raise ConfigError(f"{name} is {value_s!r}; right would be {right}")
