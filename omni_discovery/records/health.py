"""HubHealth: what a hub reports in its beat of failed requests and of replicas that it can't use.

Every list is bounded by the hub that writes it, and again by who reads it, since a hub may be hostile. No text of an
engine goes in, since that may quote a prompt.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import islice
from typing import Annotated, Final

import msgspec

#: Replicas that one report names at most; the others are counted.
MOST_TROUBLES: Final = 12
#: Stages of which one report tells at most: those of the longest document, and what no stage was at fault for.
MOST_STAGES: Final = 257
#: Types of errors of one stage, and characters of one, that are read.
_MOST_KINDS: Final = 16
_MOST_KIND: Final = 64
#: Characters of a reason.
MOST_REASON: Final = 160

_Id = Annotated[int, msgspec.Meta(ge=0, lt=1_000_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class TroubleKind(StrEnum):
    """Why a hub does not use a replica that is, or lately was, in the registry. Later releases may write others."""

    #: It kept failing; the hub sends it nothing until a moment.
    EJECTED = "ejected"
    #: It was ejected: one request at a time shows whether it works again.
    PROBED = "probed"
    #: It is up by its record and does not answer the hub.
    NO_SESSION = "no-session"
    #: Its record can't be used by this hub.
    UNUSABLE = "unusable"
    #: It left the registry without goodbye, or failed, and none has come in its place.
    LOST = "lost"
    #: It takes several times as long for a request as the others of its stage.
    SLOW = "slow"


class ReplicaTrouble(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica that the hub can't use. Moments are wall-clock seconds of the hub, 0 where unknown."""

    stage_id: _Id
    replica_id: _Id
    epoch: _Count = 0
    #: A TroubleKind, or a word of a later release.
    kind: _Text
    since: float = 0.0
    #: When an ejection ends.
    until: float = 0.0
    reason: _Text = ""
    #: Whether it is picked all the same, since too few others are left.
    is_picked: bool = False
    host: _Text = ""
    pid: _Count = 0

    @property
    def name(self) -> str:
        """The replica as tables and logs name it."""
        return f"{self.stage_id}/{self.replica_id}"


class StageFailures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests that a stage failed within the report's ``window_s``."""

    #: None where no stage was at fault.
    stage_id: _Id | None = None
    failed: _Count = 0
    #: The types of the errors, the most frequent first.
    kinds: dict[str, int] = {}
    last_at: float = 0.0


class StageLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What waits for a stage in the hub, and what the hub refused for it within the report's ``window_s``."""

    #: None where the hub as a whole had no room.
    stage_id: _Id | None = None
    #: Requests that wait for a free slot now.
    waiting: _Count = 0
    #: Requests that were answered 429, and when the last was, wall-clock seconds.
    refused: _Count = 0
    refused_at: float = 0.0


class UnreadAnswers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests whose clients leave what was made for them unread, and since when the first of them does."""

    count: _Count = 0
    since: float = 0.0


class HubHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One hub's report: the requests that ended within the last ``window_s``, and replicas in trouble."""

    window_s: float = 300.0
    #: Requests that ended, without those that clients cancelled.
    requests: _Count = 0
    failures: list[StageFailures] = []
    troubles: list[ReplicaTrouble] = []
    #: How many more replicas are in trouble than ``troubles`` names.
    more: _Count = 0
    #: The stages for which something waits or was refused; absent from hubs that do not count that, as older ones.
    loads: list[StageLoad] | msgspec.UnsetType = msgspec.UNSET
    #: Clients that read too slowly; absent where there is none.
    unread: UnreadAnswers | msgspec.UnsetType = msgspec.UNSET

    @property
    def failed(self) -> int:
        """How many of the requests failed, but for mistakes of clients."""
        return sum(each.failed for each in self.failures)


def bounded(report: HubHealth) -> HubHealth:
    """As much of a report as a hub writes; what is beyond that is counted, or left out."""
    loads = report.loads
    return msgspec.structs.replace(
        report,
        failures=[_bounded(each) for each in report.failures[:MOST_STAGES]],
        troubles=report.troubles[:MOST_TROUBLES],
        more=report.more + max(0, len(report.troubles) - MOST_TROUBLES),
        loads=loads if isinstance(loads, msgspec.UnsetType) else loads[:MOST_STAGES],
    )


def _bounded(failures: StageFailures) -> StageFailures:
    kinds = {kind[:_MOST_KIND]: count for kind, count in islice(failures.kinds.items(), _MOST_KINDS)}
    return failures if kinds == failures.kinds else msgspec.structs.replace(failures, kinds=kinds)
