"""How old a hub's view is, as its users are told."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.testclient import TestClient

from hub.api.generation.running import stale_header
from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from omni_discovery.view.table import Delta, View
from tests.support.hub_fakes import ONE_STAGE, deploy_of


@pytest.fixture
def omni() -> AsyncOmni:
    return AsyncOmni(deploy_of(ONE_STAGE), "hub-1", None)


def figures(omni: AsyncOmni) -> dict[str, float]:
    lines = generate_latest(omni.metrics).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_a_fresh_view_says_nothing(omni: AsyncOmni) -> None:
    omni.apply_view(View(revision=1), Delta())
    assert omni.view_stale_s is None
    assert stale_header(omni) == {}
    assert figures(omni)["omni_hub_view_stale_seconds"] == 0


def test_a_stale_view_says_for_how_long_everywhere(omni: AsyncOmni) -> None:
    omni.apply_view(View(revision=1, stale_since_s=time.time() - 60.0), Delta())
    assert 60.0 <= figures(omni)["omni_hub_view_stale_seconds"] < 70.0
    assert 60.0 <= float(stale_header(omni)["x-omni-view-stale-s"]) < 70.0
    body: dict[str, Any] = json.loads(TestClient(build_app(omni, deploy_of(ONE_STAGE), 0)).get("/ready").content)
    assert 60.0 <= body["view_stale_s"] < 70.0
    assert "not been proved fresh" in body["view"]


def test_a_clock_that_was_set_back_makes_no_negative_age(omni: AsyncOmni) -> None:
    omni.apply_view(View(revision=1, stale_since_s=time.time() + 60.0), Delta())
    assert omni.view_stale_s == 0.0


@pytest.mark.parametrize("name", ["relist", "bad_value", "repair", "unproved"])
def test_what_befalls_the_view_is_counted(omni: AsyncOmni, name: str) -> None:
    before = figures(omni)
    omni.hub_metrics.count_view(name)
    omni.hub_metrics.count_view("something new")
    changed = {key for key, value in figures(omni).items() if value != before.get(key) and "_created" not in key}
    assert len(changed) == 1
    assert changed.pop().endswith("_total")
