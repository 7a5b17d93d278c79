"""The lines of ``--log-stats``: what the hub's metrics say, each ten seconds while there are requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

#: How often the numbers are logged.
INTERVAL_S: Final = 10.0
_ENDED: Final = "omni_hub_requests_total"
_IN_FLIGHT: Final = "omni_hub_requests_in_flight"
_OF_STAGES: Final = {
    "pickable": "omni_hub_replicas_pickable",
    "slots": "omni_hub_slots",
    "waiting": "omni_hub_requests_waiting",
    "retries": "omni_hub_retries_total",
}


class StatsLog:
    """Turns what the metrics of a hub are into lines; remembers what had ended at the last call."""

    def __init__(self) -> None:
        self._ended: Mapping[str, float] = {}

    def lines(self, metrics: Iterable[Any]) -> list[str]:
        """Return a line for the hub and one for each stage; none if nothing ended and nothing is in flight.

        ``metrics`` are those of a registry of Prometheus, as its ``collect`` gives them.
        """
        samples = [sample for metric in metrics for sample in metric.samples]
        ended = {sample.labels["outcome"]: sample.value for sample in samples if sample.name == _ENDED}
        since = {outcome: count - self._ended.get(outcome, 0.0) for outcome, count in ended.items()}
        self._ended = ended
        in_flight = sum(sample.value for sample in samples if sample.name == _IN_FLIGHT)
        if not in_flight and not any(since.values()):
            return []
        outcomes = "".join(f" {outcome}={count:g}" for outcome, count in sorted(since.items()) if count)
        of_stages: dict[str, dict[str, float]] = {}
        for name, metric in _OF_STAGES.items():
            for sample in samples:
                if sample.name == metric:
                    of_stages.setdefault(sample.labels["stage"], {})[name] = sample.value
        stages = (
            f"stage.stats stage={stage_id} " + " ".join(f"{name}={value:g}" for name, value in values.items())
            for stage_id, values in sorted(of_stages.items(), key=lambda item: int(item[0]))
        )
        return [f"hub.stats in_flight={in_flight:g} ended={sum(since.values()):g}{outcomes}", *stages]
