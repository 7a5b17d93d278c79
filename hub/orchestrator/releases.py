"""Which deploy documents a hub serves, and by which of them a new request goes. Pure.

A request goes by one document from its admission to its end: the same versions of all stages. While a new document is
rolled out, replicas of both are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Final

from hub.request.plan import StageGraph
from omni_discovery.deploy.document import DeployConfig, decode_deploy, encode_deploy
from omni_discovery.deploy.fingerprint import document_fingerprint, stage_fingerprints
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from hub.pool.stage_pool import StagePool
    from hub.pool.status import StageStatus
    from hub.pool.versions import Pools
    from omni_discovery.records.schema import ReplicaInfo

#: Documents that a hub remembers: replicas that still run an older one are known no more.
_REMEMBERED: Final = 4

#: How many unfinished requests of this hub still need that version of a stage.
Backlog = Callable[[int, str], int]


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """One deploy document as a hub serves it: its graph, and of each stage the fingerprint and the pool."""

    graph: StageGraph
    fingerprints: Mapping[int, str]
    pools: Mapping[int, StagePool]

    def is_complete(self, stages: Iterable[int]) -> bool:
        """Whether somebody can take work at each of these stages."""
        return all(self.pools[stage_id].core.members.pickable_count for stage_id in stages)

    def load(self, stages: Iterable[int], backlog: Backlog, hubs: int) -> float:
        """What is on its way, over what runs at one time, at the tightest of these stages; infinite where none can."""
        tightest = 0.0
        for stage_id in stages:
            slots = self.pools[stage_id].core.members.slots
            waiting = backlog(stage_id, self.fingerprints[stage_id]) * hubs
            tightest = max(tightest, waiting / slots if slots else inf)
        return tightest


class Releases:
    """The documents that were in force since the hub began, the newest last.

    With ``fixed_models`` the hub knows the models themselves: it can't follow a document that changes one.
    """

    def __init__(self, deploy: DeployConfig, pools: Pools, *, fixed_models: bool = False) -> None:
        #: The pools of all versions, also of those that are not served.
        self.every = pools
        self._fixed_models = fixed_models
        fingerprints = stage_fingerprints(deploy)
        firsts = {stage_id: pools.begin_with(stage_id, each) for stage_id, each in fingerprints.items()}
        self._releases = [Release(StageGraph(deploy), fingerprints, firsts)]
        #: The document that was looked at last, as it stands in the registry.
        self._seen = encode_deploy(deploy)
        #: The fingerprint of the document that is served.
        self.served = document_fingerprint(self._seen)
        #: Why the document in force can't be served without a restart of the hub; empty if it is.
        self.problem = ""

    @property
    def newest(self) -> Release:
        """What the document in force, or the last that could be followed, says."""
        return self._releases[-1]

    def follow(self, document: bytes | None) -> bool:
        """Look at the document in force; return whether it is another than before. None: there is none, go on."""
        if document is None or document == self._seen:
            return False
        self._seen = document
        try:
            deploy = decode_deploy(document, "the pipeline in force")
        except ConfigError as error:
            self.problem = f"{error}; replace it with 'omni pipeline apply FILE'"
            return True
        self.problem = self._unservable(deploy)
        if not self.problem:
            self.served = document_fingerprint(document)
            self._take(deploy)
        return True

    def choose(self, stages: Iterable[int], backlog: Backlog, hubs: int) -> Release:
        """By which document a new request goes that needs these stages.

        The newest with a free slot at each of them, because an old one that is being replaced still has slots worth
        having; where all are full the least loaded; where none is complete the newest, whose replicas are to come.
        """
        if len(self._releases) == 1:
            return self._releases[0]
        needed = tuple(stages)
        complete = [release for release in reversed(self._releases) if release.is_complete(needed)]
        if not complete:
            return self.newest
        loads = [(release.load(needed, backlog, hubs), release) for release in complete]
        return next((release for load, release in loads if load < 1), min(loads, key=_load_of)[1])

    @property
    def has_several(self) -> bool:
        """Whether requests may go by different documents."""
        return len(self._releases) > 1

    def other_than(self, release: Release, had: Iterable[int], needed: Iterable[int]) -> Release | None:
        """The newest that can serve the stages ``needed``, and says the same as ``release`` of those ``had``."""
        past, ahead = tuple(had), tuple(needed)
        for other in reversed(self._releases):
            is_alike = all(other.fingerprints[stage_id] == release.fingerprints[stage_id] for stage_id in past)
            if other is not release and is_alike and other.is_complete(ahead):
                return other
        return None

    def status(self) -> tuple[StageStatus, ...]:
        """The replicas of each stage: all that are listed, and those that can take a new request's work."""
        stages = self.newest.graph.stage_ids
        complete = (release for release in reversed(self._releases) if release.is_complete(stages))
        release = next(complete, self.newest)
        return tuple(self._status(release.pools[stage_id]) for stage_id in stages)

    def _status(self, pool: StagePool) -> StageStatus:
        status, others = pool.core.status, [each for each in self.every.of_stage(pool.stage_id) if each is not pool]
        registered = status.registered + sum(other.core.members.registered_count for other in others)
        if registered == status.registered or not status.why_absent:
            return replace(status, registered=registered)
        why = f"{status.why_absent}; {registered - status.registered} run another version of it"
        return replace(status, registered=registered, why_absent=why)

    def knows(self, info: ReplicaInfo) -> bool:
        """Whether a replica runs a document that this hub serves."""
        if not info.fingerprint:
            return True
        return any(release.fingerprints.get(info.stage_id) == info.fingerprint for release in self._releases)

    @property
    def pools(self) -> set[StagePool]:
        """The pools that may be picked from."""
        return {pool for release in self._releases for pool in release.pools.values()}

    def _take(self, deploy: DeployConfig) -> None:
        fingerprints = stage_fingerprints(deploy)
        pools = {stage_id: self.every.get(stage_id, each) for stage_id, each in fingerprints.items()}
        # One that comes back into force is the newest again.
        others = [release for release in self._releases if release.fingerprints != fingerprints]
        self._releases = [*others[-(_REMEMBERED - 1) :], Release(StageGraph(deploy), fingerprints, pools)]

    def _unservable(self, deploy: DeployConfig) -> str:
        ours = self.newest.graph.deploy
        mine, theirs = _graph_of(ours), _graph_of(deploy)
        changed = [name for name, value in mine.items() if value != theirs[name]]
        if self._fixed_models and not changed:
            pairs = zip(ours.stages, deploy.stages, strict=True)
            changed = [f"stage {mine.stage_id}" for mine, other in pairs if _model_of(mine) != _model_of(other)]
        if not changed:
            return ""
        return f"it has other {', '.join(changed)}, which a hub takes in only when it starts: restart it"


def _graph_of(deploy: DeployConfig) -> dict[str, Any]:
    """What the requests under way and those that come must find alike."""
    ids = [stage.stage_id for stage in deploy.stages]
    return {
        "stages": ids,
        "inputs of stages": [deploy.inputs_of(stage_id) for stage_id in ids],
        "final outputs": [stage.final_output for stage in deploy.stages],
    }


def _model_of(stage: Any) -> tuple[Any, ...]:
    return stage.engine, stage.model, stage.engine_args, stage.default_sampling_params


def _load_of(pair: tuple[float, Release]) -> float:
    return pair[0]
