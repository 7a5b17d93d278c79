"""Outlier ejection: a replica that keeps failing gets no new work for a while, if enough others are left. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

#: So many failures in a row eject.
_FAILURES_IN_A_ROW: Final = 3
#: Of so many last outcomes, once there are enough, more than half failed eject, too.
_WINDOW: Final = 20
_WINDOW_MIN: Final = 10
_WINDOW_MASK: Final = (1 << _WINDOW) - 1


class OutlierState(Enum):
    """Whether a replica is left out for its failures."""

    FINE = "fine"
    EJECTED = "ejected"
    #: Its ejection is over: one request at a time shows whether it works again.
    PROBED = "probed"


class Health:
    """The last outcomes of one replica, and what follows from them."""

    __slots__ = (
        "_failures",
        "_in_a_row",
        "_recovered_at_s",
        "_seen",
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
        #: The last outcomes as bits, the newest lowest, set where one failed.
        self._failures = 0
        self._seen = 0
        self._in_a_row = 0
        self._recovered_at_s = 0.0

    def __repr__(self) -> str:
        return f"Health({self.state.name}, {self._failures.bit_count()} of {self._seen} failed, probe={self.probe})"

    def succeeded(self) -> None:
        """A request was served."""
        self._in_a_row = 0
        self._failures = (self._failures << 1) & _WINDOW_MASK
        if self._seen < _WINDOW:
            self._seen += 1

    def failed(self) -> bool:
        """A request failed by the replica's fault; return whether the replica should be ejected."""
        self._in_a_row += 1
        self._failures = (self._failures << 1 | 1) & _WINDOW_MASK
        if self._seen < _WINDOW:
            self._seen += 1
        if self.state is OutlierState.PROBED or self._in_a_row >= _FAILURES_IN_A_ROW:
            return True
        return self._seen >= _WINDOW_MIN and 2 * self._failures.bit_count() > self._seen

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
        self._failures = self._seen = self._in_a_row = 0
        self._recovered_at_s = now_s

    def _verdict(self) -> str:
        """Why the outcomes call for an ejection."""
        if self.state is OutlierState.PROBED:
            return "the request that probed it failed"
        if self._in_a_row >= _FAILURES_IN_A_ROW:
            return f"{self._in_a_row} failures in a row"
        return f"{self._failures.bit_count()} of its last {self._seen} requests failed"

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
        replica.health.recover(now_s)
        del self.ejected[replica.addr]
        return True

    def failed(self, replica: ReplicaT, listed_count: int, now_s: float, cause: str = "") -> bool:
        """A request failed by the replica's fault; return whether that ejects the replica, of so many listed."""
        health = replica.health
        if not health.failed() or health.state is OutlierState.EJECTED:
            return False
        if replica.addr not in self.ejected and len(self.ejected) >= most_ejected(listed_count):
            return False
        health.eject(now_s, self._min_s, self._max_s, cause)
        self.ejected[replica.addr] = replica
        return True

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


def most_ejected(listed_count: int) -> int:
    """How many of so many listed replicas may be ejected at one time: a tenth, at least one."""
    return max(1, listed_count // 10)
