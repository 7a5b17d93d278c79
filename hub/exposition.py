"""Exposition: what ``/metrics`` says, of this process, and of the other API servers behind the same port."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import chain
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from omni_discovery.errors import OmniError
from omni_discovery.log_once import LogOnce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

logger = logging.getLogger(__name__)

#: The label of the API server that has counted; where there is one only, no metric has it.
_LABEL: Final = "server"
#: Families of replicas and supervisors, which belong to no server.
_OF_HOST: Final = ("omni_replica_", "omni_supervisor_")
_FAMILY: Final = "# HELP "
_LOG_EVERY_S: Final = 60.0
#: How many answers are made anew in a second: each takes some milliseconds, of every API server.
_FRESH_PER_S: Final = 8


class Exposition:
    """The metrics of one hub in the format of Prometheus. Used on the hub's loop."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collects = [collect]
        self._server: int | None = None
        self._asks: Callable[[], Mapping[int, Callable[[], str]]] = dict
        self._log_once = LogOnce(time.monotonic)
        #: How many may be made anew now, as of that moment; the last that was.
        self._fresh, self._fresh_at_s = float(_FRESH_PER_S), time.monotonic()
        self._last: asyncio.Task[str] | None = None

    def add(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Show these metrics, too."""
        self._collects.append(collect)

    def share(self, server: int, asks: Callable[[], Mapping[int, Callable[[], str]]]) -> None:
        """Label the metrics as those of API server ``server`` of several, and show those of the others, too.

        ``asks`` has, by the number of a server, what returns its text, or its and that of others. That may block, and
        raise OmniError.
        """
        self._server, self._asks = server, asks

    async def own(self) -> str:
        """The metrics of this process."""
        # Gauges read the loop's own state; to write it all down takes longer, and needs none of it.
        collected = list(chain.from_iterable(collect() for collect in self._collects))
        return await asyncio.to_thread(_rendered, collected, self._server)

    async def shown(self) -> str:
        """The metrics of all API servers, to whoever asks; where many do, the last answer again, 1/8 s old at most."""
        now_s = time.monotonic()
        self._fresh = min(self._fresh + (now_s - self._fresh_at_s) * _FRESH_PER_S, float(_FRESH_PER_S))
        self._fresh_at_s = now_s
        if self._last is None or self._fresh >= 1.0:
            self._fresh -= 1.0
            self._last = asyncio.create_task(self.whole(), name="Metrics")
        # Others may wait for it, too.
        return await asyncio.shield(self._last)

    async def whole(self, asker: int | None = None) -> str:
        """The metrics of all API servers but ``asker``, which adds its own.

        One that does not answer is left out, and logged once a minute.
        """
        asked = [self._asked(number, ask) for number, ask in self._asks().items() if number != asker]
        texts = [text for text in await asyncio.gather(self.own(), *asked) if text]
        return texts[0] if len(texts) == 1 else await asyncio.to_thread(merged, texts)

    async def _asked(self, number: int, ask: Callable[[], str]) -> str:
        try:
            return await asyncio.to_thread(ask)
        except OmniError as error:
            if self._log_once.should(number, every_s=_LOG_EVERY_S):
                logger.warning("api_server.metrics_missing number=%d: %s", number, error)
            return ""


def merged(texts: Sequence[str]) -> str:
    """Several expositions as one: the samples of a family have to stand together. Pure."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        comments: list[str] = []
        samples: list[str] = []
        is_first = False
        for line in text.splitlines():
            if line.startswith(_FAMILY):
                name = line.split(" ", 3)[2]
                is_first = name not in families
                comments, samples = families.setdefault(name, ([], []))
            if not line.startswith("#"):
                samples.append(line)
            elif is_first:
                comments.append(line)
    lines = chain.from_iterable((*comments, *samples) for comments, samples in families.values())
    return "".join(f"{line}\n" for line in lines)


class _Collected(Collector):
    """Metrics as they were when they were collected."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        return self._metrics


def _rendered(metrics: Iterable[Metric], server: int | None) -> str:
    registry = CollectorRegistry()
    registry.register(_Collected(metrics if server is None else [_labelled(each, server) for each in metrics]))
    return generate_latest(registry).decode()


def _labelled(metric: Metric, server: int) -> Metric:
    if metric.name.startswith(_OF_HOST):
        return metric
    labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    labelled.samples = [each._replace(labels={_LABEL: str(server), **each.labels}) for each in metric.samples]
    return labelled
