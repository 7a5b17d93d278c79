"""Rollout: switches to a new deploy document while requests of the one before are still under way."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hub.request.state import Phase

if TYPE_CHECKING:
    from collections.abc import Collection

    from hub.orchestrator.active import Active
    from hub.orchestrator.deploy_versions import DeployVersion, DeployVersions
    from hub.orchestrator.requests import Requests
    from hub.pool.stage_pool import StagePool
    from hub.pool.versions import Pools
    from hub.replicas.membership import Membership
    from omni_discovery.view.table import Delta, View

logger = logging.getLogger(__name__)


class Rollout:
    """Part of the orchestrator's task. ``stage_pools`` is kept to the pools of the newest document.

    Without ``releases`` the hub serves one document, whichever is in force.
    """

    def __init__(
        self,
        releases: DeployVersions | None,
        pools: Pools,
        membership: Membership,
        requests: Requests,
        stage_pools: list[StagePool],
    ) -> None:
        self._releases = releases
        self._pools = pools
        self._membership = membership
        self._requests = requests
        self._stage_pools = stage_pools

    def apply_view(self, view: View, delta: Delta) -> None:
        """Apply a new view of the registry: its replicas, what changed in it, and the document in force."""
        releases = self._releases
        is_new = releases is not None and releases.apply_document(view.pipeline)
        if is_new:
            # Before replicas come or go: some are in another pool by now.
            self._membership.check_mismatches()
        may_differ = self._membership.apply(view, delta)
        if releases is None or not (is_new or may_differ):
            return
        if is_new:
            self._stage_pools[:] = releases.newest.pools.values()
            if releases.problem:
                text = "hub.pipeline_not_followed: the pipeline in force is not served by this hub: %s"
                logger.error(text, releases.problem)
            else:
                logger.info("hub.pipeline_followed fingerprints=%s", dict(releases.newest.fingerprints))
        self._pools.forget_unused(releases.pools)
        self.move_on()

    def move_on(self) -> None:
        """Move requests to another document whose own has no replicas left for a stage that they still need.

        Only to a document that is equal in every stage that has run already.
        """
        releases = self._releases
        if releases is None or not releases.has_several:
            return
        for active in list(self._requests.active.values()):
            release = active.request.release
            # Companions go by the document of their parent.
            if release is None or active.request.parent_id:
                continue
            had, needed = _stages(active)
            if needed and not release.is_complete(needed):
                other = releases.other_than(release, had, needed)
                if other is not None:
                    self._requests.move_request(active, other)

    def older_count(self) -> int:
        """The number of requests that go by another document than the newest."""
        if self._releases is None:
            return 0
        newest = self._releases.newest
        return sum(_is_of_other(active.request.release, newest) for active in self._requests.active.values())


def _is_of_other(release: DeployVersion | None, newest: DeployVersion) -> bool:
    return release is not None and release.fingerprints != newest.fingerprints


def _stages(active: Active) -> tuple[Collection[int], Collection[int]]:
    """The stages that have run a request or run it now, and the stages that it still needs."""
    had: list[int] = []
    needed: list[int] = []
    for stage_id, run in active.machine.runs.items():
        if run.phase is Phase.WAITING or stage_id in active.picks:
            (needed if run.attempt < 1 else had).append(stage_id)
        elif run.phase is not Phase.SKIPPED:
            had.append(stage_id)
    return had, needed
