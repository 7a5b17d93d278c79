"""Idempotency keys: what a client names its request by, so that the same one sent again is not a second one. Pure.

No answer is kept. A request that is sent again while the first is under way is refused; after that it runs again, with
the same seed. One key is of one client and one body: for another body it is refused, as long as the key is remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from hub.api.errors import RetryConflictError

HEADER: Final = "Idempotency-Key"
#: Keys of requests that have ended, and how long each is remembered.
_MOST_ENDED: Final = 8192
_REMEMBERED_S: Final = 600.0


class IdempotencyClaim:
    """One request under its client's key."""

    __slots__ = ("ended_at_s", "name", "request")

    def __init__(self, name: tuple[bytes, str], request: bytes) -> None:
        self.name = name
        self.request = request
        #: None while it is under way.
        self.ended_at_s: float | None = None


class IdempotencyKeys:
    """The keys of one route of a hub. Those under way are as many as its requests; the ended ones are bounded."""

    def __init__(self, most_ended: int = _MOST_ENDED, remembered_s: float = _REMEMBERED_S) -> None:
        self._most_ended = most_ended
        self._remembered_s = remembered_s
        self._under_way: dict[tuple[bytes, str], IdempotencyClaim] = {}
        #: In the order in which they have ended.
        self._ended: OrderedDict[tuple[bytes, str], IdempotencyClaim] = OrderedDict()

    def __len__(self) -> int:
        return len(self._under_way) + len(self._ended)

    def begin(self, key_digest: bytes, key: str, request: bytes, now_s: float) -> IdempotencyClaim:
        """Claim a key for a request, given by its digest. Raise RetryConflictError."""
        name = key_digest, key
        self._forget_old(now_s)
        before = self._under_way.get(name) or self._ended.get(name)
        if before is not None and before.request != request:
            raise RetryConflictError(
                "idempotency_key_reused", f"{HEADER}: another request has this key: give each request a key of its own"
            )
        if name in self._under_way:
            raise RetryConflictError(
                "idempotency_key_in_use", f"{HEADER}: this request is under way already", retry_after_s=1.0
            )
        self._ended.pop(name, None)
        claim = self._under_way[name] = IdempotencyClaim(name, request)
        return claim

    def end(self, claim: IdempotencyClaim, now_s: float) -> None:
        """The request has ended. Idempotent."""
        if self._under_way.get(claim.name) is claim:
            del self._under_way[claim.name]
            claim.ended_at_s = now_s
            self._ended[claim.name] = claim
            if len(self._ended) > self._most_ended:
                self._ended.popitem(last=False)

    def forget(self, claim: IdempotencyClaim) -> None:
        """The request was answered with an error before anything of an answer: its key is free. Idempotent."""
        for claims in (self._under_way, self._ended):
            if claims.get(claim.name) is claim:
                del claims[claim.name]

    def _forget_old(self, now_s: float) -> None:
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if oldest.ended_at_s is None or now_s - oldest.ended_at_s < self._remembered_s:
                return
            del self._ended[oldest.name]
