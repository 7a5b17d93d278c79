"""Lease: when to renew a lease, when to doubt it, and when it is gone.

Only the server's word ends a lease. A client that can't reach the server knows no more than that the deadline it could
vouch for has passed: the lease is SUSPECT then and renewals go on. Often the server accepts them, because it was down
itself: a restarted server starts the countdown of every lease again. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from omni_discovery.errors import ConfigError

_RENEWALS_PER_TTL: Final = 3
_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 2.0


#: How many lines a story has before the oldest go.
_STORY_LINES: Final = 100


class LeaseState(Enum):
    """What this client knows of the lease. UNGRANTED: none was granted yet. HELD: the server can't have ended it.
    SUSPECT: its deadline has passed without a renewal. LOST: the server answered that the lease does not exist.
    """

    UNGRANTED = "ungranted"
    HELD = "held"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Granted:
    """The server granted a lease with this TTL; the request was sent at ``sent_at_s``, monotonic."""

    lease_id: int
    ttl_s: float
    sent_at_s: float


@dataclass(frozen=True, slots=True)
class GrantFailed:
    """No lease was granted, or the answer was lost. ``at_s`` is when the call failed."""

    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Renewed:
    """The server accepted a renewal sent at ``sent_at_s`` and granted ``ttl_s`` more."""

    lease_id: int
    ttl_s: float
    sent_at_s: float


@dataclass(frozen=True, slots=True)
class RenewFailed:
    """A renewal was not answered."""

    lease_id: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class ServerForgot:
    """The server answered a renewal, or a write under the lease, that the lease does not exist."""

    lease_id: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``may_renew`` is false while the owner fails its health check: then the lease must run out."""

    now_s: float
    may_renew: bool = True


LeaseEvent = Granted | GrantFailed | Renewed | RenewFailed | ServerForgot | Tick


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Ask for a lease; answer with Granted or GrantFailed."""

    ttl_s: float


@dataclass(frozen=True, slots=True)
class SendKeepAlive:
    """Renew; answer with Renewed, RenewFailed or ServerForgot."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class DeclareHeld:
    """The lease is held: just granted, or renewed after it was suspect."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class DeclareSuspect:
    """No renewal was accepted for a whole TTL: the lease and its keys may or may not be gone."""

    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeclareLost:
    """The lease is lost by the server's answer, and its keys with it."""

    lease_id: int
    reason: str


LeaseAction = SendGrant | SendKeepAlive | DeclareHeld | DeclareSuspect | DeclareLost


class Lease:
    """A lease of ``ttl_s`` seconds, granted again after each loss. Moments are monotonic seconds.

    ``jitter`` returns a number from 0 to 1 each time. Raise ConfigError for a TTL that is not positive.
    """

    def __init__(self, ttl_s: float, *, jitter: Callable[[], float]) -> None:
        if not ttl_s > 0:
            raise ConfigError(f"a lease lives longer than 0 s, not {ttl_s}")
        self.state = LeaseState.UNGRANTED
        #: 0 while no lease is granted. Set back to 0 only on the server's word.
        self.lease_id = 0
        #: The TTL that the server granted last, in seconds; it may be longer than the requested one.
        self.granted_ttl_s = ttl_s
        #: Until then the server can't have ended the lease.
        self.deadline_s = 0.0
        #: How many renewals of the present lease the server accepted.
        self.renewals = 0
        #: Why the state changed last.
        self.reason = ""
        #: What happened to the lease, with the moment of each: grants, losses, failed renewals; not each good renewal.
        self.story: deque[tuple[float, str]] = deque(maxlen=_STORY_LINES)
        #: The moment of the last event.
        self._seen_at_s = 0.0
        self._asked_ttl_s = ttl_s
        self._jitter = jitter
        self._due_s = float("-inf")
        self._is_sent = False
        self._failures = 0
        self._last_failure = ""

    @property
    def next_tick_s(self) -> float | None:
        """When the next Tick changes something; None while only the awaited answer can."""
        moments = [] if self._is_sent else [self._due_s]
        if self.state is LeaseState.HELD:
            moments.append(self.deadline_s)
        return min(moments, default=None)

    def handle(self, event: LeaseEvent) -> list[LeaseAction]:
        """Apply one event; return what the driver must do. An event about another lease changes nothing."""
        match event:
            case Tick(now_s, may_renew):
                self._seen_at_s = now_s
                return self._on_tick(now_s, may_renew)
            case Granted(lease_id, ttl_s, sent_at_s):
                return self._on_granted(lease_id, ttl_s, sent_at_s)
            case GrantFailed(reason, at_s):
                if not self.lease_id:
                    self._note(at_s, f"grant failed: {reason}")
                    self._retry_later(reason, at_s)
                return []
            case Renewed(lease_id, ttl_s, sent_at_s):
                return self._on_renewed(lease_id, ttl_s, sent_at_s) if self._is_ours(lease_id) else []
            case RenewFailed(lease_id, reason, at_s):
                if self._is_ours(lease_id):
                    self._note(at_s, f"renewal failed: {reason}")
                    self._retry_later(reason, at_s)
                return []
            case ServerForgot(lease_id, at_s):
                return self._on_forgotten(lease_id, at_s) if self._is_ours(lease_id) else []

    def __repr__(self) -> str:
        return f"Lease({self.describe(self._seen_at_s)})"

    def describe(self, now_s: float) -> str:
        """The lease in a few words, as of ``now_s``: ``id=2a, HELD, expires in 7.2 s, renewals=41``."""
        left_s = self.deadline_s - now_s
        expiry = f", expires in {left_s:.1f} s" if self.state is LeaseState.HELD else ""
        return f"id={self.lease_id:x}, {self.state.name}{expiry}, renewals={self.renewals}"

    def _change(self, state: LeaseState, at_s: float, reason: str) -> None:
        self.state, self.reason = state, reason
        self._note(at_s, f"{state.value}: {reason}")

    def _note(self, at_s: float, text: str) -> None:
        self._seen_at_s = max(self._seen_at_s, at_s)
        self.story.append((at_s, text))

    def _is_ours(self, lease_id: int) -> bool:
        return self.lease_id == lease_id != 0

    def _on_tick(self, now_s: float, may_renew: bool) -> list[LeaseAction]:
        actions: list[LeaseAction] = []
        if self.state is LeaseState.HELD and now_s >= self.deadline_s:
            reason = self._last_failure or ("no renewal was answered" if may_renew else "renewals are withheld")
            self._change(LeaseState.SUSPECT, now_s, reason)
            actions.append(DeclareSuspect(self.lease_id, reason))
        if self._is_sent or now_s < self._due_s:
            return actions
        if not may_renew:
            self._due_s = now_s + self._retry_bound_s()
            return actions
        self._is_sent = True
        actions.append(SendKeepAlive(self.lease_id) if self.lease_id else SendGrant(self._asked_ttl_s))
        return actions

    def _on_granted(self, lease_id: int, ttl_s: float, sent_at_s: float) -> list[LeaseAction]:
        if self.lease_id:
            return []
        self.lease_id = lease_id
        self.deadline_s = float("-inf")
        self.renewals = 0
        self._extend(ttl_s, sent_at_s)
        self._change(LeaseState.HELD, sent_at_s, f"granted for {ttl_s:g} s as {lease_id:x}")
        return [DeclareHeld(lease_id)]

    def _on_renewed(self, lease_id: int, ttl_s: float, sent_at_s: float) -> list[LeaseAction]:
        was_suspect = self.state is LeaseState.SUSPECT
        self._extend(ttl_s, sent_at_s)
        self.renewals += 1
        if not was_suspect:
            return []
        self._change(LeaseState.HELD, sent_at_s, "renewed")
        return [DeclareHeld(lease_id)]

    def _on_forgotten(self, lease_id: int, at_s: float) -> list[LeaseAction]:
        reason = "the server has no such lease"
        if self.state is LeaseState.SUSPECT:
            reason += f" after: {self._last_failure or 'renewals were withheld'}"
        self._change(LeaseState.LOST, at_s, reason)
        self.lease_id = 0
        self._is_sent = False
        self._failures = 0
        # All owners of leases in a wiped registry learn of it at once; they must not all ask for leases at once.
        self._due_s = at_s + _FIRST_RETRY_S * self._jitter()
        return [DeclareLost(lease_id, reason)]

    def _extend(self, ttl_s: float, sent_at_s: float) -> None:
        self.granted_ttl_s = ttl_s
        # Counted from when we sent, not from when the answer came: the server restarted its countdown somewhere in
        # between, and only the earlier instant is safe to trust. A late answer to an earlier renewal shortens nothing.
        self.deadline_s = max(self.deadline_s, sent_at_s + ttl_s)
        self._due_s = sent_at_s + ttl_s / _RENEWALS_PER_TTL * (1.0 - 0.1 * self._jitter())
        self._is_sent = False
        self._failures = 0
        self._last_failure = ""

    def _retry_later(self, reason: str, at_s: float) -> None:
        self._is_sent = False
        self._last_failure = reason
        longest_s = min(self._retry_bound_s(), _FIRST_RETRY_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._due_s = at_s + longest_s * (0.5 + 0.5 * self._jitter())

    def _retry_bound_s(self) -> float:
        return min(_LONGEST_RETRY_S, self.granted_ttl_s / (2 * _RENEWALS_PER_TTL))
