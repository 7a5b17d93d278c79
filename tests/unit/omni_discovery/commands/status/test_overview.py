"""What is there beside what is asked for; what nobody says is None."""

from __future__ import annotations

import msgspec

from omni_discovery.commands.findings.checks import Evidence
from omni_discovery.commands.status.overview import HubSummary, Loading, hub_lines, stage_lines
from omni_discovery.kv import KeyValue, Listing
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord
from omni_discovery.records.health import HubHealth, StageFailures, StageLoad
from omni_discovery.records.schema import HubRecord, ReplicaRecord, ReplicaStatus, encode_record
from omni_discovery.view.table import ReplicaTable

NOW_S = 5000.0
PIPELINE = b'{"stages": [{"stage_id": 0, "engine": "echo", "runtime": {"num_replicas": 3}, "final_output": "text"}]}'


def evidence(*items: tuple[str, bytes]) -> Evidence:
    listed = tuple(KeyValue(key, value, at, at, 7) for at, (key, value) in enumerate(items, 10))
    table = ReplicaTable("n")
    table.replace(Listing(99, 1, listed), NOW_S)
    return Evidence("n", table.snapshot(), listed, NOW_S)


def replica(replica_id: int, status: ReplicaStatus, stage_id: int = 0, **fields: object) -> tuple[str, bytes]:
    record = ReplicaRecord(
        stage_id=stage_id, replica_id=replica_id, input_addr="tcp://h:1", output_addr="tcp://h:2", status=status
    )
    return keys.replica_key("n", stage_id, replica_id), encode_record(msgspec.structs.replace(record, **fields))


def hub(hub_id: str, health: HubHealth | None = None) -> list[tuple[str, bytes]]:
    found = [(keys.hub_key("n", hub_id), encode_record(HubRecord(hub_id=hub_id, host="front")))]
    if health is not None:
        found.append((keys.beat_key("n", hub_id), msgspec.json.encode(BeatRecord(written_at=NOW_S, health=health))))
    return found


FORCE = (keys.pipeline_key("n"), PIPELINE)
STAGES = (
    replica(0, ReplicaStatus.UP, capacity=8, queue_length=3),
    replica(1, ReplicaStatus.STARTING, phase="loading the model", progress=0.5),
    replica(2, ReplicaStatus.DRAINING),
    replica(0, ReplicaStatus.UP, stage_id=4, cordoned=True),
)


def test_each_stage_has_what_is_asked_for_beside_what_is_there() -> None:
    health = HubHealth(
        failures=[StageFailures(stage_id=0, failed=2)], loads=[StageLoad(stage_id=0, waiting=5, refused=7)]
    )
    first, other = stage_lines(evidence(FORCE, *STAGES, *hub("a", health), *hub("b", HubHealth(loads=[]))))
    assert (first.asked, first.up, first.starting, first.other) == (3, 1, 1, 1)
    assert (first.busy, first.slots, first.waiting, first.failed, first.refused) == (3, 8, 5, 2, 7)
    assert first.loading == (Loading("0/1", "loading the model", 0.5),)
    assert (other.stage_id, other.asked, other.up, other.other) == (4, None, 0, 1)


def test_what_a_hub_does_not_say_is_not_known_and_not_zero() -> None:
    (silent,) = stage_lines(evidence(FORCE, *hub("a")))
    assert (silent.waiting, silent.failed, silent.refused) == (None, None, None)
    (older,) = stage_lines(evidence(FORCE, *hub("a", HubHealth())))
    assert (older.waiting, older.failed, older.refused) == (None, 0, None)
    (nobody,) = stage_lines(evidence(FORCE))
    assert nobody.waiting is None


def test_a_document_that_can_not_be_read_asks_for_nothing() -> None:
    (line,) = stage_lines(evidence((keys.pipeline_key("n"), b"{"), STAGES[0]))
    assert (line.asked, line.engine, line.up) == (None, "", 1)


def test_a_hub_that_has_not_beaten_has_no_age_and_no_count() -> None:
    young, old = hub_lines(evidence(*hub("a"), *hub("b", HubHealth(requests=9))))
    assert young == HubSummary("a", "front", False, None, None, None, 0.0)
    assert (old.beat_age_s, old.requests, old.failed) == (0.0, 9, 0)
