"""Shrinking: the smallest plan that still breaks the same rule, by leaving out faults and requests and by sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from tests.simulation.plan import Plan

#: Whether a plan still breaks the rule.
Breaks = Callable[[Plan], bool]


def shrink(plan: Plan, breaks: Breaks, most_runs: int = 200) -> Plan:
    """The smallest plan found within so many runs; ``plan`` itself breaks the rule."""
    runs = [0]

    def still(smaller: Plan) -> bool:
        runs[0] += 1
        return runs[0] <= most_runs and breaks(smaller)

    before = None
    while plan != before and runs[0] < most_runs:
        before = plan
        plan = _simpler(_with_fewer_asks(_with_fewer_faults(plan, still), still), still)
    return plan


def _with_fewer_faults(plan: Plan, still: Breaks) -> Plan:
    return replace(plan, faults=_fewer(plan.faults, lambda kept: still(replace(plan, faults=kept))))


def _with_fewer_asks(plan: Plan, still: Breaks) -> Plan:
    return replace(plan, asks=_fewer(plan.asks, lambda kept: still(replace(plan, asks=kept))))


def _simpler(plan: Plan, still: Breaks) -> Plan:
    for smaller in _smaller(plan):
        if still(smaller(plan)):
            plan = smaller(plan)
    return plan


def _fewer(items: tuple[Any, ...], is_enough: Callable[[tuple[Any, ...]], bool]) -> tuple[Any, ...]:
    """Leave out halves, quarters and so on, as long as what is left is enough."""
    size = max(1, len(items) // 2)
    while items:
        for start in range(0, len(items), size):
            kept = (*items[:start], *items[start + size :])
            if is_enough(kept):
                items = kept
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return items


def _smaller(plan: Plan) -> Iterator[Callable[[Plan], Plan]]:
    """Ways to make a plan simpler, one setting at a time."""
    usual = Plan(seed=plan.seed)
    for name in ("jitter_s", "loss", "wake_s", "reuses_ports", "deterministic", "async_chunk", "policy", "load_s"):
        if getattr(plan, name) != getattr(usual, name):
            yield lambda each, name=name: replace(each, **{name: getattr(usual, name)})  # type: ignore[misc]
    for hubs in range(1, plan.hubs):
        yield lambda each, hubs=hubs: _with_hubs(each, hubs)  # type: ignore[misc]
    for stage, count in enumerate(plan.stages):
        for fewer in range(1, count):
            yield lambda each, at=stage, fewer=fewer: _with_replicas(each, at, fewer)  # type: ignore[misc]
    last_s = max([fault.at_s + fault.for_s for fault in plan.faults] + [ask.at_s for ask in plan.asks] + [1.0])
    if last_s + 1.0 < plan.length_s:
        yield lambda each: replace(each, length_s=last_s + 1.0)


def _with_hubs(plan: Plan, hubs: int) -> Plan:
    faults = tuple(replace(fault, hub=min(fault.hub, hubs - 1)) for fault in plan.faults)
    asks = tuple(replace(ask, hub=min(ask.hub, hubs - 1)) for ask in plan.asks)
    return replace(plan, hubs=hubs, faults=faults, asks=asks)


def _with_replicas(plan: Plan, stage: int, count: int) -> Plan:
    stages = tuple(min(each, count) if number == stage else each for number, each in enumerate(plan.stages))
    faults: Sequence[Any] = tuple(
        replace(fault, index=min(fault.index, stages[fault.stage] - 1)) for fault in plan.faults
    )
    return replace(plan, stages=stages, faults=tuple(faults))
