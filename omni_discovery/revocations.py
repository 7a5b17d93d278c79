"""Revocations: which hubs are revoked, also while the registry has lost what it said of them. Pure."""

from __future__ import annotations


class Revocations:
    """A hub is revoked while its control key says so. Moments are monotonic seconds.

    A key that was deleted or changed revokes no more. A key that is gone because the registry was wiped, restored or
    replaced still does, until one ``ttl_s`` after the view was proved fresh: by then an operator's tools have put it
    back, or nobody wants it.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._listed: frozenset[str] = frozenset()
        #: Hubs whose keys the registry has lost, until when; None while the view is not proved fresh.
        self._kept: dict[str, float | None] = {}

    def follow(self, listed: frozenset[str], *, fresh: bool, regressed: bool, now_s: float) -> None:
        """The registry says that these are revoked; ``regressed``: it went back in its history."""
        lost = self._listed - listed if regressed else frozenset()
        self._kept.update(dict.fromkeys(lost))
        for hub_id, until_s in list(self._kept.items()):
            if hub_id in listed:
                del self._kept[hub_id]
            elif not fresh:
                self._kept[hub_id] = None
            elif until_s is None:
                self._kept[hub_id] = now_s + self._ttl_s
        self._listed = listed

    def review(self, now_s: float) -> frozenset[str]:
        """The hubs that are revoked now."""
        for hub_id, until_s in list(self._kept.items()):
            if until_s is not None and now_s >= until_s:
                del self._kept[hub_id]
        return self._listed | self._kept.keys()

    @property
    def next_review_s(self) -> float | None:
        """When time alone changes the answer."""
        return min((until_s for until_s in self._kept.values() if until_s is not None), default=None)
