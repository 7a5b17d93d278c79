"""What a hub reports, as JSON in its beat."""

from __future__ import annotations

import msgspec

from omni_discovery.kv import KeyValue
from omni_discovery.records import keys
from omni_discovery.records.beat import BeatRecord, decode_beat, read_beats
from omni_discovery.records.health import HubHealth, ReplicaTrouble, StageFailures

KEY = keys.beat_key("n", "h")


def test_a_beat_without_a_report_has_the_bytes_of_the_release_before() -> None:
    assert b"health" not in msgspec.json.encode(BeatRecord(counter=1))
    assert decode_beat(KEY, b'{"counter":1}').health is msgspec.UNSET


def test_a_report_comes_back_as_it_was_and_one_that_all_is_well_is_short() -> None:
    health = HubHealth(
        requests=7,
        failures=[StageFailures(stage_id=1, failed=2, kinds={"EngineFailedError": 2}, last_at=5.0)],
        troubles=[ReplicaTrouble(stage_id=0, replica_id=3, kind="ejected", until=9.0, reason="why")],
    )
    assert decode_beat(KEY, msgspec.json.encode(BeatRecord(health=health))).health == health
    assert health.failed == 2
    assert health.troubles[0].name == "0/3"
    assert msgspec.json.encode(HubHealth()) == b"{}"


def test_words_and_fields_of_a_later_release_do_not_hide_a_beat() -> None:
    value = b'{"revision":7,"health":{"troubles":[{"stage_id":0,"replica_id":1,"kind":"haunted","by":3}],"mood":1}}'
    beat = decode_beat(KEY, value)
    assert isinstance(beat.health, HubHealth)
    assert (beat.revision, beat.health.troubles[0].kind) == (7, "haunted")


def test_of_a_namespaces_keys_only_beats_that_can_be_read_are_beats() -> None:
    items = [
        KeyValue(KEY, b'{"revision":3}', 1, 1, 0),
        KeyValue(keys.beat_key("n", "bad"), b"{", 1, 1, 0),
        KeyValue(keys.hub_key("n", "h"), b'{"hub_id":"h"}', 1, 1, 0),
    ]
    assert {hub_id: beat.revision for hub_id, beat in read_beats(items, "n", {"h", "bad"}).items()} == {"h": 3}
