"""MassLossGuard: which members stay in service although the registry no longer lists them.

A key that is gone means that its owner is gone, with one exception: when a registry loses many keys at once while
their owners still answer, it is more likely that the registry was wiped, restored or partitioned than that so many
processes died in one moment. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_Pool = TypeVar("_Pool")
_Member = TypeVar("_Member")

#: A single member that vanishes is never a mass loss.
_LEAST_MASS: Final = 2
#: The end of a member that only stays because it is the last one that answers: no timer ends it.
_PAST_S: Final = float("-inf")


@dataclass(slots=True)
class _Missing:
    """A member that the registry no longer lists."""

    vanished_at_s: float
    #: Whether it did not answer either when it vanished: then registry and session agree that it is gone.
    silent: bool = False
    #: Whether it vanished in a mass loss. Only such members stay in service.
    is_kept: bool = False
    #: When a kept member is given up; None while the view has not been proved fresh since the loss.
    until_s: float | None = None


class MassLossGuard(Generic[_Pool, _Member]):
    """Keeps members by pool through a mass loss. Moments are monotonic seconds.

    A mass loss: the registry went back in its history, or within one ``ttl_s`` more than half of a pool's members in
    service, and at least two, vanished while they answered. Its members stay in service until ``ttl_s`` after the view
    was proved fresh; after that, one that answers stays as long as no other member of its pool answers.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        #: Whether each listed member is in service. One that is not has withdrawn: its key is expected to go.
        self._listed: dict[_Pool, dict[_Member, bool]] = {}
        self._missing: dict[_Pool, dict[_Member, _Missing]] = {}

    def apply_members(
        self,
        listed: Mapping[_Pool, Mapping[_Member, bool]],
        *,
        fresh: bool,
        regressed: bool,
        now_s: float,
        answers: Callable[[_Pool, _Member], bool] = lambda _pool, _member: True,
    ) -> None:
        """The registry lists these members, each with whether it is in service.

        ``fresh``: the view is proved to be the registry's; ``regressed``: the registry went back in its history;
        ``answers``: whether a member has a session that answers now.
        """
        gone = {
            pool: [member for member in before if member not in listed.get(pool, {})]
            for pool, before in self._listed.items()
        }
        self.apply_changes(listed, gone, fresh=fresh, regressed=regressed, now_s=now_s, answers=answers)

    def apply_changes(
        self,
        put: Mapping[_Pool, Mapping[_Member, bool]],
        gone: Mapping[_Pool, Collection[_Member]],
        *,
        fresh: bool,
        regressed: bool,
        now_s: float,
        answers: Callable[[_Pool, _Member], bool] = lambda _pool, _member: True,
    ) -> None:
        """Some members have come or changed, others are gone; all else is as in ``apply_members``."""
        for pool in put.keys() | gone.keys() | self._missing.keys():
            present = self._listed.setdefault(pool, {})
            left = [(member, present.pop(member, False)) for member in gone.get(pool, ())]
            vanished = [member for member, serves in left if serves]
            present.update(put.get(pool, {}))
            missing = self._missing.setdefault(pool, {})
            for member in missing.keys() & put.get(pool, {}).keys():
                del missing[member]
            # One that is silent, too, is gone, unless the registry is one that never had it: thousands may be.
            lost = [(member, not answers(pool, member)) for member in vanished]
            missing.update((member, _Missing(now_s, silent)) for member, silent in lost if regressed or not silent)
            self._forget_strays(missing, now_s)
            if vanished and (regressed or self._is_mass_loss(present, missing, now_s)):
                for each in missing.values():
                    each.is_kept = each.is_kept or regressed or not each.silent
            for each in missing.values():
                self._set_end(each, fresh=fresh, now_s=now_s)

    def kept_without_record(
        self, answers: Callable[[_Pool, _Member], bool], now_s: float
    ) -> dict[_Pool, list[_Member]]:
        """The members to keep in service although they are not listed, by pool.

        Call it after ``apply_members``, when a session came or went, and at ``next_review_s``.
        """
        return {pool: kept for pool in list(self._missing) if (kept := self._keep(pool, answers, now_s))}

    def tracked(self) -> set[tuple[_Pool, _Member]]:
        """Every missing member that is kept, or still may be."""
        return {(pool, member) for pool, missing in self._missing.items() for member in missing}

    @property
    def next_review_s(self) -> float | None:
        """When time alone changes what ``kept_without_record`` returns; None if it does not."""
        ends = [each.until_s for missing in self._missing.values() for each in missing.values()]
        return min((end_s for end_s in ends if end_s is not None and end_s > _PAST_S), default=None)

    def _forget_strays(self, missing: dict[_Member, _Missing], now_s: float) -> None:
        for member, each in list(missing.items()):
            if not each.is_kept and now_s - each.vanished_at_s > self._ttl_s:
                del missing[member]

    def _is_mass_loss(self, present: Mapping[_Member, bool], missing: Mapping[_Member, _Missing], now_s: float) -> bool:
        recent = (each for each in missing.values() if now_s - each.vanished_at_s <= self._ttl_s)
        lost = sum(not each.silent for each in recent)
        return lost >= _LEAST_MASS and 2 * lost > lost + sum(present.values())

    def _set_end(self, each: _Missing, *, fresh: bool, now_s: float) -> None:
        if not fresh:
            each.until_s = None
        elif each.is_kept and each.until_s is None:
            each.until_s = now_s + self._ttl_s

    def _keep(self, pool: _Pool, answers: Callable[[_Pool, _Member], bool], now_s: float) -> list[_Member]:
        missing = self._missing[pool]
        kept_entries = {member: each for member, each in missing.items() if each.is_kept}
        kept = [member for member, each in kept_entries.items() if each.until_s is None or now_s < each.until_s]
        staying = set(kept)
        overdue = [member for member in kept_entries if member not in staying]
        if not overdue:
            return kept
        listed = self._listed.get(pool, {})
        others = [member for member, serves in listed.items() if serves]
        last = None
        if not any(answers(pool, member) for member in (*others, *kept)):
            last = next((member for member in overdue if answers(pool, member)), None)
        for member in overdue:
            if member != last:
                del missing[member]
        if last is None:
            return kept
        # Only its own silence, or another member that answers, ends it now.
        missing[last].until_s = _PAST_S
        return [*kept, last]
