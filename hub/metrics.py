"""The Prometheus metrics of a hub, on a registry of their own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hub.exposition import Exposition
from omni_discovery.metrics.collector import HostCollector, add_build_info

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from prometheus_client import Metric
    from prometheus_client.metrics import MetricWrapperBase

    from hub.pool.core import Pool
    from hub.pool.stage_pool import StagePool
    from hub.pool.versions import Pools
    from omni_discovery.metrics.samples import HostSamples
    from omni_discovery.view.table import Delta, View

_Metric = TypeVar("_Metric", Counter, Histogram)

_OVERHEAD_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 10.0)

_STAGE_BUCKETS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)

#: Names of API keys that metrics tell apart.
_MOST_KEYS: Final = 100

#: A beat that takes longer than two seconds is given up.
_ECHO_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_VIEW_CHANGES: Final = ("added", "updated", "removed")

#: The kinds of tokens, as a usage names them.
_TOKEN_TYPES: Final = ("prompt", "completion")
#: More tokens than one request of any model has, and a longer time than any stage takes.
_MOST_TOKENS: Final = 1 << 24
_MOST_STAGE_S: Final = 7 * 86_400.0

#: For so long the series of a replica that has left are kept, for scrapers to read their last values; those of so many
#: replicas at most, since whoever may write records can come under ever new ids.
_LEFT_KEPT_S: Final = 600.0
_MOST_LEFT: Final = 256

#: Events of the registry's watcher, by its names: the metric and its help text.
_VIEW_COUNTERS: Final = {
    "relist": ("view_relists", "Times the view was listed anew after its watch had ended."),
    "bad_value": ("view_bad_values", "Values under the prefix that could not be read."),
    "repair": ("view_repairs", "Times a comparison with the registry found what the watch had not brought."),
    "unproved": ("view_unproved", "Times a beat did not come back on the watch."),
}


@dataclass(frozen=True, slots=True)
class Tally:
    """A histogram at one moment: how many observations were at most each bound, the last of them infinite."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HubCounts:
    """What a hub has counted since it started."""

    #: Requests that ended or were refused, by outcome.
    outcomes: Mapping[str, float] = field(default_factory=dict)
    request: Tally = Tally()
    first_output: Tally = Tally()
    #: By stage and part, as in ``omni_hub_stage_seconds``.
    stages: Mapping[tuple[int, str], Tally] = field(default_factory=dict)
    retries: float = 0.0
    continued: float = 0.0


class LeftReplicas:
    """Which replicas with series of their own have left, and whose series may go. Pure; moments are monotonic."""

    def __init__(self) -> None:
        #: The labels of each replica's series.
        self._labels: dict[str, set[tuple[str, ...]]] = {}
        #: When those had left that are not registered, in that order.
        self._left_at_s: dict[str, float] = {}
        self._after_last = 0

    def note_series(self, replica: str, labels: tuple[str, ...]) -> bool:
        """A series of this replica was counted up; return whether so many have one that it is time to forget some."""
        self._labels.setdefault(replica, set()).add(labels)
        return len(self._labels) > self._after_last + _MOST_LEFT

    def forget_left(self, registered: Collection[str], now_s: float) -> list[tuple[str, ...]]:
        """The labels of the series that are to be removed, as only these replicas are registered."""
        for replica in [replica for replica in self._left_at_s if replica in registered]:
            del self._left_at_s[replica]
        for replica in self._labels.keys() - registered:
            self._left_at_s.setdefault(replica, now_s)
        gone = [replica for replica, at_s in self._left_at_s.items() if now_s - at_s >= _LEFT_KEPT_S]
        gone += list(self._left_at_s)[len(gone) : len(self._left_at_s) - _MOST_LEFT]
        for replica in gone:
            del self._left_at_s[replica]
        removed = [labels for replica in gone for labels in self._labels.pop(replica)]
        self._after_last = len(self._labels)
        return removed


class HubMetrics:
    """All metrics of one hub."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left = LeftReplicas()
        #: The names of the replicas that are registered now.
        self._registered: Callable[[], Collection[str]] = tuple
        self.registry = CollectorRegistry()
        #: What ``/metrics`` says.
        self.exposition = Exposition(self._collect)
        self.requests = Counter(
            "omni_hub_requests", "Requests that ended or were refused, by outcome.", ["outcome"], registry=self.registry
        )
        self.resumed = Counter(
            "omni_hub_requests_resumed",
            "Streamed answers that were made again for clients that had a part of them from a hub before.",
            registry=self.registry,
        )
        self.http_cuts = Counter(
            "omni_hub_http_cut",
            "Connections of clients that the hub closed because they kept it waiting, for their place or memory, or "
            "in the middle of a file whose rest failed.",
            ["reason"],
            registry=self.registry,
        )
        self.failures = Counter(
            "omni_hub_request_failures",
            "Requests that ended with an error, by the stage and the replica at fault and the outcome.",
            ["stage", "replica", "outcome"],
            registry=self.registry,
        )
        self._refused = Counter(
            "omni_hub_requests_refused",
            "Requests that were refused with 429 as they came, by the stage that had no room; empty: the hub had none.",
            ["stage"],
            registry=self.registry,
        )
        self._keys = Counter(
            "omni_hub_requests_by_key",
            f"HTTP requests and WebSockets that came in with a key, by its name; those after {_MOST_KEYS} names are"
            " 'others'.",
            ["key"],
            registry=self.registry,
        )
        self._key_names: set[str] = set()
        self.request = Histogram(
            "omni_hub_request_seconds",
            "From the last byte of a request to the end of its answer, of requests that ended well.",
            buckets=_STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.first_output = Histogram(
            "omni_hub_request_first_output_seconds",
            "From the last byte of a request to the first output for its client, of any stage.",
            buckets=_STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.tokens = Counter(
            "omni_hub_tokens",
            "Tokens of prompts and of answers, of stages that were done.",
            ["stage", "type"],
            registry=self.registry,
        )
        self.in_flight = Gauge("omni_hub_requests_in_flight", "Requests that have not ended.", registry=self.registry)
        self.clients_behind = Gauge(
            "omni_hub_clients_behind",
            "Requests that are paused, since their clients have not read what waits for them.",
            registry=self.registry,
        )
        self.realtime_sessions = Gauge(
            "omni_hub_realtime_sessions", "Sessions of /v1/realtime that are open.", registry=self.registry
        )
        self.realtime_refusals = Counter(
            "omni_hub_realtime_refusals",
            "What /v1/realtime has refused, by the code of the error: a 'session' that was to begin, or an 'event' of"
            " one.",
            ["kind", "code"],
            registry=self.registry,
        )
        self.registered = Gauge(
            "omni_hub_replicas_registered", "Replicas that the registry lists.", ["stage"], registry=self.registry
        )
        self.pickable = Gauge(
            "omni_hub_replicas_pickable", "Replicas that can take work.", ["stage"], registry=self.registry
        )
        self.wanted = Gauge(
            "omni_hub_replicas_wanted",
            "Replicas that the deploy document in force asks for: num_replicas of the stage's runtime.",
            ["stage"],
            registry=self.registry,
        )
        self.session_losses = Counter(
            "omni_hub_session_losses", "Sessions to replicas that were lost.", ["stage"], registry=self.registry
        )
        self.retries = Counter(
            "omni_hub_retries", "Stages of requests that were dispatched again.", ["stage"], registry=self.registry
        )
        self.continued = Counter(
            "omni_hub_continuations",
            "Answers that another replica continued behind what was shown.",
            ["stage"],
            registry=self.registry,
        )
        self.waiting = Gauge(
            "omni_hub_requests_waiting", "Requests that wait for a free slot.", ["stage"], registry=self.registry
        )
        self.ejected = Gauge(
            "omni_hub_replicas_ejected", "Replicas left out for their failures.", ["stage"], registry=self.registry
        )
        self.slots = Gauge(
            "omni_hub_slots",
            "What the replicas that can take work run at one time, for all hubs.",
            ["stage"],
            registry=self.registry,
        )
        self.dropped = Counter(
            "omni_hub_dropped_frames", "Frames that could not be used.", ["reason"], registry=self.registry
        )
        self.held = Gauge(
            "omni_hub_replicas_held",
            "Replicas that are served though the registry lists them no more, since it lost many at once.",
            ["stage"],
            registry=self.registry,
        )
        self.refused = Gauge(
            "omni_hub_replicas_refused",
            "Replicas that are not picked for what they run.",
            ["stage"],
            registry=self.registry,
        )
        self.older = Gauge(
            "omni_hub_requests_on_older_pipelines",
            "Requests that go by an older deploy document than the newest that is served.",
            registry=self.registry,
        )
        self.pipeline_not_followed = Gauge(
            "omni_hub_pipeline_not_followed",
            "1 while the pipeline in force can't be served without a restart of this hub.",
            registry=self.registry,
        )
        self.view_stale = Gauge(
            "omni_hub_view_stale_seconds",
            "How long the hub's view of the registry has not been proved fresh; 0 while it is.",
            registry=self.registry,
        )
        self._view_changes = Counter(
            "omni_hub_view_changes",
            "Records of replicas that the registry brought to the view, by what they changed.",
            ["change"],
            registry=self.registry,
        )
        for change in _VIEW_CHANGES:
            self._view_changes.labels(change)
        self._unreadable = Gauge(
            "omni_hub_view_unreadable_keys",
            "Keys under the prefix whose value can't be read: each hides what it describes.",
            registry=self.registry,
        )
        self._echo = Histogram(
            "omni_hub_view_echo_seconds",
            "From the write of the hub's beat to its return on the watch: how late the registry's news arrive.",
            buckets=_ECHO_BUCKETS_S,
            registry=self.registry,
        )
        self._view_counters = {
            name: Counter(f"omni_hub_{metric}", text, registry=self.registry)
            for name, (metric, text) in _VIEW_COUNTERS.items()
        }
        self._overhead = Histogram(
            "omni_hub_overhead_seconds",
            "Time spent in the hub: 'in' from the last byte of the HTTP request to the first dispatch, 'out' from a "
            "replica's frame to the HTTP answer.",
            ["way"],
            buckets=_OVERHEAD_BUCKETS_S,
            registry=self.registry,
        )
        self._stage = Histogram(
            "omni_hub_stage_seconds",
            "Where the time of a stage went, of those that were done: 'queue', 'submit', 'first_output', 'generate',"
            " 'transfer' and 'total', as in a request's timings.",
            ["stage", "part"],
            buckets=_STAGE_BUCKETS_S,
            registry=self.registry,
        )
        #: Series by metric and labels: a look-up by ``labels`` costs more than an observation.
        self._labelled: dict[tuple[Any, ...], Any] = {}
        add_build_info(self.registry, "hub")

    def watch(self, pools: Pools, is_revoked: Callable[[], bool]) -> None:
        """Read the gauges of each stage from its pools, all versions together, whenever metrics are collected.

        No replica takes work from a hub that is revoked. The pools also tell which replicas are registered: the series
        of those that have left go after a while.
        """
        self._registered = partial(_names, pools)

        def able(pools: Callable[[], Collection[StagePool]], count: Callable[[Pool], int]) -> float:
            return 0.0 if is_revoked() else _sum(pools, count)

        for stage_id in pools.stage_ids:
            of_stage = partial(pools.of_stage, stage_id)
            # From 0 on: of a counter that begins at 1, Prometheus sees no increase.
            for counter in (self._refused, self.session_losses, self.retries, self.continued):
                counter.labels(stage_id)
            self.registered.labels(stage_id).set_function(
                partial(_sum, of_stage, lambda pool: pool.members.registered_count)
            )
            self.pickable.labels(stage_id).set_function(
                partial(able, of_stage, lambda pool: pool.members.pickable_count)
            )
            self.held.labels(stage_id).set_function(partial(_sum, of_stage, lambda pool: pool.members.held_count))
            self.waiting.labels(stage_id).set_function(partial(_sum, of_stage, lambda pool: len(pool.queue)))
            self.ejected.labels(stage_id).set_function(partial(_sum, of_stage, lambda pool: len(pool.outliers)))
            self.slots.labels(stage_id).set_function(partial(able, of_stage, lambda pool: pool.members.slots))

    def watch_wanted(self, wanted: Callable[[int], int], stage_ids: Collection[int]) -> None:
        """Read how many replicas each stage should have when metrics are collected."""
        for stage_id in stage_ids:
            self.wanted.labels(stage_id).set_function(partial(wanted, stage_id))

    def watch_host(self, samples: Callable[[], HostSamples]) -> None:
        """Show the metrics of the local stages, too; ``samples`` is called when metrics are collected."""
        self.registry.register(HostCollector(samples))

    def watch_rollout(
        self,
        older: Callable[[], int],
        refused: Callable[[int], int],
        stage_ids: Collection[int],
    ) -> None:
        """Read the gauges of requests on older deploy documents and of refused replicas when metrics are collected."""
        self.older.set_function(older)
        for stage_id in stage_ids:
            self.refused.labels(stage_id).set_function(partial(refused, stage_id))

    def count_view(self, name: str) -> None:
        """Count an event of the view of the registry. From any thread; does nothing for unknown names."""
        counter = self._view_counters.get(name)
        if counter is not None:
            counter.inc()

    def count_changes(self, view: View, delta: Delta) -> None:
        """Count what the registry has changed in the view. From any thread."""
        for change, records in zip(_VIEW_CHANGES, (delta.added, delta.updated, delta.removed), strict=True):
            self._view_changes.labels(change).inc(len(records))
        self._unreadable.set(len(view.bad) + view.refused_count + view.refused_hubs)

    def count_refusal(self, stage_id: int | None) -> None:
        """Count a request that was refused since this stage, or None, the hub, had no room for it."""
        self._refused.labels("" if stage_id is None else stage_id).inc()

    def count_key(self, name: str) -> None:
        """Count a request that came in with the key of this name."""
        if len(self._key_names) < _MOST_KEYS:
            self._key_names.add(name)
        self._keys.labels(name if name in self._key_names else "others").inc()

    def count_end(self, outcome: str) -> None:
        """Count a request that ended or was refused."""
        self._series(self.requests, outcome).inc()

    def count_retry(self, stage_id: int, *, resumed: bool) -> None:
        """Count a stage of a request that was dispatched again; ``resumed``: to continue its answer."""
        self.retries.labels(stage_id).inc()
        if resumed:
            self.continued.labels(stage_id).inc()

    def count_failure(self, stage: str, replica: str, outcome: str) -> None:
        """Count a request that ended with an error; ``replica`` is empty where none had it."""
        labels = stage, replica, outcome
        self.failures.labels(*labels).inc()
        if replica and self._left.note_series(replica, labels):
            self._forget_left()

    def _collect(self) -> Iterable[Metric]:
        self._forget_left()
        return self.registry.collect()

    def _forget_left(self) -> None:
        for labels in self._left.forget_left(self._registered(), self._now()):
            self.failures.remove(*labels)

    def count_tokens(self, stage_id: int, usage: Mapping[str, int]) -> None:
        """Count the tokens of a stage that is done."""
        for kind in _TOKEN_TYPES:
            tokens = usage.get(f"{kind}_tokens", 0)
            # Replicas say what they like; a counter that one has spoilt can't be put right.
            if 0 < tokens <= _MOST_TOKENS:
                self._series(self.tokens, stage_id, kind).inc(tokens)

    def observe_stage(self, stage_id: int, parts_s: Mapping[str, float]) -> None:
        """Count the seconds of each part of a stage that is done."""
        for name, seconds in parts_s.items():
            # As with tokens: a sum that a replica's measure has made infinite would stay so.
            if not 0 <= seconds <= _MOST_STAGE_S:
                continue
            self._series(self._stage, stage_id, name).observe(seconds)

    def counts(self) -> HubCounts:
        """All that was counted until now of requests and stages."""
        return HubCounts(
            outcomes={labels["outcome"]: value for labels, value in _totals(self.requests)},
            request=_tallies(self.request).get((), Tally()),
            first_output=_tallies(self.first_output).get((), Tally()),
            stages={(int(stage), part): tally for (stage, part), tally in _tallies(self._stage).items()},
            retries=sum(value for _, value in _totals(self.retries)),
            continued=sum(value for _, value in _totals(self.continued)),
        )

    def observe_echo(self, seconds: float) -> None:
        """Count the seconds from the write of a beat to its return. From any thread."""
        self._echo.observe(seconds)

    def observe_in(self, seconds: float) -> None:
        """Count the seconds from a request's last byte to its first dispatch."""
        self._series(self._overhead, "in").observe(seconds)

    def observe_out(self, seconds: float) -> None:
        """Count the seconds from a replica's frame to the HTTP answer."""
        self._series(self._overhead, "out").observe(seconds)

    def _series(self, metric: _Metric, *labels: int | str) -> _Metric:
        """The series of a metric with these labels, of which there are few."""
        key = metric, *labels
        found: _Metric | None = self._labelled.get(key)
        if found is None:
            found = self._labelled[key] = metric.labels(*labels)
        return found


def _names(pools: Pools) -> Collection[str]:
    """The names of all registered replicas, as labels have them."""
    return {entry.info.name for pool in pools for entry in pool.core.members if entry.listed}


def _totals(counter: MetricWrapperBase) -> Iterator[tuple[Mapping[str, str], float]]:
    """The labels and value of each child of a counter."""
    for metric in counter.collect():
        yield from ((each.labels, each.value) for each in metric.samples if each.name.endswith("_total"))


def _tallies(histogram: MetricWrapperBase) -> dict[tuple[str, ...], Tally]:
    """Each child of a histogram, by the values of its labels."""
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                labels = dict(sample.labels)
                bound = float(labels.pop("le"))
                found.setdefault(tuple(labels.values()), []).append((bound, sample.value))
    return {key: Tally(*zip(*pairs, strict=True)) for key, pairs in found.items()}


def _sum(pools: Callable[[], Collection[StagePool]], count: Callable[[Pool], int]) -> float:
    return float(sum(count(pool.core) for pool in pools()))
