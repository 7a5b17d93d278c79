"""Outlier ejection: a replica that keeps failing gets no new work for a while, if enough others are left. Pure.

A failure counts in comparison only: a replica is ejected if it fails much more often than the others of its pool, and a
failure of a request that failed at another replica, too, is excused. So requests that fail everywhere eject nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

#: So many failures in a row eject.
_FAILURES_IN_A_ROW: Final = 3
#: Of so many last outcomes, once there are enough, more than half failed eject, too.
_WINDOW: Final = 20
_WINDOW_MIN: Final = 10


class OutlierState(Enum):
    """Whether a replica is left out for its failures."""

    FINE = "fine"
    EJECTED = "ejected"
    #: Its ejection is over: one request at a time shows whether it works again.
    PROBED = "probed"


class Health:
    """The last outcomes of one replica, and what follows from them."""

    __slots__ = (
        "_failed_probe",
        "_outcomes",
        "_recovered_at_s",
        "ejected_at_s",
        "ejections",
        "is_blocked",
        "needs_probe",
        "probe",
        "reason",
        "state",
        "until_s",
    )

    def __init__(self) -> None:
        self.state = OutlierState.FINE
        #: Whether no request may go there now, panic aside: ejected, or probed by a request that is under way.
        self.is_blocked = False
        #: Whether the next request to be bound is the probe.
        self.needs_probe = False
        #: The request that probes a replica whose ejection is over.
        self.probe: str | None = None
        #: When the ejection began and when it ends, monotonic.
        self.ejected_at_s = self.until_s = 0.0
        #: Why it was ejected last; empty before the first ejection.
        self.reason = ""
        #: Ejections lately, each twice as long as the one before.
        self.ejections = 0
        #: The last outcomes, the newest last: the id of a request that failed, which may be empty; None: it was served.
        self._outcomes: deque[str | None] = deque(maxlen=_WINDOW)
        #: The request whose failure as the probe has ejected it again.
        self._failed_probe: str | None = None
        self._recovered_at_s = 0.0

    def __repr__(self) -> str:
        return f"Health({self.state.name}, {self.failures} of {self.seen} failed, probe={self.probe})"

    @property
    def seen(self) -> int:
        """How many of the last outcomes are known."""
        return len(self._outcomes)

    @property
    def failures(self) -> int:
        """How many of those failed."""
        return len(self._outcomes) - self._outcomes.count(None)

    def succeeded(self) -> None:
        """A request was served."""
        self._outcomes.append(None)

    def withdraw_success(self) -> None:
        """A request that counted as served was not: what was handed over can't be read."""
        if None in self._outcomes:
            self._outcomes.reverse()
            self._outcomes.remove(None)
            self._outcomes.reverse()

    def failed(self, request_id: str = "") -> None:
        """A request failed by the replica's fault."""
        self._outcomes.append(request_id)

    def excuse(self, request_id: str) -> None:
        """Forget the failure of a request, which was not the replica's fault; of a probe, its ejection too."""
        while request_id in self._outcomes:
            self._outcomes.remove(request_id)
        if self.state is OutlierState.EJECTED and self._failed_probe == request_id:
            self.ejections -= 1
            self.end_ejection()

    @property
    def keeps_failing(self) -> bool:
        """Whether the last outcomes are bad enough for an ejection."""
        if self._in_a_row >= _FAILURES_IN_A_ROW:
            return True
        return self.seen >= _WINDOW_MIN and 2 * self.failures > self.seen

    @property
    def _in_a_row(self) -> int:
        row = 0
        for outcome in reversed(self._outcomes):
            if outcome is None:
                break
            row += 1
        return row

    def eject(self, now_s: float, min_s: float, max_s: float, cause: str = "") -> None:
        """Eject for twice as long as the last time, from ``min_s`` to ``max_s``; for ``min_s`` after a quiet time.

        ``cause`` is that of the last failure.
        """
        self.reason = f"{self._verdict()}, the last: {cause}" if cause else self._verdict()
        self.ejected_at_s = now_s
        if self.state is OutlierState.FINE and now_s - self._recovered_at_s > max_s:
            self.ejections = 0
        self.until_s = now_s + min(max_s, min_s * 2.0 ** min(self.ejections, 64))
        self.ejections += 1
        self._failed_probe = self.probe if self.state is OutlierState.PROBED else None
        self.state, self.probe = OutlierState.EJECTED, None
        self.is_blocked, self.needs_probe = True, False

    def end_ejection(self) -> None:
        """The ejection's time is over: the next request is the probe."""
        self.state = OutlierState.PROBED
        self._set_probe(None)

    def start_probe(self, request_id: str) -> None:
        """A request was bound to a replica that needs a probe."""
        self._set_probe(request_id)

    def cancel_probe(self) -> None:
        """The probe ended and showed nothing: another request may be the next one."""
        if self.state is OutlierState.PROBED:
            self._set_probe(None)

    def recover(self, now_s: float) -> None:
        """The probe was served: forget all outcomes, but not the number of ejections."""
        self.state, self.probe = OutlierState.FINE, None
        self.is_blocked = self.needs_probe = False
        self._outcomes.clear()
        self._recovered_at_s = now_s

    def _verdict(self) -> str:
        """Why the outcomes call for an ejection."""
        if self.state is OutlierState.PROBED:
            return "the request that probed it failed"
        if self._in_a_row >= _FAILURES_IN_A_ROW:
            return f"{self._in_a_row} failures in a row"
        return f"{self.failures} of its last {self.seen} requests failed"

    def _set_probe(self, request_id: str | None) -> None:
        self.probe = request_id
        self.is_blocked = request_id is not None
        self.needs_probe = request_id is None


class Ejectable(Protocol):
    """A replica as the ejection rules see it."""

    addr: str
    health: Health
    pickable: bool


ReplicaT = TypeVar("ReplicaT", bound=Ejectable)


class Outliers(Generic[ReplicaT]):
    """Ejects and readmits the replicas of one pool."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self._min_s, self._max_s = min_s, max_s
        #: Replicas that are not FINE, by address.
        self.ejected: dict[str, ReplicaT] = {}
        #: Whether ejections are ignored, because too few replicas would be left.
        self.panics = False

    def __len__(self) -> int:
        """How many replicas are ejected or probed."""
        return len(self.ejected)

    def __repr__(self) -> str:
        return f"Outliers({', '.join(self.ejected) or 'none'}{', panics' if self.panics else ''})"

    def is_ejected(self, replica: ReplicaT) -> bool:
        """Whether no request may go to the replica now."""
        return replica.health.is_blocked and not self.panics

    def succeeded(self, replica: ReplicaT, now_s: float) -> bool:
        """A request was served; return whether that readmits the replica."""
        replica.health.succeeded()
        if replica.health.state is not OutlierState.PROBED:
            return False
        self._readmit(replica, now_s)
        return True

    def failed(
        self,
        replica: ReplicaT,
        listed_count: int,
        now_s: float,
        cause: str = "",
        request_id: str = "",
        pool: Iterable[ReplicaT] = (),
    ) -> bool:
        """A request failed by the replica's fault; return whether that ejects the replica, of so many listed.

        ``pool`` are the replicas that it is compared with.
        """
        health = replica.health
        health.failed(request_id)
        if health.state is OutlierState.EJECTED or not (health.state is OutlierState.PROBED or health.keeps_failing):
            return False
        if replica.addr not in self.ejected and len(self.ejected) >= most_ejected(listed_count):
            return False
        if not _stands_out(health, *self._others_of(replica, pool)):
            return False
        health.eject(now_s, self._min_s, self._max_s, cause)
        self.ejected[replica.addr] = replica
        return True

    def excuse(self, replica: ReplicaT, request_id: str, now_s: float) -> bool:
        """Forget that a request failed at the replica; return whether that readmits the replica."""
        replica.health.excuse(request_id)
        is_over = replica.addr in self.ejected and not replica.health.keeps_failing
        if is_over:
            self._readmit(replica, now_s)
        return is_over

    def readmit_ordinary(self, pool: Iterable[ReplicaT], now_s: float) -> list[ReplicaT]:
        """Another replica has failed: readmit those that no longer stand out from the pool, and return them."""
        if not self.ejected:
            return []
        others = self._others_of(None, pool)
        ordinary = [replica for replica in self.ejected.values() if not _stands_out(replica.health, *others)]
        for replica in ordinary:
            self._readmit(replica, now_s)
        return ordinary

    def _readmit(self, replica: ReplicaT, now_s: float) -> None:
        replica.health.recover(now_s)
        del self.ejected[replica.addr]

    def _others_of(self, replica: ReplicaT | None, pool: Iterable[ReplicaT]) -> tuple[int, int]:
        """How many of the last outcomes of the replicas that are not ejected failed, and how many there are."""
        failures = seen = 0
        for other in pool:
            if other is not replica and other.addr not in self.ejected:
                failures += other.health.failures
                seen += other.health.seen
        return failures, seen

    def forget(self, addr: str) -> bool:
        """Drop a replica that is gone or whose process is another now; return whether it was known."""
        return self.ejected.pop(addr, None) is not None

    def update_panic(self, pickable_count: int, listed_count: int) -> bool:
        """Heed ejections only while half of those listed are left; return whether that has changed."""
        left = pickable_count - sum(replica.pickable for replica in self.ejected.values())
        panics = bool(self.ejected) and 2 * left < listed_count
        changed, self.panics = panics != self.panics, panics
        return changed

    @property
    def next_end_s(self) -> float | None:
        """When the next ejection ends, monotonic; None without one."""
        ends_s = (each.health.until_s for each in self.ejected.values() if each.health.state is OutlierState.EJECTED)
        return min(ends_s, default=None)

    def end_ejections(self, now_s: float) -> list[ReplicaT]:
        """Let the replicas whose ejection is over be probed; return them."""
        ended = []
        for replica in self.ejected.values():
            if replica.health.state is OutlierState.EJECTED and replica.health.until_s <= now_s:
                replica.health.end_ejection()
                ended.append(replica)
        return ended


def _stands_out(health: Health, others_failures: int, others_seen: int) -> bool:
    """Whether a replica fails more than twice as often as the others, or always where the others serve some."""
    if not others_seen:
        return True
    if health.failures == health.seen >= _WINDOW_MIN:
        return others_failures < others_seen
    return health.failures * others_seen > 2 * others_failures * health.seen


def most_ejected(listed_count: int) -> int:
    """How many of so many listed replicas may be ejected at one time: a tenth, at least one."""
    return max(1, listed_count // 10)
