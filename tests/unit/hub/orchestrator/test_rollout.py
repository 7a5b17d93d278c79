"""A new deploy document while requests of the one before are under way: which move, and which stay."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hub.orchestrator.deploy_versions import DeployVersion
from hub.orchestrator.rollout import Rollout
from hub.pool.stage_pool import StagePool
from hub.request.state import Phase
from omni_discovery.deploy.document import encode_deploy
from omni_discovery.view.table import Delta, View
from tests.unit.hub.orchestrator.test_deploy_versions import Scene, document


class Membership:
    """Of a hub's membership what a rollout asks of it; it says whether replicas may have come or gone."""

    def __init__(self) -> None:
        self.may_differ = False
        self.asked: list[str] = []

    def check_mismatches(self) -> None:
        self.asked.append("check")

    def apply(self, view: View, delta: Delta) -> bool:
        self.asked.append("apply")
        return self.may_differ


class Requests:
    """The requests under way, and those that were moved."""

    def __init__(self) -> None:
        self.active: dict[str, Any] = {}
        self.moved: list[tuple[str, DeployVersion]] = []

    def begin(
        self, request_id: str, release: DeployVersion | None, *phases: Phase, picks: Any = (), parent_id: str = ""
    ) -> None:
        """A request whose stages are in these phases; those that wait have had no attempt."""
        runs = {
            stage: SimpleNamespace(phase=each, attempt=int(each is not Phase.WAITING))
            for stage, each in enumerate(phases)
        }
        request = SimpleNamespace(release=release, parent_id=parent_id, request_id=request_id)
        machine = SimpleNamespace(runs=runs)
        self.active[request_id] = SimpleNamespace(request=request, machine=machine, picks=dict.fromkeys(picks))

    def move_request(self, active: Any, release: DeployVersion) -> None:
        self.moved.append((active.request.request_id, release))


class Site:
    """One hub's rollout over real documents and pools."""

    def __init__(self, *, has_documents: bool = True) -> None:
        self.scene, self.membership, self.requests = Scene(), Membership(), Requests()
        self.pools: list[StagePool] = list(self.scene.first.pools.values())
        releases = self.scene.releases if has_documents else None
        self.rollout = Rollout(
            releases, self.scene.pools, cast(Any, self.membership), cast(Any, self.requests), self.pools
        )

    def show(self, pipeline: bytes | None = None) -> None:
        self.rollout.apply_view(View(pipeline=pipeline), Delta())


def test_a_new_document_is_compared_with_the_replicas_before_they_come_and_its_pools_are_the_hubs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site()
    with caplog.at_level(logging.INFO):
        site.show(encode_deploy(document("b")))
    assert site.membership.asked == ["check", "apply"]
    assert site.pools == list(site.scene.releases.newest.pools.values())
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("hub.pipeline_followed fingerprints={0: ")
    site.membership.asked.clear()
    site.show(encode_deploy(document("b")))
    assert site.membership.asked == ["apply"]


def test_a_document_that_can_not_be_followed_is_an_error_and_changes_no_pool(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    before = list(site.pools)
    site.show(b"{")
    assert site.pools == before
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("hub.pipeline_not_followed: the pipeline in force is not served by this hub: ")
    assert "omni pipeline apply" in line


def test_a_hub_of_one_document_follows_none_and_moves_nothing() -> None:
    site = Site(has_documents=False)
    site.membership.may_differ = True
    site.requests.begin("r", site.scene.first, Phase.WAITING, Phase.WAITING)
    site.show(encode_deploy(document("b")))
    assert site.membership.asked == ["apply"]
    site.rollout.move_on()
    assert (site.requests.moved, site.rollout.older_count()) == ([], 0)


def test_pools_of_nobody_go_with_a_view_that_changes_replicas_and_with_no_other() -> None:
    site = Site()
    stray = site.scene.info(0, "stray")
    pool = site.scene.pools.of(stray)
    site.show()
    assert site.scene.pools.of(stray) is pool
    site.membership.may_differ = True
    site.show()
    assert site.scene.pools.of(stray) is not pool


def begun() -> tuple[Site, DeployVersion]:
    """A second document whose stage 1 is another, and which alone has replicas."""
    site = Site()
    new = site.scene.follow(document("a", "b"))
    site.scene.start(new, 0, 1)
    site.scene.first.pools[0].core.remove("tcp://h:1", 0.0)
    site.scene.start(new, 0)
    return site, new


def test_a_request_moves_whose_own_document_has_nobody_left_for_what_it_still_needs() -> None:
    """first: not begun; second: stage 0 is done; stage 0 is the same in both documents. third: stage 1 has begun"""
    site, new = begun()
    site.requests.begin("first", site.scene.first, Phase.WAITING, Phase.WAITING)
    site.requests.begin("second", site.scene.first, Phase.DONE, Phase.WAITING)
    site.requests.begin("third", site.scene.first, Phase.DONE, Phase.ACCEPTED)
    site.requests.begin("skipped", site.scene.first, Phase.DONE, Phase.SKIPPED)
    site.requests.begin("picked", site.scene.first, Phase.DONE, Phase.DISPATCHED, picks=[1])
    site.requests.begin("newest", new, Phase.WAITING, Phase.WAITING)
    site.requests.begin("companion", site.scene.first, Phase.WAITING, Phase.WAITING, parent_id="first")
    site.requests.begin("undated", None, Phase.WAITING, Phase.WAITING)
    assert site.rollout.older_count() == 6
    site.rollout.move_on()
    assert site.requests.moved == [("first", new), ("second", new)]


def test_a_request_stays_while_its_own_document_has_replicas_or_no_other_has() -> None:
    site, _ = begun()
    site.scene.start(site.scene.first, 1)
    site.requests.begin("r", site.scene.first, Phase.WAITING, Phase.WAITING)
    site.rollout.move_on()
    assert site.requests.moved == []
    away = Site()
    away.scene.follow(document("a", "b"))
    away.requests.begin("r", away.scene.first, Phase.WAITING, Phase.WAITING)
    away.rollout.move_on()
    assert away.requests.moved == []


def test_a_view_that_changes_replicas_moves_requests_on() -> None:
    site, new = begun()
    site.requests.begin("r", site.scene.first, Phase.WAITING, Phase.WAITING)
    site.show()
    assert site.requests.moved == []
    site.membership.may_differ = True
    site.show()
    assert site.requests.moved == [("r", new)]


def test_a_stage_that_was_skipped_binds_a_request_to_no_document() -> None:
    site = Site()
    new = site.scene.follow(document("b", "b"))
    site.scene.start(new, 0, 1)
    site.requests.begin("skipped", site.scene.first, Phase.SKIPPED, Phase.WAITING)
    site.requests.begin("done", site.scene.first, Phase.DONE, Phase.WAITING)
    site.rollout.move_on()
    assert site.requests.moved == [("skipped", new)]
