"""Records of replicas and hubs, and the types that hubs and balancers see of them.

``ReplicaStatus``, ``ReplicaInfo``, ``ReplicaList`` and ``ReplicaEvent`` keep the names and fields that users of
vLLM-Omni's coordinator know. ``ReplicaRecord`` is the JSON under one leased key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec

from omni_discovery.errors import RecordError
from omni_discovery.records.params import ParamBounds
from omni_discovery.records.sizes import check_value
from omni_discovery.text import is_shown, one_line

#: Version of the JSON written by this release. Readers take any version whose known fields decode.
SCHEMA: Final = 1
#: The largest weight of a replica, in its record and in an operator's control key.
MOST_WEIGHT: Final = 1000.0
#: Voices that a replica may name.
MOST_VOICES: Final = 256
#: Parameters of which it may say what they may be.
MOST_PARAMS: Final = 64


#: The phase of a replica that is starting and waits for its hand-off store.
WAITING_PHASE: Final = "waiting"
#: The reason of a replica that drains, and withdraws, since its control key says so.
DRAINED_BY_OPERATOR: Final = "drained by an operator"
#: How the reason of a replica begins that is starting anew and has no reason of its own yet.
FORMER_END: Final = "the process before it: "


def own_reason(reason: str) -> str:
    """The reason of a record unless it is about the process before; empty then."""
    return "" if reason.startswith(FORMER_END) else reason


class ReplicaStatus(StrEnum):
    """The state in a replica's record; only replicas that are ``up`` are picked."""

    UP = "up"
    DOWN = "down"
    ERROR = "error"
    STARTING = "starting"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """One replica as a hub sees it. The first seven fields are the coordinator's; all others have defaults.

    ``last_heartbeat`` and ``registered_at`` are wall-clock seconds of the record's last and first write. ``epoch`` is
    the creation revision of the key: one life of the replica. ``leased``: whether the key ends with a lease, as that of
    every replica does; ``lease_id`` is that lease, 0 if it is not known.
    """

    input_addr: str
    output_addr: str
    stage_id: int
    status: ReplicaStatus
    queue_length: int
    last_heartbeat: float
    registered_at: float
    replica_id: int = -1
    epoch: int = 0
    phase: str = ""
    progress: float = 0.0
    reason: str = ""
    capacity: int = 1
    weight: float = 1.0
    host: str = ""
    pid: int = 0
    device: str = ""
    model: str = ""
    fingerprint: str = ""
    version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    curve_public_key: str = ""
    connectors: Mapping[str, Any] = field(default_factory=dict)
    control_revision: int = 0
    control_error: str = ""
    cordoned: bool = False
    revision: str = ""
    dtype: str = ""
    tokenizer: str = ""
    content: str = ""
    code: str = ""
    deterministic: bool = False
    partial_images: bool = False
    voices: Sequence[str] = field(default_factory=list)
    #: The parameters of a request by name; None: not told.
    params: Mapping[str, ParamBounds] | None = None
    lost_slots: int = 0
    process: str = ""
    #: The newest version of messages that it takes and sends.
    wire_version: int = 1
    leased: bool = True
    lease_id: int = 0

    @property
    def name(self) -> str:
        """What logs, tables, errors and metrics call it: ``<stage>/<replica id>``."""
        return f"{self.stage_id}/{self.replica_id}"

    @property
    def takes_new_work(self) -> bool:
        """Whether the record allows picks: it is up, not cordoned, and its weight is not 0."""
        return self.status is ReplicaStatus.UP and not self.cordoned and self.weight > 0


@dataclass(frozen=True, slots=True)
class ReplicaList:
    """All replicas of a view. ``timestamp`` is the wall-clock time of the last applied change, 0.0 before the first.

    ``stale_since_s`` is the wall-clock time since when the view is stale; None while it is fresh.
    """

    replicas: list[ReplicaInfo]
    timestamp: float
    stale_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """The coordinator's wire event, kept for code that still builds it; the registry itself needs none."""

    input_addr: str
    output_addr: str
    stage_id: int
    event_type: str
    status: ReplicaStatus
    queue_length: int


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Params = Annotated[dict[_Name, ParamBounds], msgspec.Meta(max_length=MOST_PARAMS)]
_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON under one replica's leased key. Holds no prompt and no secret."""

    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA
    stage_id: _Id
    replica_id: _Id
    input_addr: _Address
    output_addr: _Address
    status: ReplicaStatus
    epoch: _Count = 0
    phase: _Text = ""
    progress: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    reason: _Text = ""
    queue_length: _Count = 0
    capacity: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 1
    weight: Annotated[float, msgspec.Meta(ge=0, le=MOST_WEIGHT)] = 1.0
    registered_at: float = 0.0
    updated_at: float = 0.0
    host: _Text = ""
    pid: _Count = 0
    device: _Text = ""
    model: _Text = ""
    fingerprint: _Text = ""
    version: _Text = ""
    labels: dict[str, str] = {}
    curve_public_key: _Text = ""
    connectors: dict[str, Any] = {}
    control_revision: _Count = 0
    control_error: _Text = ""
    cordoned: bool = False
    #: What it has loaded, each empty if not known: the model's revision and dtype, hashes of its tokenizer and of all
    #: its files, and the code that serves it.
    revision: _Text = ""
    dtype: _Text = ""
    tokenizer: _Text = ""
    content: _Text = ""
    code: _Text = ""
    #: Whether its output is a function of a request's input and seed: another replica makes the same again.
    deterministic: bool | msgspec.UnsetType = msgspec.UNSET
    #: Whether it takes the parameter ``partial_images``: unfinished pictures come before a finished one.
    partial_images: bool | msgspec.UnsetType = msgspec.UNSET
    #: The names of the voices that it can speak with; absent for none.
    voices: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MOST_VOICES)] | msgspec.UnsetType = msgspec.UNSET
    #: What a request's parameters may be, by name: it refuses all others. Absent: not told.
    params: _Params | msgspec.UnsetType = msgspec.UNSET
    #: Slots that serve nobody though requests wait, as ``reason`` says; absent for none.
    lost_slots: _Count | msgspec.UnsetType = msgspec.UNSET
    #: What no other process has, see ``processes.process_mark``; absent: not known.
    process: _Text | msgspec.UnsetType = msgspec.UNSET
    #: The newest version of messages that it takes and sends; absent: the first.
    wire_version: _Count | msgspec.UnsetType = msgspec.UNSET

    def to_info(self, epoch: int, *, leased: bool = True, lease_id: int = 0) -> ReplicaInfo:
        """The replica as balancers see it, in the life that the key's creation revision ``epoch`` names."""
        fields = {name: value for name in _SHARED_FIELDS if (value := getattr(self, name)) is not msgspec.UNSET}
        if "voices" in fields:
            fields["voices"] = list(fields["voices"])
        return ReplicaInfo(**fields, last_heartbeat=self.updated_at, epoch=epoch, leased=leased, lease_id=lease_id)


#: Fields of ReplicaInfo that are copied from the record's field of the same name. The epoch is the key's, whatever the
#: record holds.
_SHARED_FIELDS: Final = tuple(
    sorted({each.name for each in dataclasses.fields(ReplicaInfo)} & set(ReplicaRecord.__struct_fields__) - {"epoch"})
)


class HubRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON under one hub's leased key: a hub that may connect to replicas."""

    hub_id: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    curve_public_key: _Text = ""
    schema: Annotated[int, msgspec.Meta(ge=1)] = SCHEMA
    address: _Text = ""
    host: _Text = ""
    pid: _Count = 0
    version: _Text = ""
    started_at: float = 0.0
    #: The URL of its port for operators, where other machines reach it; which asks for a token.
    admin: _Text | msgspec.UnsetType = msgspec.UNSET
    #: The newest version of messages that it takes and sends; absent: the first.
    wire_version: _Count | msgspec.UnsetType = msgspec.UNSET


_encoder = msgspec.json.Encoder()
_replica_decoder = msgspec.json.Decoder(ReplicaRecord)
_hub_decoder = msgspec.json.Decoder(HubRecord)


def encode_record(record: ReplicaRecord | HubRecord) -> bytes:
    """The record as readable JSON, one line."""
    return _encoder.encode(record)


def decode_replica(key: str, stage_id: int, replica_id: int, value: bytes) -> ReplicaRecord:
    """Decode a replica's record. Raise RecordError if it is not valid or belongs under another key."""
    record = _decode(_replica_decoder, key, value)
    if (record.stage_id, record.replica_id) != (stage_id, replica_id):
        raise RecordError(key, f"holds the record of replica {record.stage_id}/{record.replica_id}")
    return record


def decode_hub(key: str, hub_id: str, value: bytes) -> HubRecord:
    """Decode a hub's record. Raise RecordError if it is not valid or belongs under another key."""
    record = _decode(_hub_decoder, key, value)
    if record.hub_id != hub_id:
        raise RecordError(key, f"holds the record of hub {record.hub_id!r}")
    return record


_Record = TypeVar("_Record", ReplicaRecord, HubRecord)


def _printable(record: _Record) -> _Record:
    """The record with what a terminal might obey as underscores: its texts go into logs, errors and tables."""
    changes: dict[str, Any] = {
        name: one_line(text)
        for name in record.__struct_fields__
        if type(text := getattr(record, name)) is str and not is_shown(text)
    }
    if isinstance(voices := getattr(record, "voices", None), tuple):
        changes["voices"] = tuple(map(one_line, voices))
    return msgspec.structs.replace(record, **changes) if changes else record


def _decode(decoder: msgspec.json.Decoder[_Record], key: str, value: bytes) -> _Record:
    check_value(key, value)
    try:
        record = decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise RecordError(key, str(error)) from error
    # Without these bytes nothing in it can be unprintable: JSON has no plain control character but the last.
    is_plain = value.isascii() and b"\\" not in value and b"\x7f" not in value
    return record if is_plain else _printable(record)
