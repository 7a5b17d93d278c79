"""The settings of a replica and of its supervisor, checked when they are made; and the errors of a replica.

OmniError
├── SerializationError      the other stage: the bytes are no hand-off, or an object in it can't be sent
├── PayloadError            the hub, by itself: the hand-off is gone; the stage before has to run again
├── ControlRefusedError     the caller: the engine has no such method, doesn't allow it, or its answer is too long
├── NotResumableError       the client: has to retry; the answer can't be continued exactly where it broke off
└── EngineDeadError         the operator: the engine raised; the process ends and is restarted
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from omni_discovery.commands.stage_options import ReplicaOptions, StageOptions
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.etcd.config import RegistryConfig
from omni_discovery.records.keys import check_namespace
from omni_discovery.wire import MAX_ATTACHMENT_BYTES, MAX_HEAD_BYTES

#: A hub that has died is gone from the registry after a TTL, plus the time that etcd takes to expire its lease.
_EXPIRY_MARGIN_S: Final = 3.0


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The data plane of one replica."""

    #: A connection whose other host acknowledges nothing for so long is lost.
    dead_after_ms: int = 3000
    #: Requests that may be queued beyond the engine's capacity.
    max_waiting: int = 256
    #: Requests that may be parked beside those, each for a client that is behind with its output. For one more, that
    #: ends which has been parked for longest.
    max_parked: int = 4096
    #: Multiparts that ZMQ may hold for one connection. Few, so that a hub which does not read is soon noticed.
    send_queue: int = 64
    #: Multiparts of one connection that ZMQ may hold before they are looked at, of 4 MiB at most; the others wait at
    #: the hub.
    receive_queue: int = 16
    #: Messages and bytes that may be queued for one hub behind these. From half of either on, its requests are paused
    #: until it has read; where that does not help, those end that take most.
    outbox_messages: int = 8192
    outbox_bytes: int = 256 << 20
    #: How long on balance a request may keep a slot without using it, since it waits for input or for its client, and
    #: nothing is heard of it, while other hubs wait and its own has more than its share; three times as long where it
    #: has more only since shares are no whole slots. More than hubs let pass between two segments (60 s), and than
    #: engines that take pieces work on what they have without a word.
    keep_slot_s: float = 90.0
    #: How long the requests of a hub that is unreachable, or reads nothing, go on.
    hub_grace_s: float = 10.0

    def __post_init__(self) -> None:
        """Raise ConfigError for values that don't fit together."""
        least = min(self.max_waiting, self.max_parked, self.hub_grace_s)
        least = min(least, self.send_queue - 1, self.receive_queue - 1, self.outbox_messages - 1)
        if least < 0:
            raise ConfigError(
                "max_waiting, max_parked and hub_grace_s are at least 0, send_queue, receive_queue and outbox_messages"
                " at least 1"
            )
        if self.outbox_bytes < MAX_HEAD_BYTES + MAX_ATTACHMENT_BYTES:
            raise ConfigError("outbox_bytes must have room for the longest message there can be")


class ReplicaConfig(ReplicaOptions, frozen=True, kw_only=True):
    """One replica process. It listens on ``bind_host``; its record says ``advertise_host``."""

    ordinal: int = 0
    bind_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    #: Process id of the supervisor, with which the replica ends; 0 for none.
    parent_pid: int = 0
    #: How long the sockets and the engine may take to close before the process ends without them.
    close_timeout_s: float = 12.0
    #: How long loading may take before the lease is no longer renewed.
    load_timeout_s: float = 1800.0
    #: How long to wait for the namespace's deploy document.
    pipeline_wait_s: float = 600.0
    #: The deploy document as the supervisor read it, for a start while etcd is unreachable.
    known_pipeline: str = ""
    #: How the previous process of this replica ended, for the record; empty for the first.
    former_end: str = ""
    #: Whether the supervisor wants samples of the replica's state, for metrics.
    sampled: bool = False
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        check_namespace(self.namespace)
        if self.stage_id < 0:
            raise ConfigError(f"--stage-id must be 0 or more, not {self.stage_id}")
        if not self.ttl_s > 0:
            raise ConfigError(f"--omni-heartbeat-timeout must be more than 0 seconds, not {self.ttl_s}")
        if not self.endpoints.strip():
            raise ConfigError("no etcd known: give --etcd-endpoints HOST:PORT")
        if not (self.drain_timeout_s >= 0 and math.isfinite(self.drain_timeout_s)):
            raise ConfigError(f"--drain-timeout must be a number of seconds, 0 or more, not {self.drain_timeout_s}")
        if not (self.stall_after_s > 0 and math.isfinite(self.stall_after_s)):
            raise ConfigError(f"--stall-after must be a number of seconds, more than 0, not {self.stall_after_s}")
        RegistryConfig(self.endpoints, self.namespace, self.security, ttl_s=self.ttl_s)

    @property
    def ack_timeout_s(self) -> float:
        """How long a drain waits for the hubs' acknowledgements, also while etcd is unreachable.

        By then a live hub has acknowledged, and a dead one is gone from the registry.
        """
        return self.ttl_s + _EXPIRY_MARGIN_S


def replica_config(options: StageOptions, bind_host: str, advertise_host: str, parent_pid: int) -> ReplicaConfig:
    """The settings that all replicas of a stage share, checked. Raise ConfigError."""
    shared = {name: getattr(options, name) for name in ReplicaOptions.__struct_fields__}
    return ReplicaConfig(**shared, bind_host=bind_host, advertise_host=advertise_host, parent_pid=parent_pid)


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` local replicas of one stage. ``replica`` holds the settings of each, but for its ordinal."""

    replica: ReplicaConfig
    count: int = 1
    #: Process id of the hub that started this supervisor; when it is gone, all replicas drain. 0 for none.
    parent_pid: int = 0
    #: Replicas that still run so long after the drain's timeout are killed.
    kill_after_s: float = 20.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        if not 1 <= self.count <= 1024:
            raise ConfigError(f"--omni-dp-size-local must be from 1 to 1024, not {self.count}")


class SerializationError(OmniError, ValueError):
    """An object can't be encoded as a hand-off, or bytes can't be decoded as one."""


class PayloadError(OmniError):
    """A hand-off could not be stored, or is gone.

    ``from_stage`` is the stage whose replica has to answer for that; None: nobody but this replica, or nobody at all.
    """

    def __init__(self, message: str, from_stage: int | None = None) -> None:
        super().__init__(message)
        self.from_stage = from_stage


class NotResumableError(OmniError):
    """An answer that another replica has begun can't be continued here exactly; the message says why."""


class ControlRefusedError(OmniError):
    """A control call is refused, or its result can't be sent; the message says why."""


class EngineDeadError(OmniError):
    """The engine raised while it worked; none of its requests can be finished."""
