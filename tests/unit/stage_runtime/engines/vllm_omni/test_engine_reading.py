"""Whose pictures, sound, videos and long texts a stage of vLLM-Omni's reads next."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.vllm_omni import engine
from stage_runtime.engines.vllm_omni.engine import OmniStage
from stage_runtime.engines.vllm_omni.request import Processing

WAIT_S = 30.0


class Reader(OmniStage):
    """A first stage that notes whose input it has read; that of "many" takes until it may end."""

    def __init__(self) -> None:
        self._readers: Any = None
        self._loaded: Any = SimpleNamespace(is_first=True)
        self.may_end, self.read = threading.Event(), []

    def take(self, client: str) -> Any:
        run: Any = SimpleNamespace(
            request=StageRequest(client, client, inputs={"images": [b"x"]}, params={}, client=client), reading=None
        )
        self._take(run)
        return run.reading

    def _read(self, request: StageRequest, processing: Processing, *, has_files: bool) -> Any:
        assert has_files
        if request.client == "many":
            assert self.may_end.wait(WAIT_S)
        self.read.append(request.client)


@pytest.mark.attack("Y1")
def test_one_clients_videos_hold_up_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. eight requests of one client are to be read, which takes long; 2. those of others are read meanwhile"""
    monkeypatch.setattr(engine, "check_inputs", lambda *_: None)
    stage = Reader()
    held = [stage.take("many") for _ in range(8)]
    try:
        for client in ("one", "two", "one"):
            stage.take(client).result(WAIT_S)
        assert stage.read == ["one", "two", "one"]
        assert not any(each.done() for each in held)
    finally:
        stage.may_end.set()
    for each in held:
        each.result(WAIT_S)


def test_a_stage_that_is_closed_reads_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "check_inputs", lambda *_: None)
    stage = Reader()
    stage._runs, stage._loaded = {}, SimpleNamespace(is_first=True, close=lambda: None)
    held = [stage.take("many") for _ in range(8)]
    threading.Timer(0.1, stage.may_end.set).start()
    began_s = time.monotonic()
    stage.close()
    assert time.monotonic() - began_s < WAIT_S / 2
    assert len(stage.read) < len(held)
