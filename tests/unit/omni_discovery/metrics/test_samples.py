"""The latest samples of one host: what is kept, and for how long."""

from __future__ import annotations

import msgspec
import pytest

from omni_discovery.metrics.samples import (
    STALE_AFTER_S,
    GpuMemory,
    LatestSamples,
    ReplicaSample,
    Sample,
    SupervisorSample,
    decode_sample,
    encode_sample,
)

SUPERVISOR = SupervisorSample(namespace="default", stage_id=0, wanted=2, restarts=1, replica_ids=(0, 1))


def replica(replica_id: int, stage_id: int = 0) -> ReplicaSample:
    return ReplicaSample(stage_id=stage_id, replica_id=replica_id, is_up=True)


@pytest.mark.parametrize(
    "sample",
    [
        SUPERVISOR,
        replica(3),
        ReplicaSample(
            stage_id=0,
            replica_id=0,
            hubs=0,
            lease_left_s=7.5,
            outcomes={"ok": 3, "engine": 0},
            engine={"kv_cache_usage": 0.25},
            gpus=(GpuMemory(0, 5, 9),),
            about={"engine": "vllm"},
        ),
    ],
)
def test_a_sample_is_read_as_it_was_written(sample: Sample) -> None:
    assert decode_sample(encode_sample(sample)) == sample
    assert b"\n" not in encode_sample(sample)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"type":"hub"}', b'{"type":"replica","stage_id":"x"}', b"\xff"]
)
def test_what_is_no_sample_is_none(content: bytes) -> None:
    assert decode_sample(content) is None


def test_a_field_of_a_later_version_does_no_harm() -> None:
    later = msgspec.json.decode(encode_sample(replica(0)))
    assert decode_sample(msgspec.json.encode({**later, "new": [1]})) == replica(0)


def test_the_latest_of_each_replica_is_shown_until_it_is_stale() -> None:
    """1. two replicas report; 2. one of them hangs: it is shown no more; 3. the supervisor says that it should run"""
    latest = LatestSamples()
    latest.take_sample(SUPERVISOR, 100.0)
    latest.take_sample(replica(0), 100.0)
    latest.take_sample(replica(1), 100.0)
    newer = msgspec.structs.replace(replica(0), in_flight=4)
    latest.take_sample(newer, 110.0)
    assert latest.latest(100.0 + STALE_AFTER_S).replicas == {(0, 0): newer, (0, 1): replica(1)}
    found = latest.latest(100.1 + STALE_AFTER_S)
    assert found.replicas == {(0, 0): newer}
    assert found.supervisors == {0: SUPERVISOR}


def test_a_replica_whose_process_has_ended_is_forgotten_at_once_and_those_of_other_stages_are_not() -> None:
    latest = LatestSamples()
    for sample in (replica(0), replica(1), replica(0, stage_id=1)):
        latest.take_sample(sample, 100.0)
    before = latest.latest(100.0)
    latest.take_sample(msgspec.structs.replace(SUPERVISOR, replica_ids=(1,)), 100.0)
    assert set(latest.latest(100.0).replicas) == {(0, 1), (1, 0)}
    # What a reader has does not change under it.
    assert set(before.replicas) == {(0, 0), (0, 1), (1, 0)}


@pytest.mark.attack("Z46")
@pytest.mark.parametrize(
    "field", [b'"x":' + b"[" * 3000 + b"]" * 3000, b'"in_flight":1' + b"0" * 40, b'"about":{"a":"\xff"}']
)
def test_what_only_looks_like_a_sample_is_none(field: bytes) -> None:
    assert decode_sample(b'{"type":"replica","stage_id":0,"replica_id":0,' + field + b"}") is None
