"""ReplicaMap: the replicas of a view by id. The next one is made from it by little copying, however many there are."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Final

from omni_discovery.records.schema import ReplicaInfo

#: (stage_id, replica_id)
ReplicaId = tuple[int, int]
#: By stage and by what the ids of a group have in common.
_Groups = dict[ReplicaId, dict[ReplicaId, ReplicaInfo]]

#: Replicas whose ids differ in these last bits only are in one group: ten thousand in about as many as each group has.
_BITS: Final = 7


def replica_id(info: ReplicaInfo) -> ReplicaId:
    """The key of a replica."""
    return info.stage_id, info.replica_id


class ReplicaMap(Mapping[ReplicaId, ReplicaInfo]):
    """Never changes. The next one has all groups in common with it but those in which a replica is another."""

    __slots__ = ("_count", "_groups")

    def __init__(self, groups: _Groups | None = None, count: int = 0) -> None:
        self._groups = groups or {}
        self._count = count

    def changed(self, removed: Iterable[ReplicaInfo], put: Iterable[ReplicaInfo]) -> ReplicaMap:
        """The replicas without those that are removed and then with those that are put. Raise KeyError."""
        groups, count = self._groups.copy(), self._count
        #: The groups that the new one has for itself.
        own: _Groups = {}
        for info in removed:
            del _own_group(groups, own, replica_id(info))[replica_id(info)]
            count -= 1
        for info in put:
            group = _own_group(groups, own, replica_id(info))
            count -= len(group)
            group[replica_id(info)] = info
            count += len(group)
        for place, group in own.items():
            if not group:
                del groups[place]
        return ReplicaMap(groups, count)

    def __getitem__(self, key: ReplicaId) -> ReplicaInfo:
        """See Mapping."""
        return self._groups[key[0], key[1] >> _BITS][key]

    def get(self, key: ReplicaId, default: Any = None) -> Any:
        """See Mapping."""
        group = self._groups.get((key[0], key[1] >> _BITS))
        return default if group is None else group.get(key, default)

    def __iter__(self) -> Iterator[ReplicaId]:
        """See Mapping."""
        return chain.from_iterable(self._groups.values())

    def __len__(self) -> int:
        """See Mapping."""
        return self._count

    def values(self) -> ValuesView[ReplicaInfo]:
        """See Mapping."""
        return _Values(self, self._groups)

    def items(self) -> ItemsView[ReplicaId, ReplicaInfo]:
        """See Mapping."""
        return _Items(self, self._groups)

    def __repr__(self) -> str:
        return f"ReplicaMap({dict(self)!r})"


class _Values(ValuesView[ReplicaInfo]):
    def __init__(self, mapping: ReplicaMap, groups: _Groups) -> None:
        super().__init__(mapping)
        self._groups = groups

    def __iter__(self) -> Iterator[ReplicaInfo]:
        return chain.from_iterable(group.values() for group in self._groups.values())


class _Items(ItemsView[ReplicaId, ReplicaInfo]):
    def __init__(self, mapping: ReplicaMap, groups: _Groups) -> None:
        super().__init__(mapping)
        self._groups = groups

    def __iter__(self) -> Iterator[tuple[ReplicaId, ReplicaInfo]]:
        return chain.from_iterable(group.items() for group in self._groups.values())


def _own_group(groups: _Groups, own: _Groups, key: ReplicaId) -> dict[ReplicaId, ReplicaInfo]:
    place = key[0], key[1] >> _BITS
    group = own.get(place)
    if group is None:
        group = own[place] = groups[place] = groups.get(place, {}).copy()
    return group
