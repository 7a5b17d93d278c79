"""Every length of time and every bound of a hub, checked against each other once.

Errors of the hub's own drivers; they never reach a client untyped.

OmniError
└── SendFailedError             the orchestrator: nothing left this process, another replica may take the work
    ├── QueueFullError              the replica reads too slowly
    └── NotConnectedError           the session to the replica is down

How one stage's pool waits, trusts and spares its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from omni_discovery.errors import ConfigError, OmniError


@dataclass(frozen=True, slots=True)
class HubConfig:
    """How long a hub waits and how much it holds. Raise ConfigError if the values don't go together."""

    #: Time given to a request that names none.
    request_timeout_s: float = 600.0
    #: How long a stage may have no replica before its request fails.
    pick_timeout_s: float = 10.0
    #: How long a replica may take to answer a dispatch with Accepted or Rejected before another one gets it, if there
    #: is one with a free slot; and how long at most.
    accept_timeout_s: float = 0.1
    accept_limit_s: float = 5.0
    #: How long an abort waits for the replicas' acknowledgement before its caller is let go.
    abort_timeout_s: float = 2.0
    #: How long a connection may take to become a session before it is made anew.
    connect_timeout_s: float = 3.0
    #: How long the encrypted handshake may take; a replica that does not know this hub yet leaves it without an answer.
    handshake_timeout_s: float = 0.5
    #: After so long without a session a replica that is listed is warned about, with the cause.
    unmet_after_s: float = 5.0
    #: Pause between two Hellos that got no Welcome.
    hello_interval_s: float = 0.2
    #: Bounds of the pause before a lost connection is tried again.
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 1.0
    #: ZMTP heartbeats: a peer silent for ``zmq_heartbeat_timeout_s`` has lost its session.
    zmq_heartbeat_interval_s: float = 1.0
    zmq_heartbeat_timeout_s: float = 3.0
    #: How long work whose output was shown waits for a lost session to come back and speak of it.
    silence_grace_s: float = 2.0
    #: A load that a frame brought is trusted over the registry's for this long.
    load_fresh_s: float = 1.0
    #: The TTL of the namespace's leases: within it, keys that vanish in numbers are not believed.
    registry_ttl_s: float = 10.0
    #: Requests that may be unfinished at one time; more are refused.
    max_in_flight: int = 4096
    #: Requests that may be on their way to one stage beyond what it can run; more are refused with the time to wait.
    max_waiting: int = 2048
    #: How often one stage of one request may be dispatched.
    attempts: int = 3
    #: Messages that may wait for one replica's socket.
    send_queue: int = 4096
    #: Outputs and bytes that may wait for one client that reads slowly; with half of either its stages are paused.
    max_queued_outputs: int = 512
    max_queued_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        """Check the values."""
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{item.name} is {value}; it must be a number above 0")
        if self.zmq_heartbeat_timeout_s <= self.zmq_heartbeat_interval_s:
            raise ConfigError(
                f"zmq_heartbeat_timeout_s ({self.zmq_heartbeat_timeout_s}) must be longer than"
                f" zmq_heartbeat_interval_s ({self.zmq_heartbeat_interval_s})"
            )
        if self.reconnect_max_s < self.reconnect_min_s:
            raise ConfigError("reconnect_max_s must not be below reconnect_min_s")
        if self.hello_interval_s >= self.connect_timeout_s:
            raise ConfigError("hello_interval_s must be shorter than connect_timeout_s, or no Hello is ever repeated")
        if not self.accept_timeout_s <= self.accept_limit_s < self.request_timeout_s:
            raise ConfigError(
                "accept_timeout_s, accept_limit_s and request_timeout_s must come in this order of length"
            )


class SendFailedError(OmniError):
    """A message was not handed to the socket; the other side can't have seen it."""


class QueueFullError(SendFailedError):
    """The socket's send queue is at its bound."""


class NotConnectedError(SendFailedError):
    """There is no session to send on."""


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
