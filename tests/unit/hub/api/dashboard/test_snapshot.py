"""The snapshot: each state of a replica in words, what needs somebody first, and the graph of any pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from hub.api.dashboard.model import DashboardSnapshot, ShownEdge
from hub.api.dashboard.rates import RateWindow
from hub.api.dashboard.snapshot import MOST_REPLICAS, HubState, Judged, build_snapshot, show_replica
from hub.config import PoolOptions
from hub.pool.entry import Entry
from hub.pool.outliers import OutlierState
from hub.pool.stage_pool import StagePool
from hub.pool.status import FailureStreak, StageStatus
from omni_discovery.balancing.policies import LeastLoadBalancer
from omni_discovery.commands.findings.checks import Finding, Grade
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus
from omni_discovery.view.recent_events import Tone
from tests.support.hub_fakes import deploy_of

UP = ReplicaInfo("tcp://h:0", "tcp://h:9", 0, ReplicaStatus.UP, 0, 0.0, 100.0, 0, epoch=5, capacity=4, host="alpha")
FORKED = """
model: forked
stages:
  - {stage_id: 0, engine: echo, final_output: text}
  - {stage_id: 1, engine: echo, model: some/where/painter, input_from: [0], final_output: image}
  - {stage_id: 2, engine: echo, input_from: [0]}
  - {stage_id: 3, engine: echo, input_from: [2], final_output: audio}
edges: [{from: 2, to: 3, connector: shm, async_chunk: true}]
connectors: {shm: {name: SharedMemoryConnector}}
"""


def entries_of(*infos: ReplicaInfo, answer: bool = True) -> list[Entry]:
    pool = StagePool(0, LeastLoadBalancer(), PoolOptions(), lambda: 0.0)
    for info in infos:
        pool.core.upsert(info, 0.0)
        if answer:
            pool.core.session_up(info.input_addr, 0.0)
    return list(pool.core.members)


def state_of(**changes: Any) -> HubState:
    state = HubState(
        at=200.0,
        now_s=50.0,
        hub_id="hub-1",
        namespace="test",
        version="1",
        url="http://h",
        revision=7,
        stale_s=None,
        is_running=True,
        is_revoked=False,
        pipeline_problem="",
        deploy=deploy_of(FORKED),
        stages=[StageStatus(stage_id, 1, 1) for stage_id in range(4)],
        entries={},
        waiting={0: 3},
        in_flight=2,
    )
    return replace(state, **changes)


def shown(judged: Judged | None = None, **changes: Any) -> DashboardSnapshot:
    return build_snapshot(state_of(**changes), RateWindow(), judged or Judged(), ())


@pytest.mark.parametrize(
    ("change", "tone", "word"),
    [
        ({}, Tone.GOOD, "up"),
        ({"cordoned": True}, Tone.QUIET, "cordoned"),
        ({"weight": 0.0}, Tone.QUIET, "weight 0"),
        ({"status": ReplicaStatus.STARTING, "phase": "loading the model"}, Tone.QUIET, "starting"),
        ({"status": ReplicaStatus.STARTING, "phase": "asleep"}, Tone.QUIET, "asleep"),
        ({"status": ReplicaStatus.DRAINING}, Tone.QUIET, "draining"),
        ({"status": ReplicaStatus.ERROR, "reason": "out of memory"}, Tone.BAD, "error"),
    ],
)
def test_a_replica_is_what_its_record_says(change: dict[str, Any], tone: Tone, word: str) -> None:
    (entry,) = entries_of(replace(UP, **change))
    replica = show_replica(entry, 200.0)
    assert (replica.tone, replica.state) == (tone, word)
    assert replica.takes_work is (not change)
    assert (replica.progress is not None) is (word == "starting")
    assert (replica.name, replica.epoch, replica.capacity, replica.age_s) == ("0/0", 5, 4, 100.0)


def test_what_this_hub_sees_of_it_goes_before_what_it_says() -> None:
    (entry,) = entries_of(UP, answer=False)
    assert show_replica(entry, 0.0).state == "no session"
    (entry,) = entries_of(UP)
    entry.unusable = "it has no key"
    assert (show_replica(entry, 0.0).state, show_replica(entry, 0.0).why) == ("unusable", "it has no key")
    entry.unusable, entry.refused = "", "another model"
    assert show_replica(entry, 0.0).state == "refused"
    entry.refused = ""
    for state, word in ((OutlierState.EJECTED, "ejected"), (OutlierState.PROBED, "on probation")):
        entry.health.state, entry.health.reason = state, "3 in a row"
        replica = show_replica(entry, 0.0)
        assert (replica.state, replica.takes_work) == (word, False)
        assert "3 in a row" in replica.why
    entry.registered = False
    assert show_replica(entry, 0.0).state == "leaving"


def test_a_stage_of_very_many_shows_some_and_counts_the_others() -> None:
    infos = [replace(UP, input_addr=f"tcp://h:{number}", replica_id=number) for number in range(MOST_REPLICAS + 7)]
    stage = shown(entries={0: entries_of(*reversed(infos))}).stages[0]
    assert (len(stage.replicas), stage.more, stage.slots) == (MOST_REPLICAS, 7, 4 * len(infos))
    assert [replica.replica_id for replica in stage.replicas[:3]] == [0, 1, 2]


def test_the_graph_goes_from_the_client_through_every_edge_and_back() -> None:
    snapshot = shown()
    ends = [(edge.from_stage, edge.to_stage) for edge in snapshot.edges]
    assert ends == [(None, 0), (0, None), (0, 1), (1, None), (0, 2), (2, 3), (3, None)]
    assert snapshot.edges[5] == ShownEdge(from_stage=2, to_stage=3, connector="SharedMemoryConnector", in_pieces=True)
    assert [stage.model for stage in snapshot.stages] == ["", "painter", "", ""]
    assert [stage.waiting for stage in snapshot.stages] == [3, 0, 0, 0]


def test_what_is_unknown_is_null_in_json_and_not_zero() -> None:
    snapshot = msgspec.json.decode(msgspec.json.encode(shown()))
    assert snapshot["stages"][0]["work"] == {"per_s": None, "p50_s": None, "p99_s": None}
    assert snapshot["checks"]["at"] is None
    assert snapshot["stale_s"] is None


def test_what_the_hub_knows_comes_first_and_problems_before_notes() -> None:
    findings = (
        Finding(Grade.OK, "record", "every record can be read"),
        Finding(Grade.NOTE, "clock", "it is ahead", "see to NTP"),
        Finding(Grade.PROBLEM, "stage", "stage 1 has nobody who takes work"),
        Finding(Grade.PROBLEM, "lease", "a key has no lease", "delete it", ("etcdctl", "del", "a key")),
    )
    stages = [StageStatus(0, 1, 1), StageStatus(1, 2, 0, "2 registered: 2 cordoned"), *state_of().stages[2:]]
    snapshot = shown(Judged(findings, 199.0), stages=stages, stale_s=12.0, is_revoked=True)
    assert [need.topic for need in snapshot.needs] == ["hub", "view", "stage", "lease", "clock"]
    assert "2 cordoned" in snapshot.needs[2].text
    assert (snapshot.needs[3].advice, snapshot.needs[3].command) == ("delete it", "etcdctl del 'a key'")
    assert [need.tone for need in snapshot.needs[-2:]] == [Tone.BAD, Tone.WARN]
    assert (snapshot.checks.fine, snapshot.checks.at) == (1, 199.0)
    assert all(stage.able == 0 for stage in snapshot.stages), "a revoked hub is listened to by nobody"


def test_a_hub_that_ended_and_a_stage_that_fails_need_somebody() -> None:
    failing = FailureStreak(6, 49.0, ("EngineFailedError",))
    stages = [replace(state_of().stages[0], failures=failing), *state_of().stages[1:]]
    snapshot = shown(stages=stages, is_running=False, pipeline_problem="it has other stages")
    assert [need.topic for need in snapshot.needs] == ["hub", "pipeline", "requests"]
    assert "its last 6 requests failed" in snapshot.stages[0].failing


@pytest.mark.attack("C27")
def test_texts_of_records_are_one_line_and_short() -> None:
    hostile = replace(UP, host="a\nb\x1b[31m" + "c" * 5000, status=ReplicaStatus.ERROR, reason="\u202e" * 999)
    (entry,) = entries_of(hostile)
    replica = show_replica(entry, 0.0)
    assert len(replica.host) <= 300
    assert len(replica.why) <= 300
    assert not {"\n", "\x1b", "\u202e"} & {*replica.host, *replica.why}
