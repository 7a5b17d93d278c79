"""A replica names hand-offs of its own stage, at the address in its own record, and no other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hub.replicas.references import flaw_of_references
from omni_discovery import wire
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus

TCP = {"connector": "TcpConnector", "host": "10.0.0.1", "port": 4000}
ENGINE = {"connector": "MooncakeTransferEngineConnector", "host": "10.0.0.1", "zmq_port": 4000, "session": "s"}
HERE = {"source_host": "10.0.0.1", "source_port": 4000}
ABOUT: dict[str, Any] = {"epoch": 1, "request_id": "r", "attempt": 0, "queue_length": 0}


def record(**connectors: Any) -> ReplicaInfo:
    return ReplicaInfo(
        input_addr="tcp://10.0.0.1:1",
        output_addr="tcp://10.0.0.1:2",
        stage_id=0,
        status=ReplicaStatus.UP,
        queue_length=0,
        last_heartbeat=0.0,
        registered_at=0.0,
        connectors=connectors,
    )


def ref(metadata: dict[str, Any], from_stage: int = 0, to_stage: int = 1) -> wire.PayloadRef:
    return wire.PayloadRef(
        from_stage=from_stage, to_stage=to_stage, key="k", connector="c", size_bytes=1, metadata=metadata
    )


def messages(*payloads: wire.PayloadRef) -> list[wire.FromReplica]:
    """Every kind of message that names hand-offs."""
    return [
        wire.StageDone(**ABOUT, seq=0, finish_reason="stop", payloads=payloads),
        wire.SegmentDone(**ABOUT, seq=0, segment=0, finish_reason="stop", payloads=payloads),
        wire.HandOffPiece(**ABOUT, number=0, payloads=payloads),
    ]


@pytest.mark.attack("K3")
@pytest.mark.parametrize(
    "full",
    [{"x": [0] * 200_000}, {"x": [[]] * 100_000 + [[0] * 40_000]}, {str(number): 0 for number in range(140_000)}],
    ids=["list", "lists", "names"],
)
def test_metadata_of_so_many_values_are_no_connectors(full: dict[str, Any]) -> None:
    (flaw,) = flaws(record(), ref(full))
    assert "more than 131072 values" in flaw
    blocks = {"kv_transfer_params": {"remote_block_ids": [list(range(65_536))], "remote_host": "h"}}
    assert flaws(record(), ref({"inline": bytes(3 << 20), **blocks})) == {""}


def flaws(info: ReplicaInfo, *payloads: wire.PayloadRef) -> set[str]:
    return {flaw_of_references(info, message) for message in messages(*payloads)}


@pytest.mark.attack("A19")
@pytest.mark.parametrize("registered", [TCP, ENGINE])
def test_the_address_in_the_record_is_the_only_one(registered: dict[str, Any]) -> None:
    info = record(**{"0-1": registered})
    for right in (HERE, {}, {"shm": "omni-1", "inline": b""}):
        assert flaws(info, ref(right)) == {""}
    for wrong in (
        {"source_host": "169.254.169.254", "source_port": 4000},
        {"source_host": "10.0.0.1", "source_port": 22},
        {"source_host": "10.0.0.9"},
        {"source_port": 22},
        {"source_host": None, "source_port": None},
    ):
        (flaw,) = flaws(info, ref(HERE), ref(wrong))
        assert "its record '10.0.0.1' port 4000" in flaw
        (flaw,) = flaws(info, ref({"k": wrong}))
        assert "its record" in flaw


def test_each_edge_has_an_address_of_its_own() -> None:
    info = record(**{"0-1": TCP, "0-2": {**TCP, "port": 5000}})
    assert flaws(info, ref(HERE), ref({**HERE, "source_port": 5000}, to_stage=2)) == {""}
    assert flaws(info, ref(HERE, to_stage=2)) != {""}


@pytest.mark.attack("A19")
def test_a_hand_off_of_another_stage_is_none_of_its_own() -> None:
    assert flaws(record(), ref({}, from_stage=1)) == {"it named a hand-off of stage 1, which is not its own"}


@pytest.mark.attack("A19")
@pytest.mark.parametrize("connectors", [{}, {"0-1": "odd"}, {"0-1": {"connector": "Foreign"}}, {"0-2": TCP}])
def test_where_the_record_has_no_address_its_host_is_compared(connectors: dict[str, Any]) -> None:
    """Replicas of the release before registered none."""
    assert flaws(record(**connectors), ref(HERE)) == {""}
    assert flaws(record(**connectors), ref({**HERE, "source_port": 1})) == {""}
    elsewhere = ref({"source_host": "169.254.169.254", "source_port": 80})
    assert flaws(record(**connectors), elsewhere) == {
        "its hand-off names '169.254.169.254' port 80, its record '10.0.0.1'"
    }


def test_a_record_that_is_odd_lets_nothing_pass() -> None:
    for odd in ({"host": 7, "port": "x"}, {"host": "10.0.0.1"}, {"host": None}):
        assert flaws(record(**{"0-1": odd}), ref(HERE)) != {""}


@pytest.mark.attack("K1")
def test_one_message_names_one_hand_off_for_each_stage() -> None:
    """Consumers fetch each that is named."""
    assert flaws(record(), ref({}), ref({}, to_stage=2)) == {""}
    assert flaws(record(), ref({}), ref({"k": 1}), ref({}, to_stage=2)) == {"it named several hand-offs for one stage"}
    of_companion = msgspec.structs.replace(ref({}), role="negative")
    assert flaws(record(), of_companion) == {"it named a hand-off of a companion, which only a hub can tell"}


def test_other_messages_name_no_hand_offs() -> None:
    chunk = wire.Chunk(**ABOUT, seq=0, modality="text", text="x")
    assert flaw_of_references(record(**{"0-1": TCP}), chunk) == ""


def test_what_is_told_is_short_whatever_a_replica_wrote() -> None:
    info = record(**{"0-1": TCP})
    (flaw,) = flaws(info, ref({"source_host": "\x1b[2J" + "x" * 100_000, "source_port": 10**18}))
    assert len(flaw) < 500
    assert "\x1b" not in flaw


def test_as_many_values_as_may_be_are_taken() -> None:
    assert flaws(record(), ref({"x": [0] * 131_071})) == {""}
    (flaw,) = flaws(record(), ref({"x": [0] * 131_072}))
    assert "more than 131072 values" in flaw
