"""DeployVersions: the deploy documents that a hub serves, and which of them a new request goes by. Pure.

A request goes by one document from its admission to its end: the same versions of all stages. While a new document is
rolled out, replicas of both are up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
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
    from omni_discovery.records.params import ParamBounds
    from omni_discovery.records.schema import ReplicaInfo

#: How many deploy documents a hub serves at most: replicas that run an older one get no requests.
_REMEMBERED: Final = 4
#: Names of voices that are looked at: every record may have 256, and there may be ten thousand records.
_MOST_VOICES: Final = 1 << 16

#: How many unfinished requests of this hub still need that version of a stage.
Backlog = Callable[[int, str], int]


@dataclass(frozen=True, slots=True, eq=False)
class DeployVersion:
    """One deploy document as a hub serves it: its graph, and the fingerprint and pool of each stage."""

    graph: StageGraph
    fingerprints: Mapping[int, str]
    pools: Mapping[int, StagePool]

    def is_complete(self, stages: Iterable[int]) -> bool:
        """Whether each of these stages has a replica that can take work."""
        return all(self.pools[stage_id].core.members.pickable_count for stage_id in stages)

    def load(self, stages: Iterable[int], backlog: Backlog, hubs: int) -> float:
        """Unfinished requests per slot at the most loaded of these stages; infinite if one has no slot."""
        highest = 0.0
        for stage_id in stages:
            slots = self.pools[stage_id].core.members.slots
            waiting = backlog(stage_id, self.fingerprints[stage_id]) * hubs
            highest = max(highest, waiting / slots if slots else inf)
        return highest


class DeployVersions:
    """The documents that were in force since the hub started, the newest last.

    With ``fixed_models`` the hub has loaded parts of the models itself, and can't follow a document that changes one.
    """

    def __init__(self, deploy: DeployConfig, pools: Pools, *, fixed_models: bool = False) -> None:
        #: The pools of all versions, also of versions that are not served.
        self.every = pools
        self._fixed_models = fixed_models
        fingerprints = stage_fingerprints(deploy)
        firsts = {stage_id: pools.begin_with(stage_id, each) for stage_id, each in fingerprints.items()}
        self._releases = [DeployVersion(StageGraph(deploy), fingerprints, firsts)]
        #: The last document that was compared, as stored in the registry.
        self._seen = encode_deploy(deploy)
        #: The document that is served, as stored in the registry, and its fingerprint.
        self.document = self._seen
        self.served = document_fingerprint(self._seen)
        #: Why the document in force can't be served without a restart of the hub; empty if it is.
        self.problem = ""

    @property
    def newest(self) -> DeployVersion:
        """The version of the document in force, or of the last one that could be followed."""
        return self._releases[-1]

    def wanted_count(self, stage_id: int) -> int:
        """How many replicas of a stage that version asks for."""
        return self.newest.graph.deploy.stage(stage_id).runtime.num_replicas

    def apply_document(self, document: bytes | None) -> bool:
        """Apply the deploy document in force (None: the registry has none); return whether it is a new one."""
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
            self.document, self.served = document, document_fingerprint(document)
            self._take(deploy)
        return True

    def choose(self, stages: Iterable[int], backlog: Backlog, hubs: int) -> DeployVersion:
        """Choose the version that a new request goes by that needs these stages.

        The newest with a free slot at each of them, because an old version that is being replaced still has slots to
        use; if all are full, the least loaded; if none has a replica at each stage, the newest, whose replicas will
        come up.
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
        """Whether more than one version is served."""
        return len(self._releases) > 1

    def other_than(self, release: DeployVersion, had: Iterable[int], needed: Iterable[int]) -> DeployVersion | None:
        """The newest version that can serve ``needed`` and equals ``release`` in the stages ``had``, or None."""
        past, ahead = tuple(had), tuple(needed)
        for other in reversed(self._releases):
            is_alike = all(other.fingerprints[stage_id] == release.fingerprints[stage_id] for stage_id in past)
            if other is not release and is_alike and other.is_complete(ahead):
                return other
        return None

    def status(self) -> tuple[StageStatus, ...]:
        """The status of each stage: how many replicas are registered, and how many can take a new request's work."""
        pools = self._shown().pools
        return tuple(self._status(pools[stage_id]) for stage_id in self.newest.graph.stage_ids)

    def serving_replicas(self) -> dict[str, Hashable]:
        """By name, the processes of the replicas that can take a new request's work, ordered by stage and id."""
        members = [pool.core.members.entries.values() for pool in self._shown().pools.values()]
        infos = [entry.info for entries in members for entry in entries if entry.pickable]
        infos.sort(key=lambda info: (info.stage_id, info.replica_id))
        # No epoch: a process that registers again is the same.
        return {info.name: (info.host, info.pid, info.input_addr, info.curve_public_key) for info in infos}

    def voices(self) -> list[str]:
        """The voices that registered replicas name, sorted; those that take work first, where they are very many."""
        members = [entry for pool in self._shown().pools.values() for entry in pool.core.members.entries.values()]
        members.sort(key=lambda entry: not entry.pickable)
        return sorted(set(islice((name for entry in members for name in entry.info.voices), _MOST_VOICES)))

    def params_taken(self, stage_id: int) -> list[Mapping[str, ParamBounds] | None]:
        """What each replica of a stage says that parameters may be, None where it says nothing."""
        entries = self._shown().pools[stage_id].core.members.entries.values()
        return [entry.info.params for entry in entries if entry.info.takes_new_work]

    def _shown(self) -> DeployVersion:
        """The newest version that can serve every stage; the newest of all if none can."""
        stages = self.newest.graph.stage_ids
        complete = (release for release in reversed(self._releases) if release.is_complete(stages))
        return next(complete, self.newest)

    def _status(self, pool: StagePool) -> StageStatus:
        status, others = pool.core.status, [each for each in self.every.of_stage(pool.stage_id) if each is not pool]
        registered = status.registered + sum(other.core.members.registered_count for other in others)
        if registered == status.registered or not status.why_absent:
            return replace(status, registered=registered)
        why = f"{status.why_absent}; {registered - status.registered} run another version of it"
        return replace(status, registered=registered, why_absent=why)

    def knows(self, info: ReplicaInfo) -> bool:
        """Whether a replica runs a version that this hub serves."""
        if not info.fingerprint:
            return True
        return any(release.fingerprints.get(info.stage_id) == info.fingerprint for release in self._releases)

    @property
    def pools(self) -> set[StagePool]:
        """The pools of all served versions."""
        return {pool for release in self._releases for pool in release.pools.values()}

    def _take(self, deploy: DeployConfig) -> None:
        fingerprints = stage_fingerprints(deploy)
        pools = {stage_id: self.every.serve(stage_id, each) for stage_id, each in fingerprints.items()}
        # A document that comes back into force is the newest again.
        others = [release for release in self._releases if release.fingerprints != fingerprints]
        self._releases = [*others[-(_REMEMBERED - 1) :], DeployVersion(StageGraph(deploy), fingerprints, pools)]

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
    """The parts of a document that can't change without a restart of the hub, by name."""
    ids = [stage.stage_id for stage in deploy.stages]
    return {
        "stages": ids,
        "inputs of stages": [deploy.inputs_of(stage_id) for stage_id in ids],
        "final outputs": [stage.final_output for stage in deploy.stages],
    }


def _model_of(stage: Any) -> tuple[Any, ...]:
    return stage.engine, stage.model, stage.engine_args, stage.default_sampling_params


def _load_of(pair: tuple[float, DeployVersion]) -> float:
    return pair[0]
