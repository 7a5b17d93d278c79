"""Whether one more request may come in, and when to come back if not.

The tightest stage of the request's path decides: what is still to pass through it, for the share of its slots that is
this hub's, at the pace at which it has served lately.

Intake: checks what a client asks, plans it, and takes it or turns it away.

Backlog: how many unfinished requests still have to pass through each stage, of each version of it.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from hub.orchestrator.active import AddRequest
from hub.request.companions import check_companions
from omni_discovery.errors import InvalidRequestError, OverloadedError
from omni_discovery.wire import MAX_PRIORITY

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.orchestrator.releases import DeployVersions

#: Bounds of what a client is told to wait, in seconds.
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 600.0
#: What a request is taken to need of a stage that has not served any yet.
_UNKNOWN_SERVICE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage of the path, as this hub sees it."""

    stage_id: int
    #: Unfinished requests of this hub that still need the stage.
    backlog: int
    #: The slots of all its replicas that can take work.
    slots: int
    #: How long it works on one request; None before the first.
    mean_service_s: float | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one hub lets in. ``live_hubs`` share the slots of every stage."""

    max_waiting: int
    max_in_flight: int
    live_hubs: int = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken. ``retry_after_s`` is when one like it probably would be."""

    reason: str
    retry_after_s: float
    #: The stage that is full; None where it is the hub.
    stage_id: int | None = None
    #: Where a queue is full: how long until it has room for one more after that, and until all of it is served.
    seconds_each: float = 0.0
    most_s: float = MOST_RETRY_S


class Returns:
    """Tells each client that is turned away when there will be room for it, behind those that were told before it."""

    def __init__(self) -> None:
        #: When there will be room for the one that was told last, by stage; None is the hub itself.
        self._told_s: dict[int | None, float] = {}

    def retry_after_s(self, refused: Refusal, now_s: float) -> float:
        """The time to wait, in seconds."""
        if not refused.seconds_each:
            return refused.retry_after_s
        stage_id, soonest_s = refused.stage_id, now_s + refused.retry_after_s
        at_s = max(soonest_s, self._told_s.get(stage_id, soonest_s) + refused.seconds_each)
        # Some of those that were told never come back, and by then all that waits now will have been served.
        at_s = self._told_s[stage_id] = min(at_s, max(soonest_s, now_s + refused.most_s))
        return _bounded(at_s - now_s)


def refusal(stages: Iterable[StageLoad], bounds: Bounds, in_flight: int, timeout_s: float) -> Refusal | None:
    """Decide on one request with ``timeout_s`` to its deadline; None lets it in.

    A stage without any slot refuses nobody: its replicas may be starting, and the pick waits for them.
    """
    path = tuple(stages)
    worst = max((_of_stage(stage, bounds, timeout_s) for stage in path), key=_retry, default=None)
    if worst is not None:
        return worst
    if in_flight >= bounds.max_in_flight:
        each_s = max((_seconds_each(stage, bounds) for stage in path if stage.slots), default=0.0)
        reason = f"{in_flight} requests are in flight, which is the bound of this hub"
        return Refusal(reason, LEAST_RETRY_S, None, each_s, in_flight * each_s)
    return None


def _of_stage(stage: StageLoad, bounds: Bounds, timeout_s: float) -> Refusal | None:
    if not stage.slots:
        return None
    share = stage.slots / max(1, bounds.live_hubs)
    waiting = max(0.0, stage.backlog - share)
    if waiting >= bounds.max_waiting:
        reason = f"{stage.backlog} requests are on their way to stage {stage.stage_id}, which runs {share:g} at a time"
        each_s = _seconds_each(stage, bounds)
        retry_s = _bounded((waiting - bounds.max_waiting + 1) * each_s)
        return Refusal(reason, retry_s, stage.stage_id, each_s, waiting * each_s)
    expected_s = waiting * (stage.mean_service_s or 0.0) / share
    if expected_s > timeout_s:
        reason = f"stage {stage.stage_id} would begin in about {expected_s:.0f} s, after the request's {timeout_s:g} s"
        return Refusal(reason, _bounded(expected_s - timeout_s))
    return None


def _seconds_each(stage: StageLoad, bounds: Bounds) -> float:
    """How long until this hub's share of the slots has served one more."""
    mean_s = _UNKNOWN_SERVICE_S if stage.mean_service_s is None else stage.mean_service_s
    return mean_s * max(1, bounds.live_hubs) / stage.slots


def _retry(found: Refusal | None) -> float:
    return -1.0 if found is None else found.retry_after_s


def _bounded(seconds: float) -> float:
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))


_NO_VERSIONS: Final[Mapping[int, str]] = MappingProxyType({})


class Backlog:
    """Counted from admission to the end of each stage's work, so that what is upstream is seen downstream."""

    def __init__(self) -> None:
        #: The stages that each unfinished request still needs, with the fingerprint of the version that it needs.
        self._needs: dict[str, dict[int, str]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()

    def __len__(self) -> int:
        return len(self._needs)

    def of(self, stage_id: int, fingerprint: str = "") -> int:
        """How many unfinished requests still need that version of the stage."""
        return self._counts[stage_id, fingerprint]

    def enter(self, request_id: str, stages: Iterable[int], fingerprints: Mapping[int, str] = _NO_VERSIONS) -> None:
        """A request was admitted, or moved to other versions, that needs these stages."""
        self.leave(request_id)
        needs = self._needs[request_id] = {stage_id: fingerprints.get(stage_id, "") for stage_id in stages}
        self._counts.update(needs.items())

    def passed(self, request_id: str, stages: Iterable[int]) -> None:
        """The request needs these stages no more. Unknown requests and stages are fine."""
        needs = self._needs.get(request_id, {})
        for stage_id in stages:
            if stage_id in needs:
                self._counts[stage_id, needs.pop(stage_id)] -= 1

    def leave(self, request_id: str) -> None:
        """The request has ended. Unknown ones are fine."""
        self._counts.subtract(self._needs.pop(request_id, {}).items())


_MAX_ID_LENGTH: Final = 200
_MAX_TIMEOUT_S: Final = 30 * 86400


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks, as it came; None means the default. See AsyncOmni.generate."""

    inputs: Mapping[str, Any]
    request_id: str | None = None
    modalities: Sequence[str] | None = None
    params: Mapping[int, Mapping[str, Any]] | None = None
    timeout_s: float | None = None
    received_s: float | None = None
    priority: int = 0
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    segmented: bool = False
    async_chunk: bool | None = None


class Intake:
    """The door of one hub. ``backlog`` knows how many requests each stage has still to serve."""

    def __init__(self, releases: DeployVersions, config: HubConfig) -> None:
        self.backlog = Backlog()
        self._releases = releases
        self._config = config
        self._numbers = itertools.count()
        self._returns = Returns()

    def check(self, asked: Asked, live_hubs: int) -> AddRequest:
        """Plan what was asked, by the deploy document that it will go by to its end. Raise InvalidRequestError."""
        shown_id = uuid.uuid4().hex if asked.request_id is None else asked.request_id
        timeout_s = self._config.request_timeout_s if asked.timeout_s is None else asked.timeout_s
        # Companions and segments hand over as a whole.
        async_chunk = False if asked.companions or asked.segmented else asked.async_chunk
        release = self._releases.newest
        plan = release.graph.plan(asked.modalities, async_chunk)
        if self._releases.has_several:
            # Which stages are needed is the same by all documents.
            release = self._releases.choose(plan.stages, self.backlog.of, live_hubs)
            plan = release.graph.plan(asked.modalities, async_chunk)
        params = release.graph.merge_params(asked.params)
        if not 1 <= len(shown_id) <= _MAX_ID_LENGTH:
            raise InvalidRequestError(f"a request id has 1 to {_MAX_ID_LENGTH} characters")
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            raise InvalidRequestError(f"a timeout of {timeout_s} s; it must be above 0 and at most {_MAX_TIMEOUT_S} s")
        if not abs(asked.priority) <= MAX_PRIORITY:
            raise InvalidRequestError(
                f"a priority of {asked.priority}; it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        check_companions(plan, asked.companions)
        if asked.segmented and asked.companions:
            raise InvalidRequestError("a request whose input comes in segments has no companions")
        return AddRequest(
            # A number of its own keeps late frames of an aborted request off one that reuses its id.
            request_id=f"{shown_id}~{next(self._numbers)}",
            shown_id=shown_id,
            inputs=asked.inputs,
            plan=plan,
            params=params,
            timeout_s=timeout_s,
            received_s=time.perf_counter() if asked.received_s is None else asked.received_s,
            priority=asked.priority,
            segmented=asked.segmented,
            companions=asked.companions,
            trace_headers=asked.trace_headers,
            release=release,
            asked_params=asked.params or {},
        )

    def admit(self, request: AddRequest, in_flight: int, live_hubs: int) -> None:
        """Count the request in. Raise OverloadedError with the time to come back where its stages have too much."""
        config, release = self._config, request.release or self._releases.newest
        loads = []
        for stage_id in request.plan.stages:
            pool, backlog = release.pools[stage_id], self.backlog.of(stage_id, release.fingerprints[stage_id])
            loads.append(StageLoad(stage_id, backlog, pool.slots, pool.mean_service_s))
        found = refusal(
            loads, Bounds(config.max_waiting, config.max_in_flight, live_hubs), in_flight, request.timeout_s
        )
        if found is not None:
            raise OverloadedError(found.reason, self._returns.retry_after_s(found, time.monotonic()))
        self.backlog.enter(request.request_id, request.plan.stages, release.fingerprints)
