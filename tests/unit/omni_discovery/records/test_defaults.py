"""What an absent field means is part of a record's format, as much as the fields that are written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from omni_discovery.records.api_key import ApiKeyRecord
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import HubHealth, ReplicaTrouble, StageFailures, StageLoad, UnreadAnswers
from omni_discovery.records.jobs import JobRecord
from omni_discovery.records.params import ParamBounds
from omni_discovery.records.schema import HubRecord, ReplicaRecord
from omni_discovery.records.waits import WaitEntry, WaitRecord
from tests.support.defaults import unusual_defaults

#: Empty, zero or false; 1 where the field counts from it; unset where "not said" differs from empty.
ZEROS: tuple[Any, ...] = ("", 0, 0.0, False, [], {}, None, UNSET)
OTHERS: dict[tuple[type[msgspec.Struct], str], Any] = {
    (ReplicaRecord, "capacity"): 1,
    (ReplicaRecord, "weight"): 1.0,
    (HubHealth, "window_s"): 300.0,
}
RECORDS: list[type[msgspec.Struct]] = [
    ApiKeyRecord,
    BeatRecord,
    HubHealth,
    HubRecord,
    JobRecord,
    ParamBounds,
    ReplicaRecord,
    ReplicaTrouble,
    StageFailures,
    StageLoad,
    UnreadAnswers,
    WaitEntry,
    WaitRecord,
]


@pytest.mark.parametrize("record", RECORDS)
def test_an_absent_field_means_nothing_said(record: type[msgspec.Struct]) -> None:
    for each in msgspec.structs.fields(record):
        if each.required:
            continue
        default = each.default if each.default is not msgspec.NODEFAULT else each.default_factory()
        if each.name == "schema" or (record, each.name) in OTHERS:
            assert default == OTHERS.get((record, each.name), 1), each.name
        else:
            assert default in ZEROS, each.name


def test_a_replica_of_which_nothing_is_known_has_one_slot_a_lease_and_no_id() -> None:
    found = unusual_defaults("omni_discovery.records")
    assert {name: default for name, default in found.items() if not name.endswith(".schema")} == {
        "HubHealth.window_s": 300.0,
        "ReplicaInfo.replica_id": -1,
        "ReplicaInfo.wire_version": 1,
        "ReplicaInfo.capacity": 1,
        "ReplicaInfo.weight": 1.0,
        "ReplicaInfo.leased": True,
        "ReplicaRecord.capacity": 1,
        "ReplicaRecord.weight": 1.0,
    }
