"""What a run is worth: from what clients saw and when what happened, the figures and every broken promise. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tests.fault.load import Load, Report, Seen


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """What the product keeps while one fault lasts. No client ever sees an error: that is promised always."""

    #: The longest time between two words of a stream; None: as long as the fault.
    stall_s: float | None = 1.0
    #: The same where there is one hub, if that takes longer.
    stall_alone_s: float = 0.0
    #: From the heal until all is as before.
    recovery_s: float = 15.0
    #: Clients whose hub is lost ask again, as the documentation says. Otherwise no answer may break.
    takes_a_hub: bool = False


@dataclass(frozen=True, slots=True)
class Moments:
    """When what happened, on the clock that processes share; None: not within the time that was given."""

    broke_s: float
    healed_s: float
    #: The first line about it in the log of any hub.
    noticed_s: float | None
    #: Since when all was as before.
    whole_s: float | None
    ended_s: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as it is published."""

    fault: str
    load: str
    hubs: int
    requests: int
    errors: int
    #: How often an answer broke, so that its client asked again; how often clients were told to come later.
    broken: int
    refused: int
    longest_stall_s: float
    longest_wait_s: float
    detect_s: float | None
    recover_s: float | None
    #: Stages of requests that were continued, or run again, by another replica; streams that another hub resumed.
    continued: int
    run_again: int
    resumed: int
    #: How long the clients' own process was held up at most, and how busy the machine was: what stalls are read by.
    own_lag_s: float
    load_average: float
    #: Promises that were not kept.
    wrong: tuple[str, ...] = ()


def judge(
    name: tuple[str, str, int],
    load: Load,
    promise: Promise,
    report: Report,
    moments: Moments,
    counted: Mapping[str, float],
    found: Sequence[str],
    *,
    stall_slack_s: float = 0.0,
    recovery_slack_s: float = 0.0,
    load_average: float = 0.0,
) -> Row:
    """The row of a run. ``found`` is what was wrong beside the clients' answers; slacks are this machine's own."""
    affected = [seen for seen in report.requests if seen.ended_s >= moments.broke_s]
    stalls = [seen.stall_s for seen in affected if seen.stalled_at_s + seen.stall_s >= moments.broke_s]
    recover_s = None if moments.whole_s is None else max(0.0, moments.whole_s - moments.healed_s)
    stall_s = max(stalls, default=0.0)
    fault, load_name, hubs = name
    allowed_s = promise.stall_s if promise.stall_s is not None else moments.healed_s - moments.broke_s + 1.0
    if hubs == 1:
        allowed_s = max(allowed_s, promise.stall_alone_s)
    allowed_s += load.turn_s
    return Row(
        fault=fault,
        load=load_name,
        hubs=hubs,
        requests=len(report.requests),
        errors=sum(bool(seen.error) for seen in report.requests),
        broken=sum(seen.broken for seen in report.requests),
        refused=sum(seen.refused for seen in report.requests),
        longest_stall_s=stall_s,
        longest_wait_s=max((seen.first_after_s or 0.0 for seen in affected), default=0.0),
        detect_s=None if moments.noticed_s is None else moments.noticed_s - moments.broke_s,
        recover_s=recover_s,
        continued=round(counted.get("continuations", 0)),
        run_again=round(counted.get("retries", 0)),
        resumed=round(counted.get("requests_resumed", 0)),
        own_lag_s=report.own_lag_s,
        load_average=load_average,
        wrong=(
            *_wrong_answers(report.requests, load, promise),
            *_stalled(stall_s, allowed_s, stall_slack_s + report.own_lag_s),
            *_unrecovered(recover_s, promise.recovery_s, recovery_slack_s),
            *found,
        ),
    )


def _wrong_answers(requests: Sequence[Seen], load: Load, promise: Promise) -> list[str]:
    wrong = [f"request {seen.number}: {seen.error}" for seen in requests if seen.error]
    if not promise.takes_a_hub:
        wrong += [f"request {seen.number} broke: {seen.causes[0]}" for seen in requests if seen.broken]
        if not load.is_too_much:
            wrong += [f"request {seen.number} was told to come later" for seen in requests if seen.refused]
    if not requests:
        wrong.append("nothing was asked")
    return wrong


def _stalled(stall_s: float, allowed_s: float, slack_s: float) -> list[str]:
    is_longer = stall_s > allowed_s + slack_s
    return [f"a stream stood still for {stall_s:.2f} s; {allowed_s:g} s are promised"] if is_longer else []


def _unrecovered(recover_s: float | None, promised_s: float, slack_s: float) -> list[str]:
    if recover_s is None:
        return ["it did not recover"]
    is_late = recover_s > promised_s + slack_s
    return [f"it took {recover_s:.1f} s to recover; {promised_s:g} s are promised"] if is_late else []
