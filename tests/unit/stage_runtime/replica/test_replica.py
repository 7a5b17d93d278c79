"""What a replica publishes and tells when its engine can't be loaded or raises in a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from omni_discovery.records.schema import ReplicaStatus
from stage_runtime.config import ReplicaConfig
from stage_runtime.engines.echo.engine import EchoEngine
from stage_runtime.replica.replica import Replica
from stage_runtime.status_pipe import Exiting, Loading, StatusMessage, Up
from stage_runtime.supervisor.restarts import EXIT_FAILED
from tests.support.hub_fakes import ONE_STAGE, deploy_of


class _Registration:
    """Remembers what is published."""

    def __init__(self, *_: Any, status: ReplicaStatus, fields: dict[str, Any], **__: Any) -> None:
        self.published: list[dict[str, Any]] = [{"status": status, **fields}]
        self.awaited_hubs: frozenset[str] = frozenset()

    def update_info(self, status: ReplicaStatus | None = None, queue_length: int | None = None) -> None:
        self.published.append({"status": status})

    def describe(self, **fields: Any) -> None:
        self.published.append(fields)

    def close(self) -> None:
        """Withdrawn."""

    @property
    def now(self) -> dict[str, Any]:
        return {name: value for each in self.published for name, value in each.items() if value is not None}


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def run(**config: str) -> tuple[int, _Registration, list[StatusMessage]]:
    """A replica's life: its exit code, its record, and what it told its supervisor."""
    made: list[_Registration] = []
    told: list[StatusMessage] = []

    def connect(*places: Any, **named: Any) -> _Registration:
        made.append(_Registration(*places, **named))
        return made[-1]

    settings = ReplicaConfig(stage_id=0, endpoints="127.0.0.1:1", namespace="default", **config)
    code = Replica(settings, deploy_of(ONE_STAGE), connect, write_status=told.append).run()
    return code, made[0], told


def test_too_little_memory_while_loading_is_in_the_record_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another start may find more, so it is no matter of configuration. The log has one line and no traceback."""

    def load(engine: EchoEngine, report: Any) -> None:
        report("loading", 0.4)
        raise MemoryError("9 GiB")

    monkeypatch.setattr(EchoEngine, "load", load)
    code, registration, told = run()
    assert code == EXIT_FAILED
    now = registration.now
    assert now["status"] is ReplicaStatus.ERROR
    assert now["reason"].startswith("the engine died: could not be loaded: too little memory: MemoryError: 9 GiB; give")
    assert told == [Loading("loading"), Exiting(now["reason"])]
    assert "Traceback" not in caplog.text
    assert now["phase"] == "loading"


def test_an_engine_that_raises_in_a_step_says_so_in_the_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. it was up; 2. a step runs out of memory; 3. error, with the reason; of that, the log has the traceback"""

    def step(engine: EchoEngine) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(EchoEngine, "has_unfinished", lambda engine: True)
    monkeypatch.setattr(EchoEngine, "step", step)
    code, registration, told = run()
    assert code == EXIT_FAILED
    now = registration.now
    assert now["status"] is ReplicaStatus.ERROR
    assert now["reason"].startswith("the engine died: too little memory: RuntimeError: CUDA out of memory. Tried")
    assert told == [Loading("loading"), Up(), Exiting(now["reason"])]
    assert "Traceback" in caplog.text


def test_why_the_one_before_ended_is_in_the_record_until_this_one_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(engine: EchoEngine) -> Any:
        raise RuntimeError

    monkeypatch.setattr(EchoEngine, "has_unfinished", lambda engine: True)
    monkeypatch.setattr(EchoEngine, "step", step)
    _, registration, _ = run(former_end="it was ended by SIGSEGV")
    first, *later = registration.published
    assert (first["status"], first["reason"]) == (
        ReplicaStatus.STARTING,
        "the process before it: it was ended by SIGSEGV",
    )
    assert next(each["reason"] for each in later if each.get("phase") == "ready") == ""
