"""The metrics of one host's replicas and supervisors, made of their latest samples whenever Prometheus asks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_discovery import __version__
from omni_discovery.metrics.samples import HostSamples, ReplicaSample, SupervisorSample

_Of = TypeVar("_Of")

#: Values of a metric's own labels, beside those that all metrics of its kind have, and the number.
_Value = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Family(Generic[_Of]):
    """One metric. ``name`` is without the ``_total`` that a counter's samples have."""

    name: str
    text: str
    read: Callable[[_Of], Iterable[_Value]]
    #: Its own labels.
    labels: tuple[str, ...] = ()
    is_counter: bool = False


def _one(read: Callable[[_Of], float | None]) -> Callable[[_Of], Iterable[_Value]]:
    """Of a metric without labels of its own, which is absent while there is no number."""

    def values(sample: _Of) -> Iterator[_Value]:
        number = read(sample)
        if number is not None:
            yield (), number

    return values


def _by_name(read: Callable[[_Of], dict[str, int]]) -> Callable[[_Of], Iterable[_Value]]:
    return lambda sample: [((name,), count) for name, count in sorted(read(sample).items())]


#: The labels of ``omni_replica_info``.
ABOUT: Final = ("engine", "model", "device", "version", "vllm", "torch", "pid")

#: Metrics of replicas; each has the labels ``stage`` and ``replica``.
REPLICA_FAMILIES: Final[tuple[Family[ReplicaSample], ...]] = (
    Family(
        "omni_replica_info",
        "Always 1: what runs in the replica.",
        lambda sample: [(tuple(sample.about.get(name, "") for name in ABOUT), 1)],
        ABOUT,
    ),
    Family("omni_replica_up", "1 while the replica takes requests, else 0.", _one(lambda sample: sample.is_up)),
    Family(
        "omni_replica_requests_in_flight",
        "Requests that the replica has accepted and that have not ended.",
        _one(lambda sample: sample.in_flight),
    ),
    Family(
        "omni_replica_requests_running",
        "Requests that the engine works on. Absent if the engine does not say.",
        _one(lambda sample: sample.engine.get("requests_running")),
    ),
    Family(
        "omni_replica_requests_waiting",
        "Requests that wait in the engine. Absent if the engine does not say.",
        _one(lambda sample: sample.engine.get("requests_waiting")),
    ),
    Family(
        "omni_replica_kv_cache_usage_ratio",
        "Share of the engine's KV cache that is in use, 0 to 1. Absent if the engine has none.",
        _one(lambda sample: sample.engine.get("kv_cache_usage")),
    ),
    Family(
        "omni_replica_requests",
        "Attempts at requests that ended in the replica, by outcome.",
        _by_name(lambda sample: sample.outcomes),
        ("outcome",),
        is_counter=True,
    ),
    Family(
        "omni_replica_tokens",
        "Tokens of prompts whose requests ended, and tokens that the engine has put out.",
        lambda sample: [(("prompt",), sample.prompt_tokens), (("completion",), sample.completion_tokens)],
        ("type",),
        is_counter=True,
    ),
    Family(
        "omni_replica_engine_steps", "Steps of the engine.", _one(lambda sample: sample.engine_steps), is_counter=True
    ),
    Family(
        "omni_replica_slots", "Requests that the replica runs at one time at most.", _one(lambda sample: sample.slots)
    ),
    Family(
        "omni_replica_credits_used",
        "Slots that run a request, or hold one that waits in the engine.",
        _one(lambda sample: sample.credits_used),
    ),
    Family(
        "omni_replica_credits_lent",
        "Slots that are lent to hubs as credits which they have not spent.",
        _one(lambda sample: sample.credits_lent),
    ),
    Family(
        "omni_replica_hub_credits",
        "Slots that are lent to one hub as credits which it has not spent.",
        _by_name(lambda sample: sample.credits_by_hub),
        ("hub",),
    ),
    Family(
        "omni_replica_lease_seconds",
        "How long the replica's lease lasts if it is not renewed; 0 while it has none.",
        _one(lambda sample: sample.lease_left_s),
    ),
    Family(
        "omni_replica_server_events",
        "What the replica's sockets refused, dropped or gave up, by event.",
        _by_name(lambda sample: sample.events),
        ("event",),
        is_counter=True,
    ),
    Family(
        "omni_replica_gpu_memory_used_bytes",
        "Memory in use on a GPU of the replica, by all processes. Absent without a GPU.",
        lambda sample: [((str(gpu.index),), gpu.used_bytes) for gpu in sample.gpus],
        ("gpu",),
    ),
    Family(
        "omni_replica_gpu_memory_bytes",
        "Memory of a GPU of the replica. Absent without a GPU.",
        lambda sample: [((str(gpu.index),), gpu.total_bytes) for gpu in sample.gpus],
        ("gpu",),
    ),
)


@dataclass(frozen=True, slots=True)
class Supervised:
    """A supervisor and its replicas."""

    supervisor: SupervisorSample
    replicas: tuple[ReplicaSample, ...]

    @property
    def hubs(self) -> int | None:
        """The most hubs that one of the replicas sees in the registry; None if none of them knows."""
        return max((sample.hubs for sample in self.replicas if sample.hubs is not None), default=None)


#: Metrics of supervisors; each has the labels ``namespace`` and ``stage``.
SUPERVISOR_FAMILIES: Final[tuple[Family[Supervised], ...]] = (
    Family(
        "omni_supervisor_replicas_wanted",
        "Replicas that the supervisor keeps running here, without those that an operator has drained.",
        _one(lambda each: each.supervisor.wanted),
    ),
    Family(
        "omni_supervisor_replicas_up",
        "Replicas of the supervisor that take requests.",
        _one(lambda each: sum(sample.is_up for sample in each.replicas)),
    ),
    Family(
        "omni_supervisor_restarts",
        "Ends of replica processes that the supervisor had not asked for.",
        _one(lambda each: each.supervisor.restarts),
        is_counter=True,
    ),
    Family(
        "omni_supervisor_hubs",
        "Hubs of the namespace that the replicas see in the registry. Absent while that is not known.",
        _one(lambda each: each.hubs),
    ),
)


def replica_name(sample: ReplicaSample) -> str:
    """The replica as tables and errors call it, ``<stage>/<replica id>``."""
    return f"{sample.stage_id}/{sample.replica_id}"


class HostCollector(Collector):
    """Metrics of what ``latest()`` returns, which is called in the thread that answers Prometheus."""

    def __init__(self, latest: Callable[[], HostSamples]) -> None:
        self._latest = latest

    def describe(self) -> Iterable[Metric]:
        """The metrics without samples, for the registry's check of names."""
        return self._metrics(HostSamples())

    def collect(self) -> Iterable[Metric]:
        """The metrics with a sample for each replica, or supervisor, that has one."""
        return self._metrics(self._latest())

    def _metrics(self, samples: HostSamples) -> Iterator[Metric]:
        replicas = [samples.replicas[key] for key in sorted(samples.replicas)]
        for family in REPLICA_FAMILIES:
            metric = _empty(family, ("stage", "replica"))
            for sample in replicas:
                for own, number in family.read(sample):
                    metric.add_metric((str(sample.stage_id), replica_name(sample), *own), number)
            yield metric
        supervised = [
            Supervised(each, tuple(sample for sample in replicas if sample.stage_id == stage_id))
            for stage_id, each in sorted(samples.supervisors.items())
        ]
        for of_supervisor in SUPERVISOR_FAMILIES:
            metric = _empty(of_supervisor, ("namespace", "stage"))
            for each in supervised:
                for own, number in of_supervisor.read(each):
                    metric.add_metric((each.supervisor.namespace, str(each.supervisor.stage_id), *own), number)
            yield metric


def _empty(family: Family[_Of], labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    return kind(family.name, family.text, labels=(*labels, *family.labels))


def add_build_info(registry: CollectorRegistry, component: str) -> None:
    """Add ``omni_build_info``: the release and the Python of the process that answers."""
    text = "Always 1: the release of omni-discovery and the Python of the process that answers."
    info = Gauge("omni_build_info", text, ["component", "version", "python"], registry=registry)
    info.labels(component, __version__, platform.python_version()).set(1)
