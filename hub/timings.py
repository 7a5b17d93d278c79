"""The names of a request's timings, and what a replica's own figures add to them. Pure.

All are seconds. For the whole request: ``hub_in`` (from its arrival to the first send), ``total``. For each stage, as
``stage<id>.<name>``, of the attempt that counts:

    queue         it waited, in the hub for a free slot and at the replica for its engine
    submit        from the send to the replica's word that it has the work
    first_output  from the send to the first piece of output
    generate      the engine worked on it
    transfer      its hand-offs were fetched and stored
    total         from the send to the end of the stage

``stage<id>.replica.<name>`` is what the replica itself said, in its own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Final

#: The timings of one stage that are exported.
STAGE_PARTS: Final = ("queue", "submit", "first_output", "generate", "transfer")


def name_of(stage_id: int, part: str) -> str:
    """How a stage's timing is called among those of its request."""
    return f"stage{stage_id}.{part}"


def with_replica(queued_s: float, said_s: Mapping[str, float]) -> dict[str, float]:
    """A stage's timings once its replica has told its own; ``queued_s`` is how long the work waited in the hub."""
    parts = {name: said_s[name] for name in ("generate", "transfer") if is_length(said_s.get(name))}
    if is_length(said_s.get("queue")):
        parts["queue"] = queued_s + said_s["queue"]
    return parts


def is_length(seconds: float | None) -> bool:
    """Whether that can be a length of time: replicas may say anything."""
    return seconds is not None and isfinite(seconds) and seconds >= 0


def of_stage(timings_s: Mapping[str, float], stage_id: int) -> dict[str, float]:
    """Those of one stage that are exported, by their short names."""
    found = {part: timings_s.get(name_of(stage_id, part)) for part in STAGE_PARTS}
    return {part: seconds for part, seconds in found.items() if seconds is not None}
