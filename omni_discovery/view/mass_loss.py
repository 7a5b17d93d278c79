"""Disappearance: which members that the registry no longer lists are served all the same.

A key that is gone means that its owner is gone, but for one case: when a registry loses much at once, it is more likely
that the registry was wiped, restored or cut off than that so many processes died in one moment while all of them still
answer. Pure: time and who answers come in as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_Pool = TypeVar("_Pool")
_Member = TypeVar("_Member")

#: Fewer members than this vanish one by one every day.
_LEAST_MASS: Final = 2
#: The end of a member that only stays because it is the last: nothing happens then.
_PAST_S: Final = float("-inf")


@dataclass(slots=True)
class _Missing:
    vanished_at_s: float
    #: Whether it did not answer either when it vanished: both witnesses say that it is gone.
    silent: bool = False
    #: Whether it vanished with many others. Only such members are served on.
    spared: bool = False
    #: When a spared member is given up; None while the view has not been proved fresh since.
    until_s: float | None = None


class Disappearance(Generic[_Pool, _Member]):
    """Members by pool. A mass disappearance: the registry went back in its history, or within one ``ttl_s`` more than
    half of a pool's members in service, and at least two, vanished while they answered.

    Its members are spared until ``ttl_s`` after the view was proved fresh; then one that answers stays as long as
    nobody else of its pool does.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        #: Whether each listed member is in service. One that is not has said farewell: its key is expected to go.
        self._listed: Mapping[_Pool, Mapping[_Member, bool]] = {}
        self._missing: dict[_Pool, dict[_Member, _Missing]] = {}

    def follow(
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
        ``answers``: who answers now.
        """
        before, self._listed = self._listed, listed
        for pool in before.keys() | self._missing.keys():
            missing = self._missing.setdefault(pool, {})
            here = listed.get(pool, {})
            for member in missing.keys() & here.keys():
                del missing[member]
            vanished = [member for member, serves in before.get(pool, {}).items() if serves and member not in here]
            missing.update((member, _Missing(now_s, not answers(pool, member))) for member in vanished)
            self._forget_strays(missing, now_s)
            if vanished and (regressed or self._is_mass(here, missing, now_s)):
                for each in missing.values():
                    each.spared = each.spared or regressed or not each.silent
            for each in missing.values():
                self._set_end(each, fresh=fresh, now_s=now_s)
            if not missing:
                del self._missing[pool]

    def review(self, answers: Callable[[_Pool, _Member], bool], now_s: float) -> dict[_Pool, list[_Member]]:
        """The members to serve though they are not listed; call it after ``follow``, and when time or sessions move."""
        return {pool: kept for pool in list(self._missing) if (kept := self._keep(pool, answers, now_s))}

    def tracked(self) -> set[tuple[_Pool, _Member]]:
        """Every missing member that may still turn out to be spared, or is."""
        return {(pool, member) for pool, missing in self._missing.items() for member in missing}

    @property
    def next_review_s(self) -> float | None:
        """When time alone changes what ``review`` says; None if it does not."""
        ends = [each.until_s for missing in self._missing.values() for each in missing.values()]
        return min((end_s for end_s in ends if end_s is not None and end_s > _PAST_S), default=None)

    def _forget_strays(self, missing: dict[_Member, _Missing], now_s: float) -> None:
        for member, each in list(missing.items()):
            if not each.spared and now_s - each.vanished_at_s > self._ttl_s:
                del missing[member]

    def _is_mass(self, here: Mapping[_Member, bool], missing: Mapping[_Member, _Missing], now_s: float) -> bool:
        recent = (each for each in missing.values() if now_s - each.vanished_at_s <= self._ttl_s)
        lost = sum(not each.silent for each in recent)
        return lost >= _LEAST_MASS and 2 * lost > lost + sum(here.values())

    def _set_end(self, each: _Missing, *, fresh: bool, now_s: float) -> None:
        if not fresh:
            each.until_s = None
        elif each.spared and each.until_s is None:
            each.until_s = now_s + self._ttl_s

    def _keep(self, pool: _Pool, answers: Callable[[_Pool, _Member], bool], now_s: float) -> list[_Member]:
        missing = self._missing[pool]
        spared = {member: each for member, each in missing.items() if each.spared}
        kept = [member for member, each in spared.items() if each.until_s is None or now_s < each.until_s]
        over = [member for member in spared if member not in kept]
        if not over:
            return kept
        listed = self._listed.get(pool, {})
        others = [member for member, serves in listed.items() if serves]
        last = None
        if not any(answers(pool, member) for member in (*others, *kept)):
            last = next((member for member in over if answers(pool, member)), None)
        for member in over:
            if member != last:
                del missing[member]
        if last is None:
            return kept
        # Nothing but its own silence, or another that answers, ends it now.
        missing[last].until_s = _PAST_S
        return [*kept, last]
