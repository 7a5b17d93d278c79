"""Replicas that run something else than they should: listed, told of once, and never picked."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import pytest

from hub.pool.stage_pool import PoolOptions, StagePool
from hub.pool.versions import MOST_POOLS, Pools, make_pools
from hub.replicas.membership import Membership
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
        #: What the membership takes the time to be, and how long it takes to see whether a replica has answered.
        self.now_s, self.look_s = 0.0, 0.0
        self.known = {"known"}
        self.pools: Pools = make_pools((0,), RoundRobinBalancer, PoolOptions())
        self.pools.begin_with(0, "known")
        self.membership = Membership(self.pools, self, now=lambda: self.now_s)
        self.revision = 0

    def connect_replica_of(self, info: ReplicaInfo) -> StageClient:
        return cast(StageClient, Client(info, []))

    def client_closed(self, client: StageClient) -> None:
        """It makes no difference here."""

    def replica_lost(self, stage_id: int, addr: str, reason: str) -> None:
        """It makes no difference here."""

    def serves_document(self, info: ReplicaInfo) -> bool:
        return info.fingerprint in self.known

    def serve(self, fingerprint: str) -> None:
        """A document comes into force."""
        self.known.add(fingerprint)
        self.pools.serve(0, fingerprint)
        self.membership.check_mismatches()

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


@pytest.mark.attack("P1")
def test_of_hundreds_of_unknown_versions_few_have_a_line_and_each_is_taken_in_once_it_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. hundreds come, each of a version of its own: none is picked, and a few have a line
    2. one of them that has no pool of its own is served from now on: it is picked, with a new session
    3. it goes as others do
    """
    scene, good = Scene(), record(0)
    hostile = [record(number, f"v{number}") for number in range(1, 300)]
    scene.show(good, *hostile)
    assert scene.picked() == {0}
    assert len(scene.pools.of_stage(0)) == MOST_POOLS + 1
    assert caplog.text.count("replica.refused ") == 32
    assert "replica.refused_more count=267 not_refused=0: " in caplog.text
    while scene.membership.next_review_s is not None:
        scene.membership.review_members()
    scene.serve("v299")
    assert scene.picked("v299") == set()
    scene.pools.get(0, "v299").core.session_up("tcp://h:299", 0.0)
    assert scene.picked("v299") == {299}
    assert "tcp://h:299" not in scene.pools.get(0, "v298").core.members.entries
    scene.show(good, *hostile[:-1])
    assert scene.pools.get(0, "v299").core.is_unused
    assert scene.picked() == {0}


@pytest.mark.attack("P5")
def test_what_most_have_loaded_is_counted_the_more_rarely_the_longer_that_takes() -> None:
    """1. ten false records make it take a tenth of a second: they are refused at once, whoever is right
    2. more of them come: they are not counted again so soon, and refused all the same
    3. it is due in time, and finds out who is right
    """
    scene = Scene()
    usual, counted = scene.membership.mismatched._has_answered, []

    def slow(info: ReplicaInfo) -> bool:
        counted.append(info)
        scene.now_s += 0.01
        return usual(info)

    scene.membership.mismatched._has_answered = slow
    honest = [record(20, content="a"), record(21, content="a")]
    false = [record(number, content=f"b{number}") for number in range(20)]
    scene.show(*false[:8], *honest, silent=range(20))
    assert len(counted) == 10
    assert scene.membership.mismatched.count(0) == 9
    scene.show(*false[:9], *honest, silent=range(20))
    assert len(counted) == 10
    assert scene.membership.mismatched.count(0) == 10
    due_s = scene.membership.mismatched.next_review_s
    assert due_s == pytest.approx(0.1 + 4 * 0.1)
    scene.now_s = due_s
    scene.membership.review_members()
    assert len(counted) == 21
    assert scene.picked() == {20, 21}


def test_where_nobody_is_disputed_nothing_is_due_and_nothing_is_left_to_apply() -> None:
    scene = Scene()
    assert scene.membership.mismatched.next_review_s is None
    scene.show(record(0), record(1, "other"))
    assert scene.membership.mismatched.next_review_s is None
    assert not scene.membership.mismatched._mismatches.changed
    assert scene.membership.mismatched.count(1) == 0


def test_a_refused_replica_that_goes_is_not_said_to_be_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """1. one of two refused ones goes, without a word; 2. the document of the other is served: it is let in"""
    scene, infos = Scene(), [record(0), record(1, "other"), record(2, "third")]
    with caplog.at_level(logging.INFO):
        scene.show(*infos)
        caplog.clear()
        scene.show(*infos[:2])
        assert scene.membership.mismatched.count(0) == 1
        assert "refused" not in caplog.text
        scene.known.add("other")
        scene.membership.check_mismatches()
    assert [line.getMessage() for line in caplog.records if "refused" in line.getMessage()] == [
        "replica.not_refused replica=0/1"
    ]
    assert scene.membership.mismatched.count(0) == 0


def test_a_refused_replica_that_is_entered_again_is_refused_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Its session, and its record's load, change nothing; another reason is told once more."""
    scene, other = Scene(), record(1, "other")
    scene.show(record(0), other)
    pool = scene.pools.of(other)
    pool.core.remove(other.input_addr, 0.0)
    pool.core.upsert(other, 0.0)
    pool.core.session_up(other.input_addr, 0.0)
    assert scene.picked("other") == {1}
    scene.membership.mismatched.replica_entered(pool, other.input_addr)
    assert scene.picked("other") == set()
    scene.membership.mismatched.replica_entered(pool, "tcp://stranger:1")
    assert caplog.text.count("replica.refused ") == 1
