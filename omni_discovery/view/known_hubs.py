"""KnownHubs: which hubs a replica accepts connections from, and which it refuses, also through a mass loss of keys.

Revocations: which hubs are revoked, also while the registry has lost their control keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.records.schema import HubRecord
from omni_discovery.view.mass_loss import MassLossGuard
from omni_discovery.view.record_bounds import MOST_HUBS
from omni_discovery.view.table import Delta, View

logger = logging.getLogger(__name__)


class Revocations:
    """A hub is revoked while its control key says so. Moments are monotonic seconds.

    Deleting or changing the key ends the revocation. A key that is gone because the registry was wiped, restored or
    replaced still revokes its hub until one ``ttl_s`` after the view was proved fresh: an operator's tools have had
    that time to put it back.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._listed: frozenset[str] = frozenset()
        #: The end of the revocation of each hub whose key the registry lost; None while the view is not proved fresh.
        self._kept: dict[str, float | None] = {}

    def apply_revoked(self, listed: frozenset[str], *, fresh: bool, regressed: bool, now_s: float) -> None:
        """The registry lists these hubs as revoked. ``fresh`` and ``regressed`` as in MassLossGuard."""
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

    def revoked_hubs(self, now_s: float) -> frozenset[str]:
        """The hubs that are revoked now."""
        for hub_id, until_s in list(self._kept.items()):
            if until_s is not None and now_s >= until_s:
                del self._kept[hub_id]
        return self._listed | self._kept.keys()

    @property
    def next_review_s(self) -> float | None:
        """When time alone changes what ``revoked_hubs`` returns; None if it does not."""
        return min((until_s for until_s in self._kept.values() if until_s is not None), default=None)


_POOL = "hubs"
#: A review costs by the number of hubs: of more than so many, views are taken in so rarely. A revoked hub never waits.
_FEW_HUBS: Final = 64
_REST_S: Final = 0.2
#: Hubs that may be kept through a mass loss, with those that are listed.
_MOST_REMEMBERED: Final = 2 * MOST_HUBS.records


def _ignore(_revoked: frozenset[str]) -> None:
    return None


class KnownHubs:
    """Takes in views of the hubs' keys and of their control keys; lives on the event loop that brings them.

    ``on_hubs`` is called with the records of all hubs that may connect, by id, as soon as both views are there, and at
    each change; ``on_revoked`` with the ids of all revoked hubs at each change, before ``on_hubs``. A hub whose key is
    gone may not connect any more, but in a mass loss: then it may until one ``ttl_s`` after the view is proved fresh.
    Among many hubs, one that comes or goes is told within a fifth of a second.
    """

    def __init__(
        self,
        ttl_s: float,
        on_hubs: Callable[[Mapping[str, HubRecord]], None],
        clock: Clock | None = None,
        on_revoked: Callable[[frozenset[str]], None] = _ignore,
    ) -> None:
        self._on_hubs = on_hubs
        self._on_revoked = on_revoked
        self._clock = clock or SystemClock()
        self._mass_loss: MassLossGuard[str, str] = MassLossGuard(ttl_s)
        self._revocations = Revocations(ttl_s)
        #: Ids of the revoked hubs; None before the first list of control keys. Swapped whole.
        self._revoked: frozenset[str] | None = None
        self._control_history = 0
        self._history = 0
        self._listed: Mapping[str, HubRecord] | None = None
        #: The newest view, until it is taken in, and until when it waits for that.
        self._awaited: View | None = None
        self._rest_until_s = 0.0
        #: Every hub that is listed, or that vanished so lately that it may be kept; as many as there is room for.
        self._remembered: dict[str, HubRecord] = {}
        self._last_known: Mapping[str, HubRecord] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def revoked(self) -> frozenset[str]:
        """The hubs that are revoked now."""
        return self._revoked or frozenset()

    def on_view(self, view: View, _delta: Delta) -> None:
        """Take in a view of the hubs' keys. One from before the first list is ignored."""
        if not view.revision:
            return
        is_due_later, self._awaited = self._awaited is not None, view
        if not is_due_later or self._clock.monotonic_s() >= self._rest_until_s:
            self.run_timers()

    def on_control_view(self, view: View, _delta: Delta) -> None:
        """Take in a view of the hubs' control keys. No hub may connect before the first list of them."""
        if not view.revision:
            return
        regressed, self._control_history = view.history != self._control_history, view.history
        self._revocations.apply_revoked(
            view.revoked, fresh=view.stale_since_s is None, regressed=regressed, now_s=self._clock.monotonic_s()
        )
        if self._revoked is None:
            self._revoked = frozenset()
        self.run_timers()

    def run_timers(self) -> None:
        """Drop hubs and revocations whose time is over; report changes. Called by itself when one is due."""
        now_s, view = self._clock.monotonic_s(), self._awaited
        self._review_revoked()
        if view is not None and now_s >= self._rest_until_s:
            self._awaited = None
            self._take_in(view, now_s)
            self._rest_until_s = now_s + (_REST_S if len(self._remembered) > _FEW_HUBS else 0.0)
        if self._listed is not None and self._revoked is not None:
            self._review_hubs(self._listed)
        self._set_timer()

    def _take_in(self, view: View, now_s: float) -> None:
        regressed, self._history = view.history != self._history, view.history
        self._listed = view.hubs
        room = _MOST_REMEMBERED - len(self._remembered)
        news = [hub_id for hub_id in view.hubs if hub_id not in self._remembered][:room]
        known = [hub_id for hub_id in view.hubs if hub_id in self._remembered]
        listed = {hub_id: view.hubs[hub_id] for hub_id in (*known, *news)}
        self._remembered.update(listed)
        self._mass_loss.apply_members(
            {_POOL: dict.fromkeys(listed, True)}, fresh=view.stale_since_s is None, regressed=regressed, now_s=now_s
        )

    def _review_hubs(self, listed: Mapping[str, HubRecord]) -> None:
        # A hub that only might answer is not worth an open door for ever.
        kept = self._mass_loss.kept_without_record(lambda _pool, _hub_id: False, self._clock.monotonic_s()).get(
            _POOL, []
        )
        known = {**{hub_id: self._remembered[hub_id] for hub_id in kept}, **listed}
        known = {hub_id: hub for hub_id, hub in known.items() if hub_id not in self.revoked}
        tracked = {hub_id for _, hub_id in self._mass_loss.tracked()}
        for hub_id in self._remembered.keys() - listed.keys() - tracked:
            del self._remembered[hub_id]
        if known != self._last_known:
            self._last_known = known
            self._on_hubs(known)

    def _review_revoked(self) -> None:
        before = self._revoked
        if before is None:
            return
        self._revoked = self._revocations.revoked_hubs(self._clock.monotonic_s())
        for hub_id in self._revoked - before:
            logger.warning("hub.revoked hub=%s", hub_id)
        for hub_id in before - self._revoked:
            logger.warning("hub.allowed hub=%s: no control key revokes it any more", hub_id)
        if self._revoked != before:
            self._on_revoked(self._revoked)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rested_s = None if self._awaited is None else self._rest_until_s
        moments = (self._mass_loss.next_review_s, self._revocations.next_review_s, rested_s)
        due = [moment_s for moment_s in moments if moment_s is not None]
        if due:
            delay_s = max(0.0, min(due) - self._clock.monotonic_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.run_timers)
