"""The engine's thread and requests whose client, or next stages, are behind: who is paused, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.wire import FailureKind
from stage_runtime.connectors.shm.connector import SharedMemoryConnector
from stage_runtime.engine_loop.jobs import (
    Cancel,
    Finished,
    HoldBack,
    Job,
    NextSegment,
    Outcome,
    OutputChunk,
    Parked,
    Pause,
    RequestFailed,
    Wake,
    WindowUpdate,
    Work,
)
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.engines.base import EngineOutput, StageRequest
from stage_runtime.engines.echo.engine import EchoEngine
from tests.support.replica_engine import ScriptedEngine


class PausingEngine(ScriptedEngine):
    """Writes down what it is told; ``fragile``: it can't be told."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[tuple[str, bool]] = []
        self.fragile = False
        #: What ``pause`` returns.
        self.puts_aside: bool | None = None

    def update(self, request: StageRequest) -> None:
        self.add(request)

    def pause(self, key: str, paused: bool) -> bool | None:
        if self.fragile:
            raise KeyError(key)
        self.pauses.append((key, paused))
        return self.puts_aside


class Bench:
    """One loop of stage 0 before stage 1, with room for two pieces between them."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self.engine, self.now_s = engine, 0.0
        outgoing = SharedMemoryConnector({"directory": str(folder), "shm_threshold_bytes": 0})
        self.said: list[Outcome] = []
        payloads = Payloads(0, {(0, 1): Edge("shm", outgoing, window=2)}, lambda: self.now_s)
        self.loop = EngineLoop(engine, payloads, {}, self.said.extend, lambda: self.now_s)

    def do(self, *jobs: Job) -> list[Outcome]:
        """One turn with these jobs; what it said."""
        self.said.clear()
        for job in jobs or (Wake(),):
            self.loop.jobs.put(job)
        self.loop.turn()
        return list(self.said)

    def put_out(self, *outputs: EngineOutput) -> list[Outcome]:
        self.engine.steps.append(list(outputs))
        return self.do()


def work(key: str = "a", prompt: str = "one two three four", deadline_s: float = 60.0, **fields: Any) -> Work:
    return Work(key, f"hub/{key}", key, 0, {"prompt": prompt}, {}, (), (1,), 0.0, deadline_s, **fields)


def piece(number: int) -> EngineOutput:
    return EngineOutput("a", handoff_piece={"n": number})


def words(outcomes: list[Outcome], key: str) -> str:
    return "".join(each.text for each in outcomes if isinstance(each, OutputChunk) and each.key == key)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, PausingEngine())


def test_the_engine_is_told_once_of_each_change(bench: Bench) -> None:
    bench.do(work())
    bench.do(Pause("a", True), Pause("a", True))
    bench.do(Pause("a", False), Pause("a", False))
    assert bench.engine.pauses == [("a", True), ("a", False)]


def test_a_request_is_paused_as_long_as_anybody_is_behind(bench: Bench) -> None:
    """1. the next stage is behind, then the client, too; 2. the stage catches up, and the engine hears nothing of it
    3. the client does: the engine goes on; 4. the other way round, the same
    """
    bench.do(work(stream_to=(1,)))
    bench.put_out(piece(0), piece(1))
    bench.do(Pause("a", True))
    bench.do(WindowUpdate("a", 1, 2))
    assert bench.engine.pauses == [("a", True)]
    bench.do(Pause("a", False))
    assert bench.engine.pauses == [("a", True), ("a", False)]
    bench.do(Pause("a", True))
    bench.put_out(piece(2), piece(3))
    bench.do(Pause("a", False))
    assert bench.engine.pauses[2:] == [("a", True)]
    bench.do(WindowUpdate("a", 1, 4))
    assert bench.engine.pauses[3:] == [("a", False)]


def test_what_the_engine_puts_aside_for_its_client_rests(bench: Bench) -> None:
    """1. the next stage is behind: that passes soon; 2. the client is, too: others may have its slot
    3. the client catches up, and the slot is taken again although the next stage is still behind
    4. both ways at once, then its end: nothing more is said, nor remembered
    """
    bench.engine.puts_aside = True
    bench.do(work(stream_to=(1,)))
    assert not any(isinstance(each, Parked) for each in bench.put_out(piece(0), piece(1)))
    assert bench.do(Pause("a", True)) == [Parked("a", True)]
    assert bench.do(Pause("a", True)) == []
    assert bench.do(Pause("a", False)) == [Parked("a", False)]
    assert bench.do(WindowUpdate("a", 1, 2)) == []
    assert bench.do(Pause("a", True)) == [Parked("a", True)]
    (end,) = bench.put_out(EngineOutput("a", finish_reason="stop"))
    assert isinstance(end, Finished)
    pauses = bench.loop._pauses
    assert (pauses._set_aside, pauses._parked_keys, pauses._reasons, pauses._in_engine) == (set(), set(), {}, {})


def test_what_is_held_back_for_its_hub_keeps_its_slot(bench: Bench) -> None:
    """1. the hub is behind: the engine pauses, and the slot stays; 2. the client is, too: now others get the slot
    3. the hub catches up: the client is still behind; 4. the client does: the engine goes on
    """
    bench.engine.puts_aside = True
    bench.do(work())
    assert bench.do(HoldBack("a", True), HoldBack("b", True)) == []
    assert bench.engine.pauses == [("a", True)]
    assert bench.do(Pause("a", True)) == [Parked("a", True)]
    assert bench.do(HoldBack("a", False)) == []
    assert bench.engine.pauses == [("a", True)]
    assert bench.do(Pause("a", False)) == [Parked("a", False)]
    assert bench.engine.pauses == [("a", True), ("a", False)]


def test_what_the_engine_does_not_put_aside_keeps_its_slot(bench: Bench) -> None:
    bench.do(work())
    assert bench.do(Pause("a", True)) == []
    assert bench.do(Pause("a", False)) == []


def test_what_is_over_or_was_never_here_is_not_paused(bench: Bench) -> None:
    bench.do(work())
    bench.put_out(EngineOutput("a", finish_reason="stop"))
    bench.do(Pause("a", True), Pause("b", True))
    assert bench.engine.pauses == []
    assert not bench.loop._pauses._reasons


def test_the_next_segment_of_a_paused_request_is_paused_too(bench: Bench) -> None:
    """1. its client falls behind when the first segment has ended: nothing is to be paused now
    2. the next segment is, as soon as the engine has it
    """
    bench.do(work(segment=0))
    bench.put_out(EngineOutput("a", text="hi", finish_reason="stop"))
    bench.do(Pause("a", True))
    assert bench.engine.pauses == []
    bench.do(NextSegment("a", 1, {"prompt": "more"}, ()))
    assert bench.engine.pauses == [("a", True)]
    bench.do(Pause("a", False))
    assert bench.engine.pauses[1:] == [("a", False)]


def test_the_next_segment_of_a_client_that_is_behind_rests_and_goes_on(bench: Bench) -> None:
    bench.engine.puts_aside = True
    bench.do(work(segment=0))
    bench.put_out(EngineOutput("a", text="hi", finish_reason="stop"))
    bench.do(Pause("a", True))
    assert bench.do(NextSegment("a", 1, {"prompt": "more"}, ())) == [Parked("a", True)]
    assert bench.engine.aborted == []
    assert bench.do(Pause("a", False)) == [Parked("a", False)]


def test_an_engine_that_fails_to_be_paused_fails_that_request_only(bench: Bench) -> None:
    bench.do(work("a"), work("b"))
    bench.engine.fragile = True
    (end,) = bench.do(Pause("a", True))
    assert isinstance(end, RequestFailed)
    assert (end.key, end.kind) == ("a", FailureKind.ENGINE)
    assert bench.engine.aborted == ["a"]
    assert words(bench.put_out(EngineOutput("b", text="fine")), "b") == "fine"


def test_an_engine_that_can_not_be_paused_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ScriptedEngine())
    bench.do(work())
    bench.do(Pause("a", True))
    assert words(bench.put_out(EngineOutput("a", text="on")), "a") == "on"


# ---- the echo engine


@pytest.fixture
def echo(tmp_path: Path) -> Bench:
    return Bench(tmp_path, EchoEngine(StageConfig(stage_id=0, engine="echo", engine_args={"capacity": 2})))


def test_a_paused_request_says_nothing_is_no_stall_and_holds_up_nobody(echo: Bench) -> None:
    """1. one of two is paused: the other is served to its end; 2. the engine then has nothing to do, and is not busy
    3. the first goes on where it was
    """
    first = echo.do(work("a"), work("b"))
    first += echo.do(Pause("a", True))
    while not any(isinstance(each, Finished) for each in first):
        first += echo.do()
    assert words(first, "b") == "one two three four"
    assert words(first, "a") == "one "
    assert echo.do() == []
    assert not echo.loop.progress.busy
    rest = echo.do(Pause("a", False))
    while not isinstance(rest[-1], Finished):
        rest += echo.do()
    assert words(rest, "a") == "two three four"


@pytest.mark.parametrize("late", [False, True])
def test_a_paused_request_is_aborted_and_runs_out_of_time_at_once(echo: Bench, late: bool) -> None:
    echo.do(work("a", deadline_s=10.0))
    echo.do(Pause("a", True))
    if late:
        echo.now_s = 10.0
        (end,) = echo.do()
        assert isinstance(end, RequestFailed)
        assert end.kind is FailureKind.DEADLINE
    else:
        (end,) = echo.do(Cancel("a"))
        assert isinstance(end, Finished)
        assert end.finish_reason == "abort"
    echo.do()
    assert len(echo.loop) == 0
    assert not echo.engine.has_unfinished()
    assert (echo.loop._pauses._reasons, echo.loop._pauses._in_engine) == ({}, {})
