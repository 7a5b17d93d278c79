"""The engine's thread: every accepted request ends exactly once, whatever the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_discovery.wire import FailureKind, PayloadRef
from stage_runtime.config import EngineDeadError
from stage_runtime.connectors.shm.connector import SharedMemoryConnector
from stage_runtime.engine_loop.jobs import (
    Call,
    Called,
    Cancel,
    Finished,
    Outcome,
    OutputChunk,
    ReleaseHub,
    ReleasePayload,
    RequestFailed,
    Wake,
    Work,
)
from stage_runtime.engine_loop.loop import EngineLoop, Progress
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.engines.base import EngineOutput, StageRequest
from tests.support.panics import panic
from tests.support.replica_engine import ScriptedEngine, at_once


class Time:
    """A clock that the test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """One loop of stage 1 between stage 0 and stage 2, and everything that it said."""

    def __init__(self, folder: Path, keep_s: float = 900.0) -> None:
        self.engine = ScriptedEngine()
        self.clock = Time()
        self.outcomes: list[Outcome] = []
        self.folder = folder
        config = {"directory": str(folder), "shm_threshold_bytes": 0}
        self.incoming, self.outgoing = SharedMemoryConnector(config), SharedMemoryConnector(config)
        edges = {(0, 1): Edge("shm", self.incoming), (1, 2): Edge("shm", self.outgoing)}
        self.payloads = Payloads(1, edges, self.clock, keep_s)
        self.loop = EngineLoop(
            self.engine, self.payloads, {"temperature": 0.5}, self.outcomes.extend, self.clock, at_once
        )

    def submit(self, key: str, prompt: str = "hi", **fields: Any) -> None:
        self.loop.jobs.put(
            Work(
                **{
                    "key": key,
                    "owner": f"hub/{key}",
                    "request_id": key,
                    "attempt": 0,
                    "inputs": {"prompt": prompt},
                    "params": {},
                    "payloads": (),
                    "next_stages": (),
                    "accepted_at_s": self.clock(),
                    "deadline_s": self.clock() + 60.0,
                    **fields,
                }
            )
        )

    def turn(self) -> list[Outcome]:
        """One turn, and what it said."""
        self.outcomes.clear()
        if not self.engine.has_unfinished():
            self.loop.jobs.put(Wake())
        self.loop.turn()
        return list(self.outcomes)

    def files(self) -> int:
        return len(list(self.folder.iterdir()))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_output_streams_out_and_the_end_carries_usage_and_timings(bench: Bench) -> None:
    """1. a request waits 1 s before the engine's thread takes it
    2. its first word comes 2 s later, its last another 3 s later
    """
    bench.submit("a")
    bench.clock.now_s += 1.0
    bench.turn()
    bench.clock.now_s += 2.0
    bench.engine.steps.append([EngineOutput("a", text="hello ", token_ids=(1,))])
    assert bench.turn() == [OutputChunk("a", "text", text="hello ", token_ids=(1,))]
    bench.clock.now_s += 3.0
    bench.engine.steps.append(
        [EngineOutput("a", text="you", token_ids=(2,), finish_reason="stop", usage={"completion_tokens": 2})]
    )
    piece, end = bench.turn()
    assert isinstance(piece, OutputChunk)
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage) == ("stop", {"completion_tokens": 2})
    assert end.timings_s == pytest.approx({"queue": 1.0, "first_output": 3.0, "generate": 5.0, "transfer": 0.0})


def test_a_picture_comes_as_an_attachment(bench: Bench) -> None:
    bench.submit("a")
    bench.engine.steps.append([EngineOutput("a", image_png=b"png", finish_reason="stop")])
    picture, end = bench.turn()
    assert picture == OutputChunk("a", "image", mime="image/png", attachment=b"png")
    assert isinstance(end, Finished)


def test_the_stages_defaults_hold_where_the_client_said_nothing(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("b", params={"temperature": 1.0, "seed": 3}, trace="00-7-7-01")
    bench.turn()
    assert bench.engine.requests["a"].params == {"temperature": 0.5}
    assert bench.engine.requests["b"].params == {"temperature": 1.0, "seed": 3}
    assert [bench.engine.requests[key].trace for key in "ab"] == ["", "00-7-7-01"]


def test_a_refused_request_breaks_alone(bench: Bench) -> None:
    bench.submit("bad", prompt="refuse me")
    bench.submit("good")
    assert bench.turn() == [RequestFailed("bad", FailureKind.INVALID, "no")]
    assert list(bench.engine.requests) == ["good"]


def test_a_cancelled_request_ends_with_abort_and_once(bench: Bench) -> None:
    """1. a request is cancelled twice; 2. the engine's late words about it are dropped."""
    bench.submit("a")
    bench.turn()
    bench.loop.jobs.put(Cancel("a"))
    bench.loop.jobs.put(Cancel("a"))
    ends = bench.turn()
    assert [(end.key, end.finish_reason) for end in ends if isinstance(end, Finished)] == [("a", "abort")]
    bench.engine.steps.append([EngineOutput("a", text="late", finish_reason="stop")])
    assert bench.turn() == []


def test_a_request_past_its_deadline_is_stopped_and_says_so(bench: Bench) -> None:
    """1. a has 10 s left, b waited until its deadline had passed
    2. b never reaches the engine; 10 s later a is stopped
    """
    bench.submit("a", deadline_s=bench.clock() + 10.0)
    bench.submit("b", deadline_s=bench.clock())
    (late,) = bench.turn()
    assert isinstance(late, RequestFailed)
    assert (late.key, late.kind) == ("b", FailureKind.DEADLINE)
    bench.clock.now_s += 10.0
    stopped, *rest = bench.turn()
    assert isinstance(stopped, RequestFailed)
    assert (stopped.key, stopped.kind) == ("a", FailureKind.DEADLINE)
    assert bench.engine.aborted == ["a"]
    assert rest == []


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error"),
        MemoryError(),
        pytest.param(panic("an index out of bounds"), marks=pytest.mark.attack("L1")),
    ],
)
def test_an_engine_that_raises_takes_all_requests_with_it_but_says_so(
    bench: Bench, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """1. two requests run, a third waits in the queue; 2. the engine raises, and the log names those that ran
    3. all three end with the reason
    """
    bench.submit("a")
    bench.submit("b")
    bench.turn()
    bench.engine.steps.append(error)
    bench.outcomes.clear()
    with pytest.raises(EngineDeadError, match=type(error).__name__):
        bench.loop.turn()
    assert caplog.messages == ["engine.died requests=a,b"]
    bench.submit("c")
    bench.loop.fail_all(FailureKind.ENGINE, "dead")
    broken = [outcome for outcome in bench.outcomes if isinstance(outcome, RequestFailed)]
    assert sorted((end.key, end.kind) for end in broken) == [(key, FailureKind.ENGINE) for key in "abc"]


@pytest.mark.attack("L1")
def test_a_panic_as_a_request_is_added_fails_that_request_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A panic of a library in Rust is no Exception, and ended the replica."""
    bench.submit("a")
    bench.turn()
    add = bench.engine.add

    def add_or_panic(request: StageRequest) -> None:
        if request.key == "bad":
            raise panic("unclosed group")
        add(request)

    monkeypatch.setattr(bench.engine, "add", add_or_panic)
    bench.submit("bad")
    bench.submit("b")
    (failed,) = [outcome for outcome in bench.turn() if isinstance(outcome, RequestFailed)]
    assert (failed.key, failed.kind, failed.reason) == ("bad", FailureKind.ENGINE, "PanicException: unclosed group")
    assert set(bench.engine.requests) == {"a", "b"}
    assert caplog.messages == ["engine.add_failed request=bad"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit()])
def test_what_is_to_end_the_process_does(bench: Bench, error: BaseException) -> None:
    bench.submit("a")
    bench.turn()
    bench.engine.steps.append(error)
    with pytest.raises(type(error)):
        bench.loop.turn()
    assert len(bench.loop) == 1


def test_what_came_out_before_the_engine_raised_is_not_lost(bench: Bench) -> None:
    bench.submit("bad", prompt="refuse me")
    bench.submit("a")
    bench.engine.steps.append(RuntimeError())
    with pytest.raises(EngineDeadError):
        bench.loop.turn()
    assert [(end.key, end.kind) for end in bench.outcomes if isinstance(end, RequestFailed)] == [
        ("bad", FailureKind.INVALID),
        ("a", FailureKind.ENGINE),
    ]


def test_a_hand_off_is_kept_until_the_hub_releases_it(bench: Bench) -> None:
    """1. the stage hands over; 2. the next stage may fetch it as often as it must run; 3. the hub releases it."""
    bench.submit("a", next_stages=(2,))
    bench.engine.steps.append([EngineOutput("a", finish_reason="stop", handoff={"token_ids": np.arange(3)})])
    (end,) = bench.turn()
    assert isinstance(end, Finished)
    (ref,) = end.payloads
    assert (ref.from_stage, ref.to_stage, ref.connector) == (1, 2, "shm")
    for _ in range(2):
        got = bench.outgoing.get("1", "2", ref.key, dict(ref.metadata))
        assert got is not None
        assert got[0]["token_ids"].tolist() == [0, 1, 2]
    bench.loop.jobs.put(ReleasePayload("hub/a"))
    bench.turn()
    assert bench.files() == 0


def test_an_answer_that_hands_nothing_over_leaves_no_payload(bench: Bench) -> None:
    bench.submit("a", next_stages=(2,))
    bench.engine.steps.append([EngineOutput("a", finish_reason="stop", handoff=None)])
    (end,) = bench.turn()
    assert isinstance(end, Finished)
    assert end.payloads == ()


def test_a_hand_off_that_nobody_releases_goes_in_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep_s=100.0)
    bench.submit("a", next_stages=(2,))
    bench.engine.steps.append([EngineOutput("a", finish_reason="stop", handoff={"x": 1})])
    bench.turn()
    assert bench.files() == 1
    bench.clock.now_s += 101.0
    bench.turn()
    assert bench.files() == 0


def test_what_the_stage_before_left_reaches_the_engine(bench: Bench) -> None:
    _, size, metadata = bench.incoming.put("0", "1", "k", {"x": np.ones(2)})
    ref = PayloadRef(from_stage=0, to_stage=1, key="k", connector="shm", size_bytes=size, metadata=metadata or {})
    bench.submit("a", payloads=(ref,))
    bench.turn()
    assert bench.engine.requests["a"].payloads[0]["x"].tolist() == [1.0, 1.0]


def test_what_was_left_for_companions_reaches_an_engine_that_takes_it_and_no_other(bench: Bench) -> None:
    refs = []
    for role in ("", "negative"):
        _, size, metadata = bench.incoming.put("0", "1", f"k{role}", {"said": role})
        kept = {**(metadata or {}), "consume": False}
        ref = {"from_stage": 0, "to_stage": 1, "connector": "shm", "size_bytes": size, "metadata": kept}
        refs.append(PayloadRef(**ref, key=f"k{role}", role=role))
    bench.submit("a", payloads=tuple(refs))
    (refused,) = bench.turn()
    assert isinstance(refused, RequestFailed)
    assert (refused.kind, "takes no companions" in refused.reason) == (FailureKind.INVALID, True)
    bench.engine.takes_companions = True
    bench.submit("b", payloads=tuple(refs))
    bench.turn()
    assert bench.engine.requests["b"].payloads[0]["said"] == ""
    assert bench.engine.requests["b"].companions["negative"][0]["said"] == "negative"


@pytest.mark.parametrize(
    "ref",
    [
        PayloadRef(from_stage=0, to_stage=1, key="gone", connector="shm", size_bytes=1),
        PayloadRef(from_stage=0, to_stage=1, key="k", connector="other", size_bytes=1),
        PayloadRef(from_stage=3, to_stage=1, key="k", connector="shm", size_bytes=1),
        PayloadRef(from_stage=1, to_stage=2, key="k", connector="shm", size_bytes=1),
        PayloadRef(from_stage=0, to_stage=1, key="k", connector="shm", size_bytes=1, metadata={"inline": b"junk"}),
    ],
    ids=["gone", "other connector", "no edge", "not for us", "damaged"],
)
def test_a_hand_off_that_is_not_there_breaks_the_request_and_says_that_it_was_the_payload(
    bench: Bench, ref: PayloadRef
) -> None:
    bench.submit("a", payloads=(ref,))
    (end,) = bench.turn()
    assert isinstance(end, RequestFailed)
    assert end.kind is FailureKind.PAYLOAD


def test_progress_stands_still_while_the_engine_does(bench: Bench) -> None:
    """1. idle: not busy; 2. a step takes 100 s: busy, and the moment of the last progress is before it."""
    bench.turn()
    assert not bench.loop.progress.busy
    bench.submit("a")
    bench.turn()
    seen: list[tuple[bool, float]] = []

    def slow_step() -> list[EngineOutput]:
        bench.clock.now_s += 100.0
        seen.append((bench.loop.progress.busy, bench.clock() - bench.loop.progress.at_s))
        return []

    bench.engine.step = slow_step  # type: ignore[method-assign]
    bench.turn()
    assert seen == [(True, 100.0)]
    assert bench.loop.progress.at_s == bench.clock()


class Faulty(SharedMemoryConnector):
    """Raises what connectors of others may raise, wherever it is told to."""

    broken: frozenset[str] = frozenset()

    def put(self, *args: Any, **kwargs: Any) -> Any:
        return self._or_fail("put", super().put, *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        return self._or_fail("get", super().get, *args, **kwargs)

    def cleanup(self, *args: Any, **kwargs: Any) -> None:
        self._or_fail("cleanup", super().cleanup, *args, **kwargs)

    def _or_fail(self, name: str, act: Any, *args: Any, **kwargs: Any) -> Any:
        if name in self.broken:
            raise ZeroDivisionError(name)
        return act(*args, **kwargs)


@pytest.fixture
def faulty(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, keep_s=100.0)
    config = {"directory": str(tmp_path), "shm_threshold_bytes": 0}
    bench.incoming, bench.outgoing = Faulty(config), Faulty(config)
    edges = {(0, 1): Edge("shm", bench.incoming), (1, 2): Edge("shm", bench.outgoing)}
    bench.payloads = Payloads(1, edges, bench.clock, 100.0)
    bench.loop = EngineLoop(bench.engine, bench.payloads, {}, bench.outcomes.extend, bench.clock)
    return bench


class SlowToControl(ScriptedEngine):
    """Notes how its progress looks while a control call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Progress] = []
        self.loop: EngineLoop | None = None

    @property
    def controls(self) -> dict[str, Any]:
        return {"stop_profile": self._stop, "sleep": lambda: None, "is_sleeping": lambda: True}

    def _stop(self) -> str:
        assert self.loop is not None
        self.seen.append(self.loop.progress)
        return "written"


@pytest.fixture
def controlled(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.engine = engine = SlowToControl()
    bench.loop = engine.loop = EngineLoop(engine, bench.payloads, {}, bench.outcomes.extend, bench.clock)
    return bench


def test_a_control_call_runs_between_two_steps_and_does_not_count_as_standing_still(controlled: Bench) -> None:
    bench = controlled
    bench.submit("a")
    bench.loop.jobs.put(Call("#1", "stop_profile", (), {}, bench.clock() + 90.0))
    (called,) = bench.turn()
    assert isinstance(called, Called)
    assert (called.key, called.ok) == ("#1", True)
    assert isinstance(bench.engine, SlowToControl)
    assert bench.engine.seen == [Progress(busy=True, at_s=bench.clock() + 90.0)]
    assert bench.loop.progress.at_s == bench.clock()


def test_sleep_comes_after_the_last_request_that_was_there(controlled: Bench) -> None:
    bench = controlled
    bench.submit("a")
    bench.loop.jobs.put(Call("#1", "sleep", (), {}, bench.clock() + 90.0))
    assert bench.turn() == []
    bench.engine.steps.append([EngineOutput("a", finish_reason="stop")])
    finished, called = bench.turn()
    assert isinstance(finished, Finished)
    assert isinstance(called, Called)
    assert (called.ok, called.is_asleep) == (True, True)


def test_calls_of_an_engine_that_dies_are_answered_too(controlled: Bench) -> None:
    """One that waits for it, and one that the loop has not come to."""
    bench = controlled
    bench.submit("a")
    bench.loop.jobs.put(Call("#1", "sleep", (), {}, bench.clock() + 90.0))
    bench.turn()
    bench.loop.jobs.put(Call("#2", "sleep", (), {}, bench.clock() + 90.0))
    bench.outcomes.clear()
    bench.loop.fail_all(FailureKind.ENGINE, "it died")
    assert [outcome.key for outcome in bench.outcomes] == ["a", "#1", "#2"]
    assert not any(outcome.ok for outcome in bench.outcomes if isinstance(outcome, Called))


def hand_over(bench: Bench, key: str, owner: str = "") -> Outcome:
    bench.submit(key, next_stages=(2,), owner=owner or f"hub/{key}")
    bench.engine.steps.append([EngineOutput(key, finish_reason="stop", handoff={"x": 1})])
    (end,) = bench.turn()
    return end


def test_a_connector_that_raises_fails_the_request_that_used_it_and_no_other(faulty: Bench) -> None:
    """1. storing fails: that request breaks; 2. fetching fails: so does that one; 3. the next is served."""
    Faulty.broken = frozenset({"put"})
    end = hand_over(faulty, "a")
    assert isinstance(end, RequestFailed)
    assert (end.kind, "ZeroDivisionError" in end.reason) == (FailureKind.PAYLOAD, True)
    Faulty.broken = frozenset({"get"})
    ref = PayloadRef(from_stage=0, to_stage=1, key="k", connector="shm", size_bytes=1)
    faulty.submit("b", payloads=(ref,))
    (end,) = faulty.turn()
    assert isinstance(end, RequestFailed)
    assert (end.kind, "ZeroDivisionError" in end.reason) == (FailureKind.PAYLOAD, True)
    Faulty.broken = frozenset()
    assert isinstance(hand_over(faulty, "c"), Finished)


def test_a_connector_that_raises_as_it_cleans_up_is_counted_and_stops_nothing(faulty: Bench) -> None:
    """1. two hand-offs; 2. the release of one raises, the expiry of the other, too; 3. work goes on."""
    hand_over(faulty, "a")
    hand_over(faulty, "b")
    Faulty.broken = frozenset({"cleanup"})
    faulty.loop.jobs.put(ReleasePayload("hub/a"))
    faulty.turn()
    faulty.clock.now_s += 101.0
    faulty.turn()
    Faulty.broken = frozenset()
    assert faulty.payloads.failed_cleanups == 2
    assert isinstance(hand_over(faulty, "c"), Finished)


def test_all_that_a_hub_left_goes_with_it_and_nothing_of_another(bench: Bench) -> None:
    """The other's id begins with the same letters."""
    for key, owner in (("a", "hub/a"), ("b", "hub/b"), ("c", "hub-2/c")):
        hand_over(bench, key, owner)
    assert bench.files() == 3
    bench.loop.jobs.put(ReleaseHub("hub"))
    bench.turn()
    assert bench.files() == 1


def test_what_was_cancelled_hands_nothing_over_however_it_ends(bench: Bench) -> None:
    """1. a request is cancelled in the moment that the engine is through with it; 2. it leaves no payload behind."""
    bench.submit("a", next_stages=(2,))
    bench.turn()
    bench.engine.steps.append([EngineOutput("a", finish_reason="stop", handoff={"x": 1})])
    bench.loop.jobs.put(Cancel("a"))
    (end,) = bench.turn()
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.payloads, bench.files()) == ("abort", (), 0)


@pytest.mark.attack("Y6")
def test_the_engine_makes_a_step_between_requests_that_take_long_to_begin(bench: Bench) -> None:
    """1. one request is running, and four come that take 30 ms each to be begun
    2. two of them are begun before the next step, the others behind it
    """
    bench.submit("running")
    bench.turn()
    begin = bench.engine.add

    def begin_slowly(request: StageRequest) -> None:
        bench.clock.now_s += 0.03
        begin(request)

    bench.engine.add = begin_slowly  # type: ignore[method-assign]
    for number in range(4):
        bench.submit(f"slow{number}")
    bench.turn()
    assert len(bench.loop) == 3
    bench.turn()
    assert len(bench.loop) == 5
