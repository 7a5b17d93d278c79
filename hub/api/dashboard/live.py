"""LiveSnapshots: a snapshot of the hub about once a second, made only while somebody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from hub.api.dashboard.rates import RateWindow
from hub.api.dashboard.snapshot import HubState, Judged, build_snapshot
from omni_discovery import __version__
from omni_discovery.commands.findings.checks import Evidence, Grade, examine
from omni_discovery.commands.findings.processes import ended_findings
from omni_discovery.commands.status.needs import judge
from omni_discovery.commands.status.overview import stage_lines
from omni_discovery.errors import OverloadedError, RegistryError
from omni_discovery.records.keys import namespace_prefix
from omni_discovery.records.waits import last_words_among, waits_among

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from hub.async_omni import AsyncOmni
    from omni_discovery.commands.findings.checks import Finding
    from omni_discovery.kv import KVCalls
    from omni_discovery.view.recent_events import RecentEvents
    from omni_discovery.view.table import View

logger = logging.getLogger(__name__)

#: How often a snapshot is made, and how often etcd is asked for the keys of the namespace.
SNAPSHOT_S: Final = 1.0
_JUDGE_S: Final = 5.0
#: How long etcd may take for that.
_LIST_S: Final = 5.0
#: Pages that may look at a time.
MOST_WATCHERS: Final = 16


class Registry(Protocol):
    """What the dashboard needs of a hub's client of the registry."""

    def view(self) -> View:
        """The view of the namespace now."""

    def calls(self) -> KVCalls:
        """The calls of its connection."""


class LiveSnapshots:
    """Lives on the hub's loop. All who look get the same snapshots; one who reads slowly misses some."""

    def __init__(
        self, omni: AsyncOmni, registry: Registry, namespace: str, events: RecentEvents, url: str = ""
    ) -> None:
        self._omni = omni
        self._registry = registry
        self._namespace = namespace
        self._events = events
        self._url = url
        self._rates = RateWindow()
        self._judged = Judged()
        self._watchers = 0
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        #: The last snapshot as JSON, its number, and what is set when the next one is there.
        self._latest, self._number = b"", 0
        self._next = asyncio.Event()
        self._is_closed = False

    def check_room(self) -> None:
        """Raise OverloadedError if too many look already."""
        if self._watchers >= MOST_WATCHERS:
            raise OverloadedError(f"{MOST_WATCHERS} pages look at this dashboard already: close one")

    async def watch(self, is_welcome: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Snapshots as JSON, the first at once, for as long as ``is_welcome``; none where too many look already."""
        if self._watchers >= MOST_WATCHERS:
            # Others have begun to look since there was room: the page asks again, and is told.
            return
        self._watchers += 1
        seen = 0
        try:
            if not self._tasks:
                self._make()
                self._tasks = (asyncio.create_task(self._run()), asyncio.create_task(self._judge()))
            while is_welcome() and not self._is_closed:
                if self._number > seen:
                    seen = self._number
                    yield self._latest
                else:
                    await self._next.wait()
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._stop()

    def close(self) -> None:
        """End all streams. Idempotent."""
        self._is_closed = True
        self._stop()
        self._next.set()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = ()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            try:
                self._make()
            except Exception:
                # A bug here must not end what everybody looks at.
                logger.exception("dashboard.snapshot_failed")

    def _make(self) -> None:
        self._events.follow_troubles(self._omni.troubles(), time.time())
        self._rates.add(time.monotonic(), self._omni.hub_metrics.counts())
        snapshot = build_snapshot(self._state(), self._rates, self._judged, self._events.newest_first())
        self._latest, self._number = msgspec.json.encode(snapshot), self._number + 1
        done, self._next = self._next, asyncio.Event()
        done.set()

    def _state(self) -> HubState:
        omni = self._omni
        pools = {stage_id: omni.releases.every.of_stage(stage_id) for stage_id in omni.graph.stage_ids}
        return HubState(
            at=time.time(),
            now_s=time.monotonic(),
            hub_id=omni.hub_id,
            namespace=self._namespace,
            version=__version__,
            url=self._url,
            revision=omni.applied_revision(),
            stale_s=omni.view_stale_s,
            is_running=omni.is_running,
            is_revoked=omni.is_revoked,
            pipeline_problem=omni.releases.problem,
            deploy=omni.releases.newest.graph.deploy,
            stages=omni.stage_status(),
            entries={
                stage_id: [entry for pool in each for entry in pool.core.members] for stage_id, each in pools.items()
            },
            waiting={stage_id: sum(len(pool.core.queue) for pool in each) for stage_id, each in pools.items()},
            in_flight=omni.in_flight,
        )

    async def _judge(self) -> None:
        """Look at all keys of the namespace now and then, for what needs somebody."""
        while True:
            try:
                async with asyncio.timeout(_LIST_S):
                    listing = await self._registry.calls().list(namespace_prefix(self._namespace))
                now = time.time()
                evidence = Evidence(self._namespace, self._registry.view(), listing.items, now)
                self._judged = Judged(await asyncio.to_thread(look_through, evidence), now)
            except (RegistryError, TimeoutError) as error:
                reason = str(error) or f"etcd has not answered within {_LIST_S:g} s"
                self._judged = Judged(self._judged.findings, self._judged.at, reason)
            except Exception as error:
                logger.exception("dashboard.checks_failed")
                self._judged = Judged(self._judged.findings, self._judged.at, f"a bug in the checks: {error!r}")
            await asyncio.sleep(_JUDGE_S)


def look_through(evidence: Evidence) -> list[Finding]:
    """What needs somebody, as omni status says it, then the notes and what is fine of omni doctor."""
    words = last_words_among(evidence.items, evidence.namespace)
    found = [*examine(evidence), *ended_findings(words, evidence.view, evidence.now_s)]
    needs = judge(evidence, found, waits_among(evidence.items, evidence.namespace), stage_lines(evidence)).found
    topics = {need.topic for need in needs if need.topic == "version"}
    return [*needs, *(each for each in found if each.grade is not Grade.PROBLEM and each.topic not in topics)]


async def as_events(snapshots: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Snapshots as server-sent events."""
    with suppress(asyncio.CancelledError):
        # How long a browser waits before it comes again, in milliseconds.
        yield b"retry: 2000\n\n"
        async for snapshot in snapshots:
            yield b"data: " + snapshot + b"\n\n"
