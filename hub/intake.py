"""Intake: checks what a client asks, plans it, and takes it or turns it away."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hub.active import AddRequest
from hub.admission import Bounds, Returns, StageLoad, refusal
from hub.backlog import Backlog
from hub.companions import check_companions
from omni_discovery.errors import InvalidRequestError, OverloadedError
from omni_discovery.wire import MAX_PRIORITY

if TYPE_CHECKING:
    from hub.config import HubConfig
    from hub.releases import Releases

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

    def __init__(self, releases: Releases, config: HubConfig) -> None:
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
