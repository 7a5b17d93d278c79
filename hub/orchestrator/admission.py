"""Admission: validates and plans a new request, and admits it or rejects it with the time to retry.

The tightest stage of the request's path decides: its backlog, beside this hub's share of its slots and its mean service
time. ``Backlog`` counts the unfinished requests that each stage, in each version, has still to serve. Pure but for
``Admission``, which reads the clock and makes ids.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hub.orchestrator.active import AddRequest
from hub.request.companions import check_companions, check_number
from hub.request.nesting import check_nesting
from omni_discovery.errors import InvalidRequestError, OverloadedError
from omni_discovery.text import MAX_LABEL, is_label
from omni_discovery.wire import MAX_PRIORITY

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.orchestrator.deploy_versions import DeployVersions

#: Bounds of the Retry-After of a rejected request, in seconds.
LEAST_RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 600.0
#: The assumed service time of a stage that has not served any request yet.
_UNKNOWN_SERVICE_S: Final = 1.0


class StageLoad(msgspec.Struct, frozen=True):
    """The load of one stage of a request's path."""

    stage_id: int
    #: Unfinished requests of this hub that still need the stage.
    backlog: int
    #: The slots of all its replicas that can take work.
    slots: int
    #: Its mean service time; None before the first request.
    mean_service_s: float | None
    #: Of the slots, those in which requests of this hub are now, or that it may use at once.
    own: int = 0


class Bounds(msgspec.Struct, frozen=True):
    """The limits of one hub. ``live_hubs`` share the slots of every stage, as far as their records tell.

    ``least_part`` is the part of the slots of every stage that this hub has at least, whatever those tell.
    """

    max_waiting: int
    max_in_flight: int
    live_hubs: int = 1
    least_part: float = 0.0


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not admitted. After ``retry_after_s`` seconds it probably would be."""

    reason: str
    retry_after_s: float
    #: The stage that is full; None where it is the hub.
    stage_id: int | None = None
    #: Where a queue is full: the seconds until it has one more free place after that, and until all of it is served.
    seconds_each: float = 0.0
    most_s: float = MOST_RETRY_S


class RetryTimes:
    """Spreads the retries of rejected clients: each gets a place in the queue behind those rejected before it."""

    def __init__(self) -> None:
        #: The place of the client that was rejected last, monotonic, by stage; None is the hub's own limit.
        self._last_place_s: dict[int | None, float] = {}

    def retry_after_s(self, rejection: Rejection, now_s: float) -> float:
        """The Retry-After of a rejection, in seconds."""
        if not rejection.seconds_each:
            return rejection.retry_after_s
        stage_id, soonest_s = rejection.stage_id, now_s + rejection.retry_after_s
        at_s = max(soonest_s, self._last_place_s.get(stage_id, soonest_s) + rejection.seconds_each)
        # Some clients never retry, and after ``most_s`` all requests that wait now will have been served.
        at_s = self._last_place_s[stage_id] = min(at_s, max(soonest_s, now_s + rejection.most_s))
        return _bounded(at_s - now_s)


def find_rejection(stages: Iterable[StageLoad], bounds: Bounds, in_flight: int, timeout_s: float) -> Rejection | None:
    """Check the limits for one request with ``timeout_s`` to its deadline; None admits it.

    A stage without any slot rejects no request: its replicas may be starting, and the pick waits for them.
    """
    path = tuple(stages)
    # What it has at one stage it will have behind that, where it has nothing yet.
    parts = (min(1.0, stage.own / stage.slots) for stage in path if stage.slots)
    bounds = msgspec.structs.replace(bounds, least_part=max(parts, default=0.0))
    worst = max((_of_stage(stage, bounds, timeout_s) for stage in path), key=_retry_after_s, default=None)
    if worst is not None:
        return worst
    if in_flight >= bounds.max_in_flight:
        each_s = max((_seconds_each(stage, bounds) for stage in path if stage.slots), default=0.0)
        reason = f"{in_flight} requests are in flight, which is the bound of this hub"
        return Rejection(reason, LEAST_RETRY_S, None, each_s, in_flight * each_s)
    return None


def _of_stage(stage: StageLoad, bounds: Bounds, timeout_s: float) -> Rejection | None:
    if not stage.slots:
        return None
    share = _share(stage, bounds)
    waiting = max(0.0, stage.backlog - share)
    if waiting >= bounds.max_waiting:
        reason = f"{stage.backlog} requests are on their way to stage {stage.stage_id}, which runs {share:g} at a time"
        each_s = _seconds_each(stage, bounds)
        retry_s = _bounded((waiting - bounds.max_waiting + 1) * each_s)
        return Rejection(reason, retry_s, stage.stage_id, each_s, waiting * each_s)
    expected_s = waiting * (stage.mean_service_s or 0.0) / share
    if expected_s > timeout_s:
        reason = f"stage {stage.stage_id} would begin in about {expected_s:.0f} s, after the request's {timeout_s:g} s"
        return Rejection(reason, _bounded(expected_s - timeout_s), stage.stage_id)
    return None


def _seconds_each(stage: StageLoad, bounds: Bounds) -> float:
    """The mean seconds between two ends of service at this hub's share of the slots."""
    mean_s = _UNKNOWN_SERVICE_S if stage.mean_service_s is None else stage.mean_service_s
    return mean_s / _share(stage, bounds)


def _share(stage: StageLoad, bounds: Bounds) -> float:
    """How many slots this hub may count on: what it has, or its part of all. Anybody may write hubs' records."""
    return stage.slots * max(1 / max(1, bounds.live_hubs), bounds.least_part)


def _retry_after_s(rejection: Rejection | None) -> float:
    return -1.0 if rejection is None else rejection.retry_after_s


def _bounded(seconds: float) -> float:
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))


_NO_VERSIONS: Final[Mapping[int, str]] = MappingProxyType({})


class Backlog:
    """Counts requests from admission to the end of each stage's work, so that downstream stages see upstream ones.

    A request that waits for its client to read is not counted: it wants no slot meanwhile.
    """

    def __init__(self) -> None:
        #: The stages that each unfinished request still needs, each with the fingerprint of its version.
        self._needs: dict[str, dict[int, str]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()
        #: Requests whose client is behind with their output.
        self._set_aside: set[str] = set()

    def __len__(self) -> int:
        return len(self._needs)

    def of(self, stage_id: int, fingerprint: str = "") -> int:
        """The number of unfinished requests that still need that version of the stage."""
        return self._counts[stage_id, fingerprint]

    def enter(self, request_id: str, stages: Iterable[int], fingerprints: Mapping[int, str] = _NO_VERSIONS) -> None:
        """Count a request that needs these stages; it was admitted, or moved to other versions."""
        self._uncount(request_id)
        self._needs[request_id] = {stage_id: fingerprints.get(stage_id, "") for stage_id in stages}
        self._count(request_id)

    def set_aside(self, request_id: str, *, is_aside: bool) -> None:
        """Count a request no more while its client is behind with its output, or again. Unknown ones are fine."""
        if request_id not in self._needs:
            return
        self._uncount(request_id)
        (self._set_aside.add if is_aside else self._set_aside.discard)(request_id)
        self._count(request_id)

    def passed(self, request_id: str, stages: Iterable[int]) -> None:
        """Count these stages of a request as done. Unknown requests and stages are fine."""
        needs = self._needs.get(request_id, {})
        for stage_id in stages:
            if stage_id in needs:
                self._counts[stage_id, needs.pop(stage_id)] -= request_id not in self._set_aside

    def leave(self, request_id: str) -> None:
        """Count a request no more: it has ended. Unknown ones are fine."""
        self._uncount(request_id)
        self._needs.pop(request_id, None)
        self._set_aside.discard(request_id)

    def _count(self, request_id: str) -> None:
        if request_id not in self._set_aside:
            for each in self._needs[request_id].items():
                self._counts[each] += 1

    def _uncount(self, request_id: str) -> None:
        if request_id not in self._set_aside:
            for each in self._needs.get(request_id, _NO_VERSIONS).items():
                self._counts[each] -= 1


_MAX_ID_LENGTH: Final = 200
_MAX_TIMEOUT_S: Final = 30 * 86400


class RequestParts(msgspec.Struct, frozen=True):
    """A client's request before validation; None means the default. See AsyncOmni.generate."""

    inputs: Mapping[str, Any]
    request_id: str | None = None
    modalities: Sequence[str] | None = None
    params: Mapping[int, Mapping[str, Any]] | None = None
    timeout_s: float | None = None
    received_s: float | None = None
    priority: int = 0
    companions: Mapping[str, Mapping[str, Any]] = {}
    trace_headers: Mapping[str, str] = {}
    segmented: bool = False
    async_chunk: bool | None = None
    label: str = ""
    key: str = ""
    client: str = ""
    on_input_wait: Callable[[bool], None] | None = None
    seed: int | None = None


class Admission:
    """Decides for one hub which requests come in. ``backlog`` counts what each stage has still to serve."""

    def __init__(self, releases: DeployVersions, config: HubConfig) -> None:
        self.backlog = Backlog()
        self._releases = releases
        self._config = config
        self._numbers = itertools.count()
        self._retry_times = RetryTimes()

    def check(self, parts: RequestParts, live_hubs: int) -> AddRequest:
        """Validate a request and plan it by the newest deploy document that serves it. Raise InvalidRequestError."""
        shown_id = secrets.token_hex(16) if parts.request_id is None else parts.request_id
        timeout_s = self._config.request_timeout_s if parts.timeout_s is None else parts.timeout_s
        # Requests with companions or segments hand over complete outputs only.
        async_chunk = False if parts.companions or parts.segmented else parts.async_chunk
        check_number(parts.companions)
        for what, value in (
            ("the input", parts.inputs),
            ("sampling parameters", parts.params),
            ("companions", parts.companions),
        ):
            check_nesting(what, value)
        release = self._releases.newest
        plan = release.graph.plan(parts.modalities, async_chunk)
        if self._releases.has_several:
            # All documents need the same stages.
            release = self._releases.choose(plan.stages, self.backlog.of, live_hubs)
            plan = release.graph.plan(parts.modalities, async_chunk)
        params = release.graph.merge_params(parts.params)
        if not 1 <= len(shown_id) <= _MAX_ID_LENGTH:
            raise InvalidRequestError(f"a request id has 1 to {_MAX_ID_LENGTH} characters")
        if parts.label and not is_label(parts.label):
            raise InvalidRequestError(f"a label has at most {MAX_LABEL} printable ASCII characters")
        if not 0 < timeout_s <= _MAX_TIMEOUT_S:
            raise InvalidRequestError(f"a timeout of {timeout_s} s; it must be above 0 and at most {_MAX_TIMEOUT_S} s")
        if not abs(parts.priority) <= MAX_PRIORITY:
            raise InvalidRequestError(
                f"a priority of {parts.priority}; it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        check_companions(plan, parts.companions)
        if parts.segmented and parts.companions:
            raise InvalidRequestError("a request whose input comes in segments has no companions")
        return AddRequest(
            # Frames that come late for an aborted request must not reach one that reuses its id.
            request_id=f"{shown_id}~{next(self._numbers)}",
            shown_id=shown_id,
            inputs=parts.inputs,
            plan=plan,
            params=params,
            timeout_s=timeout_s,
            received_s=time.perf_counter() if parts.received_s is None else parts.received_s,
            priority=parts.priority,
            segmented=parts.segmented,
            companions=parts.companions,
            trace_headers=parts.trace_headers,
            label=parts.label,
            key=parts.key,
            client=parts.client,
            on_input_wait=parts.on_input_wait,
            release=release,
            asked_params=parts.params or {},
            seed=parts.seed,
        )

    def admit(self, request: AddRequest, in_flight: int, live_hubs: int) -> None:
        """Count the request in. Raise OverloadedError, with the time to retry, where a limit is reached."""
        config, release = self._config, request.release or self._releases.newest
        loads = []
        for stage_id in request.plan.stages:
            pool, backlog = release.pools[stage_id].core, self.backlog.of(stage_id, release.fingerprints[stage_id])
            loads.append(StageLoad(stage_id, backlog, pool.members.slots, pool.mean_service_s, pool.usable_slots))
        rejection = find_rejection(
            loads, Bounds(config.max_waiting, config.max_in_flight, live_hubs), in_flight, request.timeout_s
        )
        if rejection is not None:
            retry_after_s = self._retry_times.retry_after_s(rejection, time.monotonic())
            raise OverloadedError(rejection.reason, retry_after_s, rejection.stage_id)
        self.backlog.enter(request.request_id, request.plan.stages, release.fingerprints)
