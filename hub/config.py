"""The settings of a hub and of its pools, checked when they are made; and the errors of connections to replicas.

OmniError
├── OutOfSocketsError           the operator, if it lasts: this process has no descriptor left; it is tried again
└── SendFailedError             the orchestrator retries: nothing left this process, another replica may take the work
    ├── QueueFullError              the send queue is full: the replica reads too slowly
    └── NotConnectedError           the session to the replica is down
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from omni_discovery.errors import ConfigError, InvalidRequestError, OmniError
from omni_discovery.wire import MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class ClientBounds:
    """What a client may ask for over HTTP. The bounds don't hold in Python, where the caller is the operator."""

    max_timeout_s: float = 3600.0
    #: Of queued requests, a lower priority goes first: by default no client gets in front of those that name none.
    least_priority: int = 0
    most_priority: int = MAX_PRIORITY

    def check_asked(self, timeout_s: float | None, priority: int) -> None:
        """Raise InvalidRequestError for a timeout or a priority that clients may not ask for."""
        if timeout_s is not None and timeout_s > self.max_timeout_s:
            raise InvalidRequestError(
                f"'timeout' is {timeout_s:g} s; this hub allows at most {self.max_timeout_s:g} (--max-timeout)"
            )
        if not self.least_priority <= priority <= self.most_priority:
            raise InvalidRequestError(
                f"'priority' is {priority}; this hub allows {self.least_priority} to {self.most_priority}"
                " (--priority-range); a lower number goes first"
            )


@dataclass(frozen=True, slots=True)
class RealtimeBounds:
    """What one session of /v1/realtime may take, and all of them together. All are above 0."""

    #: Sound of one turn: what replicas unpack of one request.
    max_turn_s: float = 600.0
    #: Items of one conversation, their parts, and the memory of them.
    max_items: int = 1000
    max_parts: int = 4096
    max_item_bytes: int = 16 << 20
    #: Memory of the sounds and items of all sessions of this hub.
    max_memory_bytes: int = 512 << 20
    #: How long a session may be without an event of its client, and without a response that is being made.
    idle_timeout_s: float = 600.0
    #: How long a session may last.
    max_session_s: float = 3600.0

    def __post_init__(self) -> None:
        """Check the values."""
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"realtime: {item.name} is {value}; it must be a number above 0")


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Timeouts (seconds) and bounds of a hub. Raise ConfigError if the values don't fit together."""

    #: Timeout of a request that names none.
    request_timeout_s: float = 600.0
    #: How long a request whose input comes in segments keeps its slots between two of them.
    stream_idle_timeout_s: float = 60.0
    #: What clients may ask for over HTTP.
    client_bounds: ClientBounds = ClientBounds()
    #: What the sessions of /v1/realtime may take.
    realtime_bounds: RealtimeBounds = RealtimeBounds()
    #: How long a request waits for a stage without a pickable replica before it fails.
    pick_timeout_s: float = 10.0
    #: A dispatch without Accepted or Rejected for so long goes to another replica with a free slot, if there is one;
    #: after ``accept_limit_s`` the replica counts as having failed it.
    accept_timeout_s: float = 0.1
    accept_limit_s: float = 5.0
    #: How long the caller of an abort waits for the replicas' acknowledgements.
    abort_timeout_s: float = 2.0
    #: How long a connection may take to become a session before it is closed and opened again.
    connect_timeout_s: float = 3.0
    #: How long the CURVE handshake may take; a replica that does not know this hub yet does not answer it.
    handshake_timeout_s: float = 0.5
    #: A registered replica without a session for so long is logged as a warning, with the cause.
    unmet_after_s: float = 5.0
    #: Interval between two Hellos without a Welcome.
    hello_interval_s: float = 0.2
    #: Bounds of the backoff before a lost connection is opened again.
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 1.0
    #: ZMTP heartbeats: without one for ``zmq_heartbeat_timeout_s`` the session is lost. What the system of a replica's
    #: host does not acknowledge for as long ends a connection, too.
    zmq_heartbeat_interval_s: float = 0.5
    zmq_heartbeat_timeout_s: float = 2.5
    #: How long a stage whose output the client has seen waits for its lost session to come back.
    silence_grace_s: float = 2.0
    #: How long the load in a replica's frame counts instead of the load in the registry.
    load_fresh_s: float = 1.0
    #: The TTL of the namespace's leases: after a mass loss of records, replicas that answer stay in service so long.
    registry_ttl_s: float = 10.0
    #: Requests in flight; more are refused.
    max_in_flight: int = 4096
    #: Requests of one stage beyond its slots; more are refused, with a Retry-After.
    max_waiting: int = 2048
    #: Attempts of one stage of one request.
    attempts: int = 3
    #: Messages in the send queue of one replica.
    send_queue: int = 4096
    #: Messages of one replica that this process holds before it has looked at them; the others wait at the replica.
    receive_queue: int = 16
    #: Whether replicas of releases before may send messages of any size. They do so in one frame, which then bounds as
    #: little what any replica's handshake brings.
    former_replicas: bool = False
    #: Outputs and bytes that may wait for one client; its stages are paused from half of either on.
    max_queued_outputs: int = 512
    max_queued_bytes: int = 256 << 20
    #: Bytes that may wait for all clients together: beyond, the stages of a request are paused from 1 MiB on, and it
    #: ends if 16 MiB more come all the same.
    max_unread_bytes: int = 2 << 30
    #: Receipts of requests that ended, for those who ask why; 0 keeps none.
    receipts: int = 10_000

    def __post_init__(self) -> None:
        """Check the values."""
        for item in fields(self):
            value = getattr(self, item.name)
            is_none = item.name == "receipts" and value == 0
            is_number = isinstance(value, float | int) and not isinstance(value, bool)
            if is_number and not (math.isfinite(value) and value > 0) and not is_none:
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


class OutOfSocketsError(OmniError):
    """No file descriptor is left in this process for a connection to a replica."""


class SendFailedError(OmniError):
    """A message was not sent; the replica can't have seen it."""


class QueueFullError(SendFailedError):
    """The send queue of the replica is full."""


class NotConnectedError(SendFailedError):
    """There is no session with the replica."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Settings of one stage's pool of replicas. Raise ConfigError for a value out of range."""

    #: How long picks wait for a stage without a pickable replica before they fail.
    pick_timeout_s: float = 10.0
    #: How long the load in a replica's frame counts instead of the load in the registry.
    load_fresh_s: float = 1.0
    #: Slow start: how long a replica that joins busy ones takes to its full weight; 0 for none.
    slow_start_s: float = 10.0
    #: Labels of this hub's place: replicas that have all of them are local and are picked first.
    labels: Mapping[str, str] = field(default_factory=dict)
    #: Bounds of the time for which an outlier is ejected; it doubles each time.
    ejection_min_s: float = 1.0
    ejection_max_s: float = 60.0
    #: Whether each pick keeps what the pool looked like.
    keeps_snapshots: bool = False

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
