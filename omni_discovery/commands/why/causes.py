"""Which of the things that ``omni status`` finds wrong tell why: for a replica, or for requests. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from omni_discovery.commands.findings.checks import Finding, Grade

#: Topics that concern everything in a namespace, if they name no replica and no stage.
_OF_ALL: Final = frozenset({"etcd", "namespace", "pipeline"})
#: Topics that tell of a stage why a replica of it is not there.
_OF_ABSENT: Final = frozenset({"stage", "crash loop", "settings", "no room", "waiting", "ended", "record", "too few"})


def of_replica(
    found: Sequence[Finding], name: str, hubs: Collection[str], *, is_registered: bool, is_told: bool
) -> list[Finding]:
    """Why a replica gets nothing, or is not there.

    ``found`` are findings one by one, ``hubs`` the ids of those that have answered; ``is_told``: one of them has told
    of the replica, so that what leads to this very question is said.
    """
    stage_id = int(name.partition("/")[0])
    chosen = [
        each
        for each in found
        if name in (each.replica, *each.also)
        or (not is_registered and not each.replica and each.stage_id == stage_id and each.topic in _OF_ABSENT)
        or _concerns_all(each, hubs)
    ]
    if is_told:
        chosen = [each for each in chosen if each.more != ("omni", "why", name)]
    return list(_without_effects(chosen))


def of_requests(
    found: Sequence[Finding], question: str, stages: Collection[int], hubs: Collection[str]
) -> list[Finding]:
    """Why requests wait at these ``stages``, or fail: also what stops all requests of other stages.

    ``question`` is the flag that was asked by: what leads to that is left out, if ``hubs`` have answered.
    """
    deserted = {each.stage_id for each in found if each.topic == "stage"}
    chosen = [
        each
        for each in found
        if each.stage_id in {*stages, *deserted} - {None}
        or any(int(name.partition("/")[0]) in {*stages, *deserted} for name in each.also)
        or _concerns_all(each, hubs)
    ]
    leads_here = ("omni", "why", question)
    return [each for each in chosen if not (hubs and each.more == leads_here)]


def _concerns_all(each: Finding, hubs: Collection[str]) -> bool:
    """Whether a finding is about all replicas, or about these hubs; where none has answered, about any."""
    if each.hub:
        return each.hub in hubs or not hubs
    is_wrong = each.grade is Grade.PROBLEM and not each.replica and each.stage_id is None
    return is_wrong and each.topic in _OF_ALL


def _without_effects(chosen: Sequence[Finding]) -> Iterator[Finding]:
    """Leave out that a stage has nobody, where it is said why."""
    explained = {each.stage_id for each in chosen if each.topic != "stage"}
    yield from (each for each in chosen if each.topic != "stage" or each.stage_id not in explained)
