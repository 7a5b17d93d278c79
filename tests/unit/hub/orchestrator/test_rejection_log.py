"""Requests that are turned away leave a count and a line, and not a line each."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hub.api.errors import BodyTooLongError, ModelNotFoundError
from hub.metrics import HubMetrics
from hub.orchestrator.rejection_log import RejectionLog, log_revocation
from omni_discovery.errors import InvalidRequestError, OverloadedError


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def counted(metrics: HubMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value("omni_hub_requests_total", {"outcome": name})


async def test_refusals_are_counted_by_type_and_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """1. 400 are refused for load, two for what they ask: one line of each kind at once
    2. a moment later one more line says how many those were; nothing more comes without more refusals
    """
    caplog.set_level(logging.INFO)
    metrics = HubMetrics()
    rejections = RejectionLog(metrics, quiet_s=0.1)
    for number in range(400):
        with pytest.raises(OverloadedError), rejections.counted():
            raise OverloadedError(f"full: {number}")
    for _ in range(2):
        rejections.count(InvalidRequestError("n is 2"))
    assert (counted(metrics, "OverloadedError"), counted(metrics, "InvalidRequestError")) == (400, 2)
    first = [
        "hub.refused error=OverloadedError count=1: full: 0",
        "hub.refused error=InvalidRequestError count=1: n is 2",
    ]
    assert lines(caplog) == first
    await asyncio.sleep(0.5)
    assert lines(caplog)[2:] == [
        "hub.refused error=OverloadedError count=399: full: 399",
        "hub.refused error=InvalidRequestError count=1: n is 2",
    ]
    rejections.count(OverloadedError("again"))
    assert len(lines(caplog)) == 5


async def test_a_clients_own_mistake_has_a_public_name_and_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = HubMetrics()
    rejections = RejectionLog(metrics)
    rejections.count(ModelNotFoundError("gpt", "mine"))
    rejections.count(BodyTooLongError("too long"))
    rejections.count(OverloadedError("full"))
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO, logging.WARNING]
    reason = "the model 'gpt' is not served here; there is 'mine'"
    assert lines(caplog)[0] == f"hub.refused error=ModelNotFoundError count=1: {reason}"
    assert counted(metrics, "ModelNotFoundError") == 1


async def test_what_is_untold_when_the_hub_closes_is_told_then(caplog: pytest.LogCaptureFixture) -> None:
    rejections = RejectionLog(HubMetrics())
    for _ in range(3):
        rejections.count(OverloadedError("full"))
    rejections.close()
    rejections.close()
    text = "hub.refused error=OverloadedError count={}: full"
    assert lines(caplog) == [text.format(1), text.format(2)]


def test_a_hub_says_once_that_it_is_revoked_and_once_that_it_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    for before, now in ((False, False), (False, True), (True, True), (True, False)):
        log_revocation("front-1", before=before, now=now)
    assert [line.split()[0] for line in lines(caplog)] == ["hub.revoked", "hub.allowed"]


async def test_what_was_refused_for_overload_is_told_with_its_stage() -> None:
    told: list[int | None] = []
    rejections = RejectionLog(HubMetrics(), on_overload=lambda error: told.append(error.stage_id))
    rejections.count(OverloadedError("full", stage_id=3))
    rejections.count(OverloadedError("full"))
    rejections.count(InvalidRequestError("wrong"))
    rejections.close()
    assert told == [3, None]
