"""Replicas that run something else than they should: listed, told of once, and never picked."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import pytest

from hub.pool.stage_pool import PoolOptions, StagePool
from hub.pool.versions import Pools, make_pools
from hub.replicas.membership import Membership
from hub.replicas.mismatched import MismatchedReplicas
from hub.replicas.stage_client import StageClient
from omni_discovery.balancing.policies import RoundRobinBalancer
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.table import Delta, View
from tests.unit.hub.replicas.test_membership import Client


def record(replica_id: int, fingerprint: str = "known", port: int | None = None, **fields: Any) -> ReplicaInfo:
    info = ReplicaInfo(
        input_addr=f"tcp://h:{replica_id if port is None else port}",
        output_addr="tcp://o:1",
        stage_id=0,
        status=ReplicaStatus.UP,
        queue_length=0,
        last_heartbeat=0.0,
        registered_at=float(replica_id),
        replica_id=replica_id,
        epoch=replica_id + 1,
        fingerprint=fingerprint,
    )
    return replace(info, **fields)


class Scene:
    """One membership; each replica answers as soon as it is listed, unless it is silent."""

    def __init__(self) -> None:
        self.known = {"known"}
        self.pools: Pools = make_pools((0,), RoundRobinBalancer, PoolOptions())
        self.pools.begin_with(0, "known")
        self.membership = Membership(self.pools, self)
        self.revision = 0

    def connect_replica_of(self, info: ReplicaInfo) -> StageClient:
        return cast(StageClient, Client(info, []))

    def client_closed(self, client: StageClient) -> None:
        """It makes no difference here."""

    def replica_lost(self, stage_id: int, addr: str, reason: str) -> None:
        """It makes no difference here."""

    def serves_document(self, info: ReplicaInfo) -> bool:
        return info.fingerprint in self.known

    def show(self, *infos: ReplicaInfo, silent: Collection[int] = ()) -> None:
        """Those whose replica id is among the ``silent`` never answer."""
        self.revision += 1
        replicas = {(info.stage_id, info.replica_id): info for info in infos}
        self.membership.apply(View(replicas=replicas, revision=self.revision), Delta())
        for info in infos:
            if info.replica_id not in silent:
                pool = self.pools.of(info)
                pool.core.session_up(info.input_addr, pool.now())
                self.membership.review_members()

    def picked(self, fingerprint: str = "known") -> set[int]:
        """Who gets ten requests of that version."""
        pool: StagePool = self.pools.get(0, fingerprint)
        found = [pool.core.try_pick(f"r{number}", {}) for number in range(10)]
        for number in range(10):
            pool.release(f"r{number}")
        return {binding.info.replica_id for binding in found if binding is not None}


def test_a_replica_of_an_unknown_document_is_told_of_once_and_taken_in_when_the_document_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene, infos = Scene(), [record(0), record(1, "other")]
    with caplog.at_level(logging.INFO):
        scene.show(*infos)
        scene.show(infos[0], replace(infos[1], queue_length=3))
        assert (scene.picked(), scene.picked("other")) == ({0}, set())
        assert "refused (it runs another deploy document" in scene.pools.get(0, "other").core.status.why_absent
        assert scene.membership.mismatched.count(0) == 1
        scene.known.add("other")
        scene.membership.check_mismatches()
        assert (scene.picked(), scene.picked("other")) == ({0}, {1})
    lines = [line.getMessage() for line in caplog.records if "refused" in line.getMessage()]
    assert [line.split()[0] for line in lines] == ["replica.refused", "replica.not_refused"]
    assert "fingerprint=other" in lines[0]


def test_a_replica_that_turns_out_to_have_loaded_other_files_gets_nothing_from_that_view_on() -> None:
    """What it has loaded is known as it turns up, in one record or in two."""
    scene = Scene()
    starting = record(2, status=ReplicaStatus.STARTING)
    scene.show(record(0, content="a"), record(1, content="a"), starting)
    loaded = replace(starting, content="b")
    for shown in (loaded, replace(loaded, status=ReplicaStatus.UP)):
        scene.show(record(0, content="a"), record(1, content="a"), shown)
        assert scene.picked() == {0, 1}
    scene.show(record(0, content="a"), record(1, content="a"), replace(loaded, status=ReplicaStatus.UP, content="a"))
    assert scene.picked() == {0, 1, 2}


def test_an_address_that_a_process_of_another_version_has_taken_is_in_its_pool_and_no_longer_in_the_other() -> None:
    scene = Scene()
    scene.known.add("next")
    scene.show(record(0))
    scene.show(record(1, "next", port=0))
    assert (scene.picked(), scene.picked("next")) == (set(), {1})
    assert scene.pools.get(0, "known").core.is_unused


def test_a_refused_replica_that_is_served_on_after_a_mass_disappearance_stays_refused() -> None:
    """Most of a stage vanishes at once, while all sessions stand: they are held, and the odd one gets nothing."""
    scene = Scene()
    infos = [record(0, content="a"), record(1, content="a"), record(2, content="b"), record(3, content="a")]
    scene.show(*infos)
    scene.show(infos[3])
    assert scene.pools.get(0, "known").core.members.held_count == 3
    assert scene.picked() == {0, 1, 3}


@pytest.mark.attack("E4")
def test_records_that_nobody_is_behind_do_not_decide_what_the_others_should_have_loaded() -> None:
    """1. false records from the first view on; 2. false records later, older by their own account, and more of them"""
    honest = [record(8, content="a"), record(9, content="a")]
    false = [record(number, content="b", registered_at=-1.0) for number in range(3)]
    scene = Scene()
    scene.show(*false, *honest, silent=range(3))
    assert scene.picked() == {8, 9}
    scene = Scene()
    scene.show(*honest)
    scene.show(*honest, *false, silent=range(3))
    assert scene.picked() == {8, 9}


@pytest.mark.parametrize(
    ("info", "may_concern"),
    [(record(0), False), (record(0, content="c"), True), (record(0, "unknown"), True)],
)
def test_a_record_with_content_or_of_an_unknown_version_may_change_who_is_mismatched(
    info: ReplicaInfo, may_concern: bool
) -> None:
    pools = make_pools((0,), RoundRobinBalancer, PoolOptions())
    compared = MismatchedReplicas(pools, lambda each: each.fingerprint == "known", lambda _: True)
    assert compared.may_concern(info) is may_concern
