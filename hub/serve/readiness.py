"""HubReadiness: the log lines that say whether this hub can serve every stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from omni_discovery.logs.readiness import NotReady, ReadinessLog, Ready, StillMissing

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni
    from hub.pool.status import StageStatus

logger = logging.getLogger(__name__)

#: Names of replicas in one line.
_MOST_NAMES: Final = 20
#: The least time between two lines about replicas that have joined, in seconds.
_JOINED_S: Final = 5.0


class HubReadiness:
    """Call ``check`` about twice a second, on the hub's loop. ``url`` is the hub's own."""

    def __init__(self, url: str, now: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._now = now
        self._log = ReadinessLog(now())
        #: The replicas that the last ``hub.ready`` named, and those that have joined since and were logged, each with
        #: the process that it was.
        self._told: dict[str, Hashable] = {}
        self._told_at_s = now()

    def check(self, omni: AsyncOmni, starting: Mapping[int, int], servers_missing: str = "") -> None:
        """Log what has changed: that every stage can serve, that one can't any more, or what the hub waits for.

        ``starting``: how many replicas of each stage are started here, be they registered or not. ``servers_missing``:
        which API servers have not listened yet; empty if all have.
        """
        stages = omni.stage_status()
        missing = "; ".join(filter(None, (_missing(stages, starting, self._now()), servers_missing)))
        if omni.is_revoked:
            missing = "no replica can take work of any stage: this hub is revoked"
        match self._log.observe(missing, self._now()):
            case Ready(after_s):
                ids, serving = ",".join(str(stage.stage_id) for stage in stages), omni.serving_replicas()
                text = "hub.ready url=%s stages=%s replicas=%s after_s=%.1f: every stage can serve"
                logger.info(text, self._url, ids, short_list(serving), after_s)
                self._told, self._told_at_s = dict(serving), self._now()
            case NotReady():
                logger.warning("hub.not_ready url=%s: %s", self._url, missing)
            case StillMissing(after_s):
                logger.info("hub.waiting after_s=%.1f: %s", after_s, missing)
            case None if not missing:
                self._tell_joined(omni.serving_replicas())
            case None:
                pass

    def _tell_joined(self, serving: Mapping[str, Hashable]) -> None:
        """Log replicas that can serve by now and that no line has named, those of some seconds together.

        The next process that has an id is news, a replica that comes back is not.
        """
        joined = {name: process for name, process in serving.items() if self._told.get(name) != process}
        if joined and self._now() - self._told_at_s >= _JOINED_S:
            logger.info("hub.joined replicas=%s: %d can serve now", short_list(joined), len(serving))
            self._told.update(joined)
            self._told_at_s = self._now()


def _missing(stages: Sequence[StageStatus], starting: Mapping[int, int], now_s: float) -> str:
    """Which stages can't serve, and why; empty if all can."""
    empty = [f"stage {stage.stage_id} ({_why(stage, starting)})" for stage in stages if not stage.pickable]
    # Without the count, which changes with each request.
    failing = [f"stage {stage.stage_id}" for stage in stages if stage.pickable and stage.failures.describe(now_s)]
    texts = [f"no replica can take work of {', '.join(empty)}"] * bool(empty)
    texts += [f"requests of {', '.join(failing)} keep failing"] * bool(failing)
    return "; ".join(texts)


def _why(stage: StageStatus, starting: Mapping[int, int]) -> str:
    count = 0 if stage.registered else starting.get(stage.stage_id, 0)
    return f"none is registered yet, {count} on the way here" if count else stage.why_absent


def short_list(names: Collection[str]) -> str:
    """The names with commas between them; of many the first, and how many more there are."""
    shown = list(names)[:_MOST_NAMES]
    more = len(names) - len(shown)
    return ",".join([*shown, f"+{more}"] if more else shown)
