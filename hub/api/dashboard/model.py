"""What the dashboard's page is told once a second: one snapshot of a hub, as JSON. Unknown is null, never 0. Pure."""

from __future__ import annotations

import msgspec

from omni_discovery.view.recent_events import ShownEvent, Tone


class ShownReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as its record and this hub see it."""

    name: str
    stage_id: int
    replica_id: int
    #: One life of it: an action is meant for that.
    epoch: int
    tone: Tone
    #: Its state in a word or two, and the reason; empty where there is none.
    state: str
    why: str
    #: From 0 to 1 while it starts; None otherwise.
    progress: float | None
    takes_work: bool
    cordoned: bool
    weight: float
    #: What it works on, for all hubs, and how much it can do at once.
    load: int
    capacity: int
    #: Of that, requests of this hub; and the credits that this hub has left.
    in_flight: int
    credits: int | None
    host: str
    pid: int
    device: str
    version: str
    #: Seconds since its record began and since it was written last, by this hub's clock.
    age_s: float
    written_s: float


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How often something happens, and how long it takes; None where nothing happened, or it is not known yet."""

    per_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


class ShownStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage and its replicas."""

    stage_id: int
    engine: str
    model: str
    #: What of its output the client gets: a modality, or ``none``.
    output: str
    wanted: int
    registered: int
    able: int
    slots: int
    waiting: int
    #: Why some can't take work, and that its requests keep failing; empty where that is not so.
    why_absent: str
    failing: str
    #: The work of the engine; and how long work waited for a slot.
    work: Spread
    queue: Spread
    replicas: tuple[ShownReplica, ...]
    #: How many replicas there are beyond those that are shown.
    more: int


class ShownEdge(msgspec.Struct, frozen=True, kw_only=True):
    """A hand-off between two stages. None stands for the client."""

    from_stage: int | None
    to_stage: int | None
    connector: str = ""
    in_pieces: bool = False
    flow: Spread = Spread()


class ShownNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator should look at, and what mends it."""

    tone: Tone
    topic: str
    text: str
    advice: str = ""
    #: What to type for that; empty where no command does it.
    command: str = ""


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """The checks of what needs somebody: how many are fine, when they ran last, and why they can't at the moment."""

    fine: int = 0
    at: float | None = None
    problem: str = ""


class ShownTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of this hub within the last ``window_s`` seconds; totals since it started."""

    window_s: float
    in_flight: int
    ended: Spread
    first_output: Spread
    failed_per_s: float | None
    total_ok: int
    total_failed: int
    total_retries: int
    total_continued: int


class DashboardSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a hub. ``at`` is its wall clock, in seconds."""

    at: float
    hub_id: str
    namespace: str
    version: str
    url: str
    revision: int
    #: For how long the view of the registry has been stale; None while it is fresh.
    stale_s: float | None
    needs: tuple[ShownNeed, ...]
    checks: Checks
    stages: tuple[ShownStage, ...]
    edges: tuple[ShownEdge, ...]
    traffic: ShownTraffic
    events: tuple[ShownEvent, ...]
