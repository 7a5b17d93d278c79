"""Fingerprints, short hashes of deploy documents and of one stage's part; which replicas mismatch for theirs. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

import msgspec

from omni_discovery.deploy.document import DeployConfig, StageConfig, decode_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.records.schema import ReplicaInfo

_Key = TypeVar("_Key", bound=Hashable)


def stage_fingerprint(deploy: DeployConfig, stage_id: int) -> str:
    """Return a hash of the stage's part of the document and of its edges, which its replicas must have in common.

    ``runtime`` is left out, and so are values that are the defaults, so that a release with more keys computes the same
    hash. Raise ConfigError for an unknown stage.
    """
    stage = deploy.stage(stage_id)
    content: dict[str, Any] = {
        name: value
        for name, value, default in _fields(stage, StageConfig(stage_id=stage_id, engine=stage.engine))
        if name != "runtime" and (value != default or name in ("stage_id", "engine"))
    }
    content["input_from"] = deploy.inputs_of(stage_id)
    edges = [edge for edge in deploy.edges if stage_id in (edge.from_, edge.to)]
    if edges:
        named = [deploy.connectors.get(edge.connector) for edge in edges]
        content["edges"] = edges
        content["connectors"] = [connector and (connector.name, connector.extra) for connector in named]
    return _hash(msgspec.json.encode(content, order="sorted"))


def stage_fingerprints(deploy: DeployConfig) -> dict[int, str]:
    """Return the fingerprint of each stage by stage id."""
    return {stage.stage_id: stage_fingerprint(deploy, stage.stage_id) for stage in deploy.stages}


def document_fingerprint(document: bytes) -> str:
    """Return the hash of a deploy document's bytes in the registry."""
    return _hash(document)


def _fields(stage: StageConfig, defaults: StageConfig) -> list[tuple[str, Any, Any]]:
    return [(name, getattr(stage, name), getattr(defaults, name)) for name in stage.__struct_fields__]


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


#: The reason for a replica that was started with a document which this hub does not serve.
OTHER_DOCUMENT: Final = "it runs another deploy document than the one in force"


@dataclass(slots=True)
class _Alike(Generic[_Key]):
    """The replicas of one version of a stage, by the files that they have loaded."""

    #: The files that the others should have loaded, too.
    right: str
    by_content: dict[str, dict[_Key, ReplicaInfo]] = field(default_factory=dict)


class Mismatches(Generic[_Key]):
    """Which replicas must not be picked for what they run, kept up to date replica by replica.

    A replica must not be picked if ``knows`` is false for it (its deploy document is not served), or if its model files
    differ from the files that most replicas of the same document have loaded, as ``recount`` found last; before that,
    from the files that were there first.
    """

    def __init__(self, knows: Callable[[ReplicaInfo], bool]) -> None:
        self._knows = knows
        #: Those that must not be picked, with the reason.
        self.found: dict[_Key, tuple[ReplicaInfo, str]] = {}
        #: Those whose reason may be another than when this was emptied last.
        self.changed: dict[_Key, None] = {}
        self._infos: dict[_Key, ReplicaInfo] = {}
        self._alike: dict[tuple[int, str], _Alike[_Key]] = {}
        #: Versions whose replicas have loaded several files.
        self._disputed: dict[tuple[int, str], None] = {}

    def __repr__(self) -> str:
        return f"Mismatches({len(self.found)} of {len(self._infos)}, {len(self._disputed)} disputed)"

    @property
    def is_disputed(self) -> bool:
        """Whether ``recount`` may find other files to be right."""
        return bool(self._disputed)

    def __contains__(self, key: object) -> bool:
        """Whether a replica is among those that are compared."""
        return key in self._infos

    def put(self, key: _Key, info: ReplicaInfo) -> None:
        """A replica is there, new or changed."""
        before = self._infos.get(key)
        if before is not None and _ran(before) == _ran(info):
            self._update(key, info)
            return
        self.remove(key)
        self._infos[key] = info
        self.changed[key] = None
        if not self._knows(info):
            self.found[key] = info, OTHER_DOCUMENT
        elif info.content:
            version = info.stage_id, info.fingerprint
            alike = self._alike.setdefault(version, _Alike(info.content))
            alike.by_content.setdefault(info.content, {})[key] = info
            if len(alike.by_content) > 1:
                self._disputed[version] = None
            self._judge(key, info, alike.right)

    def _update(self, key: _Key, info: ReplicaInfo) -> None:
        """A replica runs what it ran before."""
        self._infos[key] = info
        alike = self._alike.get((info.stage_id, info.fingerprint))
        if alike is not None and key in alike.by_content.get(info.content, ()):
            alike.by_content[info.content][key] = info
        if key in self.found:
            self.found[key] = info, self.found[key][1]

    def remove(self, key: _Key) -> None:
        """A replica is gone. Unknown ones are fine."""
        info = self._infos.pop(key, None)
        if info is None:
            return
        self.changed[key] = None
        self.found.pop(key, None)
        version = info.stage_id, info.fingerprint
        alike = self._alike.get(version)
        if alike is None or key not in alike.by_content.get(info.content, ()):
            return
        del alike.by_content[info.content][key]
        if not alike.by_content[info.content]:
            del alike.by_content[info.content]
            if len(alike.by_content) < 2:
                self._disputed.pop(version, None)
            if not alike.by_content:
                del self._alike[version]
            elif alike.right == info.content:
                self._set_right(alike, next(iter(alike.by_content)))

    def judge_all(self) -> None:
        """Other documents are served than before."""
        infos, self._infos = self._infos, {}
        self.changed.update(dict.fromkeys(infos))
        self.found, self._alike, self._disputed = {}, {}, {}
        for key, info in infos.items():
            self.put(key, info)

    def recount(self, counts: Callable[[ReplicaInfo], bool] = lambda _info: True) -> None:
        """Find which files most replicas of each version have loaded.

        Only those of which ``counts`` is true are counted: anybody may write a record. In a tie, the files of the
        replica whose record etcd saw first count.
        """
        for version in self._disputed:
            alike = self._alike[version]
            right = max(alike.by_content, key=lambda content: _claim(alike.by_content[content].values(), counts))
            if right != alike.right:
                self._set_right(alike, right)

    def _set_right(self, alike: _Alike[_Key], right: str) -> None:
        alike.right = right
        for infos in alike.by_content.values():
            for key, info in infos.items():
                self._judge(key, info, right)

    def _judge(self, key: _Key, info: ReplicaInfo, right: str) -> None:
        self.found.pop(key, None)
        self.changed[key] = None
        if info.content != right:
            why = f"it has loaded other files of its model ({info.content}) than most of its stage ({right})"
            self.found[key] = info, why


def mismatches(
    listed: Iterable[ReplicaInfo],
    knows: Callable[[ReplicaInfo], bool],
    counts: Callable[[ReplicaInfo], bool] = lambda _info: True,
) -> list[tuple[ReplicaInfo, str]]:
    """Return the replicas that must not be picked, each with the reason, as ``Mismatches`` finds them."""
    all_: Mismatches[int] = Mismatches(knows)
    for number, info in enumerate(listed):
        all_.put(number, info)
    all_.recount(counts)
    return list(all_.found.values())


def mismatches_in_force(listed: Iterable[ReplicaInfo], pipeline: bytes | None) -> list[tuple[ReplicaInfo, str]]:
    """Return the replicas that mismatch the pipeline in force, given as its bytes; none if it can't be decoded."""
    expected = {} if pipeline is None else _expected_of(pipeline)
    if expected is None:
        return []
    return mismatches(listed, lambda info: not expected or info.fingerprint in ("", expected.get(info.stage_id)))


#: Decoded once: screens ask for it twice a second, and a long one takes half a second.
@lru_cache(maxsize=2)
def _expected_of(pipeline: bytes) -> Mapping[int, str] | None:
    try:
        return stage_fingerprints(decode_deploy(pipeline, ""))
    except ConfigError:
        return None


def _ran(info: ReplicaInfo) -> tuple[int, str, str]:
    return info.stage_id, info.fingerprint, info.content


def _claim(infos: Collection[ReplicaInfo], counts: Callable[[ReplicaInfo], bool]) -> tuple[int, float, str]:
    able = [info for info in infos if info.takes_new_work]
    # Not the moment that a record claims for itself.
    first = min((info.epoch for info in able), default=math.inf)
    return sum(map(counts, able)), -first, next(iter(infos)).content
