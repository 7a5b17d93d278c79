"""Which deploy document a request goes by while one is rolled out, and whose replicas are whose."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hub.orchestrator.deploy_versions import DeployVersion, DeployVersions
from hub.pool.stage_pool import PoolOptions
from hub.pool.versions import Pools, make_pools
from omni_discovery.balancing.policies import LeastLoadBalancer
from omni_discovery.deploy.document import DeployConfig, encode_deploy, parse_deploy
from omni_discovery.deploy.fingerprint import stage_fingerprint
from omni_discovery.records.schema import ReplicaInfo, ReplicaStatus


def document(first: str = "a", second: str = "a", more: str = "") -> DeployConfig:
    return parse_deploy(
        f"""
        stages:
          - {{stage_id: 0, engine: echo, model: {first}, final_output: text}}
          - {{stage_id: 1, engine: echo, model: {second}, final_output: image}}
        {more}
        """,
        "test",
    )


class Scene:
    """The documents of one hub and the replicas of its pools."""

    def __init__(self, **options: Any) -> None:
        self.pools: Pools = make_pools((0, 1), LeastLoadBalancer, PoolOptions())
        self.releases = DeployVersions(document(), self.pools, **options)
        self.first = self.releases.newest
        self.backlog: Counter[tuple[int, str]] = Counter()
        self.ports = 0

    def follow(self, deploy: DeployConfig) -> DeployVersion:
        assert self.releases.apply_document(encode_deploy(deploy))
        return self.releases.newest

    def start(self, release: DeployVersion, *stages: int, capacity: int = 2) -> None:
        """One replica more of each of these stages is up and answers."""
        for stage_id in stages:
            self.ports += 1
            info = self.info(stage_id, release.fingerprints[stage_id], capacity)
            pool = self.pools.of(info)
            pool.core.upsert(info, pool.now())
            pool.core.session_up(info.input_addr, pool.now())

    def info(self, stage_id: int, fingerprint: str, capacity: int = 2) -> ReplicaInfo:
        address, up = f"tcp://h:{self.ports}", ReplicaStatus.UP
        return ReplicaInfo(address, "o", stage_id, up, 0, 0.0, 0.0, capacity=capacity, fingerprint=fingerprint)

    def goes_by(self, *stages: int) -> DeployVersion:
        """What a new request goes by that needs these stages, all if none is named."""
        return self.releases.choose(stages or (0, 1), lambda *key: self.backlog[key], 1)


def test_a_new_document_serves_as_soon_as_each_stage_has_somebody() -> None:
    scene = Scene()
    scene.start(scene.first, 0, 1)
    new = scene.follow(document("b", "b"))
    assert scene.goes_by() is scene.first
    scene.start(new, 0)
    assert scene.goes_by() is scene.first
    assert scene.goes_by(0) is new, "its second stage is no matter of this request's"
    scene.start(new, 1)
    assert scene.goes_by() is new


def test_what_the_new_has_no_room_for_goes_to_the_old_and_what_neither_has_to_the_less_loaded() -> None:
    scene = Scene()
    scene.start(scene.first, 0, 1, capacity=4)
    new = scene.follow(document("b"))
    scene.start(new, 0, capacity=2)
    scene.backlog[0, new.fingerprints[0]] = 2
    assert scene.goes_by() is scene.first
    scene.backlog[0, scene.first.fingerprints[0]] = 20
    assert scene.goes_by() is new


def test_without_anybody_who_could_serve_a_request_waits_for_the_replicas_of_the_newest() -> None:
    scene = Scene()
    scene.start(scene.first, 0)
    assert scene.goes_by() is scene.first
    new = scene.follow(document("b"))
    assert scene.goes_by() is new


def test_a_stage_of_which_both_say_the_same_has_one_pool() -> None:
    scene = Scene()
    new = scene.follow(document("a", "b"))
    assert new.pools[0] is scene.first.pools[0]
    assert new.pools[1] is not scene.first.pools[1]


def test_a_request_moves_only_to_what_says_the_same_of_the_stages_that_have_had_it() -> None:
    scene = Scene()
    new = scene.follow(document("a", "b"))
    scene.start(new, 0, 1)
    assert scene.releases.other_than(scene.first, had=[], needed=[0, 1]) is new
    assert scene.releases.other_than(scene.first, had=[0], needed=[1]) is new
    assert scene.releases.other_than(new, had=[1], needed=[0]) is None
    assert scene.releases.other_than(scene.first, had=[1], needed=[0]) is None


def test_the_same_document_again_or_none_changes_nothing_and_a_former_one_is_the_newest_again() -> None:
    scene = Scene()
    assert not scene.releases.apply_document(encode_deploy(document()))
    assert not scene.releases.apply_document(None)
    scene.follow(document("b"))
    again = scene.follow(document())
    assert again.fingerprints == scene.first.fingerprints
    assert again.pools == scene.first.pools


def test_another_graph_is_not_followed_and_serving_goes_on() -> None:
    scene = Scene()
    served = scene.releases.served
    other = parse_deploy("stages: [{stage_id: 0, engine: echo, final_output: text}]", "test")
    assert scene.follow(other) is scene.first
    assert "restart" in scene.releases.problem
    assert "stages" in scene.releases.problem
    assert scene.releases.served == served
    assert scene.releases.apply_document(b"{")
    assert "omni pipeline apply" in scene.releases.problem
    assert scene.follow(document("b")) is not scene.first
    assert scene.releases.problem == ""


def test_a_hub_that_knows_the_models_itself_follows_no_document_with_others() -> None:
    scene = Scene(fixed_models=True)
    scene.follow(document("a", "b"))
    assert "stage 1" in scene.releases.problem
    scene.follow(document(more="async_chunk: true"))
    assert scene.releases.problem == ""


def test_the_last_documents_are_known_and_no_more() -> None:
    scene = Scene()
    prints = [stage_fingerprint(scene.follow(document(name)).graph.deploy, 0) for name in "bcdef"]
    known = [scene.releases.knows(scene.info(0, each)) for each in [scene.first.fingerprints[0], *prints]]
    assert known == [False, False, True, True, True, True]
    assert scene.releases.knows(scene.info(0, ""))


def test_pools_that_nobody_serves_or_uses_are_forgotten() -> None:
    scene = Scene()
    stray = scene.info(0, "stray")
    pool = scene.pools.of(stray)
    pool.core.upsert(stray, pool.now())
    scene.pools.forget_unused(scene.releases.pools)
    assert scene.pools.of(stray) is pool
    pool.core.remove(stray.input_addr, pool.now())
    scene.pools.forget_unused(scene.releases.pools)
    assert scene.pools.of_stage(0) == (scene.first.pools[0],)
    assert scene.pools.of(stray) is not pool


def test_replicas_that_tell_no_fingerprint_belong_to_what_the_hub_began_with() -> None:
    scene = Scene()
    scene.follow(document("b", "b"))
    assert scene.pools.of(scene.info(0, "")) is scene.first.pools[0]


def test_without_a_way_to_make_pools_all_versions_are_one() -> None:
    scene = Scene()
    pools = Pools([scene.first.pools[0]])
    assert pools.of(scene.info(0, "x")) is pools.of(scene.info(0, "y")) is scene.first.pools[0]
    assert list(pools) == [scene.first.pools[0]]


def test_a_stage_without_anybody_says_how_many_run_another_version() -> None:
    scene = Scene()
    scene.start(scene.first, 0, 1)
    new = scene.follow(document("b"))
    assert [status.pickable for status in scene.releases.status()] == [1, 1]
    (pool,) = [pool for pool in scene.pools.of_stage(0) if pool is scene.first.pools[0]]
    pool.core.remove("tcp://h:1", pool.now())
    stray = scene.info(0, "stray")
    scene.pools.of(stray).core.upsert(stray, pool.now())
    (first, _) = scene.releases.status()
    assert (first.registered, first.pickable) == (1, 0)
    assert "1 run another version" in first.why_absent
    assert new.pools[0].core.members.registered_count == 0


def test_the_load_is_that_of_the_most_loaded_stage_and_endless_where_a_stage_has_no_slot() -> None:
    scene = Scene()
    assert scene.releases.problem == ""
    scene.start(scene.first, 0, capacity=4)
    scene.backlog.update({(0, scene.first.fingerprints[0]): 2, (1, scene.first.fingerprints[1]): 3})
    assert scene.first.load([0], lambda *key: scene.backlog[key], 2) == 1.0
    assert scene.first.load([0, 1], lambda *key: scene.backlog[key], 2) == float("inf")
    scene.start(scene.first, 1, capacity=2)
    assert scene.first.load([0, 1], lambda *key: scene.backlog[key], 1) == 1.5


def test_a_request_does_not_move_to_a_document_without_the_replicas_that_it_needs() -> None:
    scene = Scene()
    assert not scene.releases.has_several
    new = scene.follow(document("a", "b"))
    assert scene.releases.has_several
    scene.start(new, 0)
    assert scene.releases.other_than(scene.first, had=[0], needed=[1]) is None


def test_replicas_of_another_version_are_counted_and_not_named_while_the_stage_has_somebody() -> None:
    scene = Scene()
    scene.start(scene.first, 0, 1)
    new = scene.follow(document("b"))
    scene.start(new, 0)
    first, _ = scene.releases.status()
    assert (first.registered, first.pickable, first.why_absent) == (2, 1, "")


def test_the_newest_is_taken_while_it_has_a_slot_though_the_old_is_less_loaded() -> None:
    scene = Scene()
    scene.start(scene.first, 0, 1, capacity=8)
    new = scene.follow(document("b"))
    scene.start(new, 0, capacity=2)
    scene.backlog[0, new.fingerprints[0]] = 1
    assert scene.goes_by() is new


def test_a_stage_that_lacks_somebody_counts_no_other_versions_where_there_are_none() -> None:
    scene = Scene()
    scene.start(scene.first, 0, 1)
    scene.first.pools[0].core.session_down("tcp://h:1", 0.0)
    first, second = scene.releases.status()
    assert (first.registered, first.pickable, first.why_absent) == (1, 0, "1 registered: 1 without a session")
    assert (second.registered, second.pickable, second.why_absent) == (1, 1, "")


def test_what_a_hub_tells_of_its_replicas_is_that_of_the_newest_document_that_can_serve() -> None:
    scene = Scene()

    def addresses() -> list[str]:
        return [process[2] for process in scene.releases.serving_replicas().values()]  # type: ignore[index]

    scene.start(scene.first, 1, 0)
    new = scene.follow(document("b"))
    assert addresses() == ["tcp://h:2", "tcp://h:1"], "by stage"
    assert (scene.releases.voices(), scene.releases.wanted_count(0)) == ([], 1)
    scene.start(new, 0)
    assert addresses() == ["tcp://h:3", "tcp://h:1"]
    assert scene.releases.params_taken(0) == [None]
    new.pools[0].core.session_down("tcp://h:3", 0.0)
    assert addresses() == ["tcp://h:2", "tcp://h:1"]


def test_a_document_with_other_inputs_or_outputs_is_not_followed() -> None:
    for text, named in [
        ("stages: [{stage_id: 0, engine: echo, final_output: text}, {stage_id: 1, engine: echo}]", "final outputs"),
        (
            "stages: [{stage_id: 0, engine: echo, final_output: text}, "
            "{stage_id: 1, engine: echo, final_output: image, input_from: []}]",
            "inputs of stages",
        ),
    ]:
        scene = Scene()
        scene.releases.apply_document(encode_deploy(parse_deploy(text, "test")))
        assert scene.releases.problem.startswith(f"it has other {named}, which a hub takes in only when it starts")


def test_of_parameters_only_those_count_that_replicas_take_which_are_given_work() -> None:
    scene = Scene()
    scene.start(scene.first, 0, 0)
    entry = scene.first.pools[0].core.members.entries["tcp://h:1"]
    assert scene.releases.params_taken(0) == [None, None]
    entry.info = replace(entry.info, cordoned=True)
    assert scene.releases.params_taken(0) == [None]


@pytest.mark.attack("Z48")
def test_of_very_many_voices_those_of_replicas_that_take_work_are_looked_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hub.orchestrator.deploy_versions._MOST_VOICES", 5)
    scene = Scene()
    for number, voices in enumerate((["x", "y", "z"], ["x2", "y2", "z2"], ["ann", "bob"])):
        info = replace(scene.info(0, ""), input_addr=f"tcp://h:{number}", replica_id=number, voices=voices)
        scene.pools.of(info).core.upsert(info, 0.0)
    scene.pools.of(info).core.session_up("tcp://h:2", 0.0)
    assert scene.releases.voices() == ["ann", "bob", "x", "y", "z"]
