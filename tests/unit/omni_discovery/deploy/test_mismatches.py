"""Who is refused for what it runs: the same answer for every hub that sees the same records."""

from __future__ import annotations

from typing import Any

from omni_discovery.deploy.document import encode_deploy, parse_deploy
from omni_discovery.deploy.fingerprint import OTHER_DOCUMENT, mismatches, mismatches_in_force, stage_fingerprint
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus

ONE = parse_deploy("stages: [{stage_id: 0, engine: echo, final_output: text}]", "test")
RIGHT = stage_fingerprint(ONE, 0)


def info(replica_id: int, fingerprint: str = RIGHT, **fields: Any) -> ReplicaInfo:
    known = {"registered_at": 0.0, "epoch": replica_id + 1, "status": ReplicaStatus.UP, **fields}
    return ReplicaInfo(
        input_addr=f"tcp://h:{replica_id}",
        output_addr="o",
        stage_id=0,
        queue_length=0,
        last_heartbeat=0.0,
        replica_id=replica_id,
        fingerprint=fingerprint,
        **known,
    )


def told(*infos: ReplicaInfo) -> dict[int, str]:
    return {each.replica_id: why for each, why in mismatches_in_force(infos, encode_deploy(ONE))}


def test_a_replica_of_another_document_is_refused_and_one_that_tells_none_is_not() -> None:
    assert told(info(0), info(1, "other"), info(2, "")) == {1: OTHER_DOCUMENT}


def test_nobody_is_refused_for_a_pipeline_that_is_absent_or_can_not_be_read() -> None:
    assert mismatches_in_force([info(1, "other")], None) == mismatches_in_force([info(1, "other")], b"{") == []


def test_of_one_document_those_are_refused_that_have_loaded_other_files_than_most() -> None:
    found = told(info(0, content="a"), info(1, content="b"), info(2, content="b"), info(3))
    assert found == {0: "it has loaded other files of its model (a) than most of its stage (b)"}


def test_of_two_halves_the_one_that_registered_first_is_right_whatever_the_order_of_the_list() -> None:
    infos = [info(0, content="b"), info(1, content="a")]
    assert list(told(*infos)) == list(told(*reversed(infos))) == [1]


def test_files_that_are_replaced_in_place_take_over_as_soon_as_those_before_take_no_work() -> None:
    draining = info(0, content="old", status=ReplicaStatus.DRAINING)
    assert list(told(draining, info(1, content="new"))) == [0]


def test_content_is_compared_within_one_document_only() -> None:
    found = mismatches([info(0, "v1", content="a"), info(1, "v2", content="b")], lambda _info: True)
    assert found == []


def test_only_those_that_count_are_counted_and_a_claimed_moment_of_birth_is_not() -> None:
    honest = [info(0, content="a"), info(1, content="a")]
    false = [info(number, content="b", registered_at=-1.0) for number in range(2, 5)]
    for more in (false, false[:2]):
        found = mismatches([*more, *honest], lambda _info: True, lambda each: each.replica_id < 2)
        assert {each.replica_id for each, _ in found} == {each.replica_id for each in more}
    assert set(told(*honest, *false[:2])) == {2, 3}
