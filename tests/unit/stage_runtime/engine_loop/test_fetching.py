"""Hand-offs are fetched beside the engine: a slow producer keeps nobody waiting but its own requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from omni_discovery.wire import FailureKind, PayloadRef
from stage_runtime.engine_loop.fetching import MAX_FETCHES, MAX_OF_PRODUCER, in_thread
from stage_runtime.engine_loop.jobs import (
    Cancel,
    Finished,
    Job,
    NextSegment,
    Outcome,
    PieceArrived,
    RequestFailed,
    SegmentEnded,
    TookPiece,
    Wake,
    Work,
)
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.engines.base import EngineOutput, StageRequest
from tests.support.recording_connector import RecordingConnector
from tests.support.replica_engine import ScriptedEngine


class Engine(ScriptedEngine):
    """Takes pieces and segments."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[tuple[str, Any]] = []

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        assert key in self.requests, "it is fed a request that it does not have"
        self.fed.append((key, piece))

    def update(self, request: StageRequest) -> None:
        self.requests[request.key] = request


class Bench:
    """A loop of stage 2 behind the stages 0 and 1. Fetches wait until the test runs them."""

    def __init__(self) -> None:
        self.engine, self.now_s = Engine(), 0.0
        self.connector = RecordingConnector()
        self.aside: list[Callable[[], None]] = []
        self.said: list[Outcome] = []
        edges = {(stage, 2): Edge("c", self.connector) for stage in (0, 1)}
        payloads = Payloads(2, edges, lambda: self.now_s)
        self.loop = EngineLoop(
            self.engine, payloads, {}, self.said.extend, lambda: self.now_s, run_aside=self.aside.append
        )

    def do(self, *jobs: Job) -> list[Outcome]:
        """One turn with these jobs; what it said."""
        self.said.clear()
        for job in jobs or (Wake(),):
            self.loop.jobs.put(job)
        self.loop.turn()
        return list(self.said)

    def fetch_all(self) -> list[Outcome]:
        """All fetches that were begun come to their end; what is said of that."""
        due, self.aside[:] = list(self.aside), []
        for run in due:
            run()
        return self.do()


def ref(port: int = 1, from_stage: int = 0) -> PayloadRef:
    metadata = {"source_host": "10.0.0.1", "source_port": port}
    return PayloadRef(from_stage=from_stage, to_stage=2, key=f"k{port}", connector="c", size_bytes=1, metadata=metadata)


def work(key: str, *refs: PayloadRef, **fields: Any) -> Work:
    return Work(key, f"hub/{key}", key, 0, {"prompt": "hi"}, {}, refs, (), 0.0, 60.0, **fields)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.attack("K1")
def test_others_reach_the_engine_while_a_hand_off_is_on_its_way(bench: Bench) -> None:
    """1. one that waits for its hand-off, and one that needs none; 2. the hand-off comes"""
    assert bench.do(work("slow", ref()), work("other")) == []
    assert list(bench.engine.requests) == ["other"]
    assert len(bench.loop) == 2
    assert bench.fetch_all() == []
    assert bench.engine.requests["slow"].payloads == {0: {"x": 1}}


@pytest.mark.attack("K1")
def test_a_slow_producer_takes_four_threads_and_others_go_past_it(bench: Bench) -> None:
    bench.do(*(work(f"slow{number}", ref(1)) for number in range(30)), work("well", ref(2)))
    assert len(bench.aside) == MAX_OF_PRODUCER + 1
    *slow, well = bench.aside
    well()
    bench.do()
    assert list(bench.engine.requests) == ["well"]
    slow[0]()
    bench.do()
    assert len(bench.aside) == MAX_OF_PRODUCER + 2
    while len(bench.engine.requests) < 31:
        bench.fetch_all()
    assert [key for key in bench.engine.requests if key != "well"] == [f"slow{number}" for number in range(30)]


def test_there_are_no_more_threads_than_that(bench: Bench) -> None:
    bench.do(*(work(f"r{number}", ref(number)) for number in range(1, 101)))
    assert len(bench.aside) == MAX_FETCHES
    while len(bench.engine.requests) < 100:
        assert len(bench.aside) <= MAX_FETCHES
        bench.fetch_all()


@pytest.mark.attack("P33")
def test_producers_that_are_slow_by_many_addresses_leave_threads_to_others(bench: Bench) -> None:
    """1. sixteen fetches of four addresses take all threads, and long; 2. others get theirs all the same; 3. from then
    on the four have one thread each, and eight in all.
    """
    bench.do(*(work(f"slow{number}", ref(number % 4 + 1)) for number in range(40)), work("well", ref(9)))
    assert len(bench.aside) == MAX_FETCHES
    bench.now_s = 0.6
    bench.do()
    assert len(bench.aside) == MAX_FETCHES + 1
    bench.aside.pop()()
    bench.do()
    assert list(bench.engine.requests) == ["well"]
    slow, bench.aside[:] = list(bench.aside), []
    bench.now_s = 5.0
    for run in slow:
        run()
    bench.do(*(work(f"more{number}", ref(number + 20)) for number in range(12)))
    assert len(bench.aside) == 4 + 12


def test_a_producer_that_was_slow_once_is_as_good_as_others_after_its_next_fetch(bench: Bench) -> None:
    bench.do(work("a", ref(1)))
    bench.now_s = 1.0
    bench.fetch_all()
    bench.do(*(work(f"b{number}", ref(1)) for number in range(9)))
    assert len(bench.aside) == 1
    bench.fetch_all()
    assert len(bench.aside) == MAX_OF_PRODUCER


def test_one_that_is_cancelled_ends_at_once_and_never_reaches_the_engine(bench: Bench) -> None:
    bench.do(work("a", ref()), *(work(f"b{number}", ref()) for number in range(8)))
    for key in ["a", *(f"b{number}" for number in range(8))]:
        (end,) = bench.do(Cancel(key))
        assert isinstance(end, Finished)
        assert (end.key, end.finish_reason) == (key, "abort")
    assert len(bench.loop) == 0
    assert bench.fetch_all() == []
    assert not bench.engine.requests
    assert not bench.aside, "nothing is fetched for requests that have ended"


def test_the_deadline_holds_meanwhile(bench: Bench) -> None:
    bench.do(work("a", ref()))
    bench.now_s = 61.0
    (end,) = bench.do()
    assert isinstance(end, RequestFailed)
    assert end.kind is FailureKind.DEADLINE
    assert bench.fetch_all() == []
    assert not bench.engine.requests


def test_what_cant_be_read_fails_its_request_alone_and_names_the_stage(bench: Bench) -> None:
    bench.do(work("a", ref()), work("b"))
    bench.connector.holds = OSError("reset")
    (end,) = bench.fetch_all()
    assert isinstance(end, RequestFailed)
    assert (end.key, end.kind, end.from_stage) == ("a", FailureKind.PAYLOAD, 0)
    assert list(bench.engine.requests) == ["b"]
    assert len(bench.loop) == 1


def test_pieces_wait_until_the_engine_has_the_request(bench: Bench) -> None:
    """1. the whole hand-off of stage 1 and a piece of stage 0 are on their way, and the piece comes first
    2. the engine gets the request, and then the piece
    """
    bench.do(work("a", ref(2, from_stage=1), stream_from=(0,)), PieceArrived("a", 0, 0, ref(), False))
    whole, *pieces = bench.aside
    for run in pieces:
        run()
    assert bench.do() == []
    assert not bench.engine.fed
    whole()
    bench.aside.clear()
    said = bench.do() + bench.fetch_all()
    assert said == [TookPiece("a", 0, 0)]
    assert bench.engine.fed == [("a", {"x": 1})]


def test_pieces_are_fed_in_order_however_long_each_takes(bench: Bench) -> None:
    bench.do(work("a", stream_from=(0,)))
    said = bench.do(*(PieceArrived("a", 0, number, ref(number), False) for number in range(5)))
    for number in range(5):
        assert len(bench.aside) == 1
        bench.connector.holds = {"n": number}
        said += bench.fetch_all()
    assert said == [TookPiece("a", 0, number) for number in range(5)]
    assert [piece["n"] for _, piece in bench.engine.fed] == list(range(5))


def test_a_piece_that_cant_be_read_ends_its_request(bench: Bench) -> None:
    bench.do(work("a", stream_from=(0,)), PieceArrived("a", 0, 0, ref(), False))
    bench.connector.holds = OSError("reset")
    (end,) = bench.fetch_all()
    assert isinstance(end, RequestFailed)
    assert (end.kind, end.from_stage) == (FailureKind.PAYLOAD, 0)
    assert bench.engine.aborted == ["a"]
    assert len(bench.loop) == 0


def test_a_further_segment_waits_for_its_hand_off_and_ends_with_it(bench: Bench) -> None:
    bench.do(work("a", segment=0))
    bench.engine.steps.append([EngineOutput("a", finish_reason="stop")])
    assert [type(each) for each in bench.do()] == [SegmentEnded]
    bench.do(NextSegment("a", 1, {"prompt": "more"}, (ref(),)))
    assert "a" not in bench.engine.requests
    bench.connector.holds = OSError("reset")
    (end,) = bench.fetch_all()
    assert isinstance(end, RequestFailed)
    assert bench.engine.aborted == ["a"]
    assert len(bench.loop) == 0


def test_a_dead_engine_fails_what_is_being_fetched_too(bench: Bench) -> None:
    bench.do(work("a", ref()))
    bench.said.clear()
    bench.loop.fail_all(FailureKind.ENGINE, "gone")
    assert [type(each) for each in bench.said] == [RequestFailed]
    assert bench.fetch_all() == []


def test_without_a_thread_the_request_fails_and_no_producer_is_named(bench: Bench) -> None:
    def refuse(_: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    bench.loop._fetches._run_aside = refuse
    (end,) = bench.do(work("a", ref()))
    assert isinstance(end, RequestFailed)
    assert (end.kind, end.from_stage) == (FailureKind.PAYLOAD, None)
    assert "can't start new thread" in end.reason


def test_what_travels_in_its_reference_needs_no_thread(bench: Bench) -> None:
    bench.connector.inline = True
    at_hand = PayloadRef(from_stage=0, to_stage=2, key="k", connector="c", size_bytes=1)
    bench.do(work("a", at_hand))
    assert bench.engine.requests["a"].payloads == {0: {"x": 1}}
    # An address, or the parameters of a KV cache, may have to be looked up in the registry.
    bench.do(work("b", ref()))
    assert len(bench.aside) == 1


def test_the_engines_thread_is_another_one() -> None:
    import threading

    names, done = [], threading.Event()

    def run() -> None:
        names.append(threading.current_thread().name)
        done.set()

    in_thread(run)
    assert done.wait(30.0)
    assert names == ["fetch"]
