"""KnownHubs: whom a replica lets in, when the registry has lost hubs that it should not have lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from omni_discovery.clock import Clock, SystemClock
from omni_discovery.disappearance import Disappearance
from omni_discovery.messages import HubRecord
from omni_discovery.table import Delta, View

logger = logging.getLogger(__name__)

_POOL = "hubs"


class KnownHubs:
    """Follows a view of the hubs; lives on the loop that brings it.

    ``tell`` gets the hubs by id, listed or kept, with the first list and at each change. A hub whose key is gone is
    forgotten, unless the registry lost much at once: then it is kept until one ``ttl_s`` after the view is proved
    fresh.
    """

    def __init__(
        self, ttl_s: float, tell: Callable[[Mapping[str, HubRecord]], None], clock: Clock | None = None
    ) -> None:
        self._tell = tell
        self._clock = clock or SystemClock()
        self._disappearance: Disappearance[str, str] = Disappearance(ttl_s)
        self._history = 0
        self._listed: Mapping[str, HubRecord] = {}
        #: Every hub that is listed, or that vanished lately.
        self._remembered: dict[str, HubRecord] = {}
        self._told: Mapping[str, HubRecord] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def on_view(self, view: View, _delta: Delta) -> None:
        """Take in a view. Before the first list there is no news."""
        if not view.revision:
            return
        regressed, self._history = view.history != self._history, view.history
        self._listed = view.hubs
        self._remembered.update(view.hubs)
        self._disappearance.follow(
            {_POOL: dict.fromkeys(view.hubs, True)},
            fresh=view.stale_since_s is None,
            regressed=regressed,
            now_s=self._clock.monotonic_s(),
        )
        self.review()

    def review(self) -> None:
        """Forget whom time has made strangers; tell what has changed."""
        # A hub that only might answer is not worth an open door for ever.
        kept = self._disappearance.review(lambda _pool, _hub_id: False, self._clock.monotonic_s()).get(_POOL, [])
        known = {**{hub_id: self._remembered[hub_id] for hub_id in kept}, **self._listed}
        tracked = {hub_id for _, hub_id in self._disappearance.tracked()}
        for hub_id in self._remembered.keys() - self._listed.keys() - tracked:
            del self._remembered[hub_id]
        self._set_timer()
        if known != self._told:
            self._told = known
            self._tell(known)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moment_s = self._disappearance.next_review_s
        if moment_s is not None:
            delay_s = max(0.0, moment_s - self._clock.monotonic_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.review)
