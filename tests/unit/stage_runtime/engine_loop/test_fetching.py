"""Hand-offs are fetched beside the engine: a slow producer keeps nobody waiting but its own requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from omni_discovery.wire import FailureKind, PayloadRef
from stage_runtime.config import PayloadError
from stage_runtime.engine_loop.fetching import (
    GIVE_UP_S,
    GOOD_S,
    LONG_S,
    MAX_FETCHES,
    MAX_OF_GOOD_AT_ONCE,
    MAX_OF_OTHERS,
    MAX_OF_PRODUCER,
    MAX_OF_SLOW,
    in_thread,
)
from stage_runtime.engine_loop.jobs import (
    Cancel,
    Finished,
    HandOffs,
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

    def fetch_all(self, took_s: float = 0.0) -> list[Outcome]:
        """All fetches that were begun come to their end; what is said of that. ``took_s``: how long each took."""
        due, self.aside[:] = list(self.aside), []
        for run in due:
            self.fetch(run, took_s)
        return self.do()

    def fetch(self, run: Callable[[], None], took_s: float) -> None:
        """One fetch comes to its end, after so many seconds."""

        def let_time_pass() -> None:
            self.now_s += took_s

        self.connector.on_get = let_time_pass
        run()


def ref(port: int = 1, from_stage: int = 0) -> PayloadRef:
    metadata = {"source_host": "10.0.0.1", "source_port": port}
    return PayloadRef(from_stage=from_stage, to_stage=2, key=f"k{port}", connector="c", size_bytes=1, metadata=metadata)


def work(key: str, *refs: PayloadRef, until_s: float = 60.0, **fields: Any) -> Work:
    return Work(key, f"hub/{key}", key, 0, {"prompt": "hi"}, {}, refs, (), 0.0, until_s, **fields)


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
    bench.fetch_all(took_s=1.0)
    bench.do(*(work(f"b{number}", ref(1)) for number in range(9)))
    assert len(bench.aside) == 1
    bench.fetch_all()
    assert len(bench.aside) == MAX_OF_PRODUCER


@pytest.mark.attack("P33")
def test_a_fetch_is_as_long_as_its_thread_takes_however_long_the_engines_steps_are(bench: Bench) -> None:
    """1. four fetches end at once, in a step of a second; 2. all of the next four begin after it"""
    bench.do(*(work(f"r{number}", ref(1)) for number in range(12)))
    for run in bench.aside:
        run()
    bench.aside.clear()
    bench.now_s = 1.0
    bench.do()
    assert len(bench.engine.requests) == MAX_OF_PRODUCER
    assert len(bench.aside) == MAX_OF_PRODUCER


def test_a_producer_is_slow_while_one_of_its_fetches_takes_long(bench: Bench) -> None:
    bench.do(work("a", ref(1)))
    (slow,) = bench.aside
    bench.aside.clear()
    bench.now_s = LONG_S
    bench.do(*(work(f"more{number}", ref(1)) for number in range(9)))
    assert not bench.aside
    bench.fetch(slow, took_s=0.0)
    bench.do()
    assert len(bench.aside) == MAX_OF_PRODUCER, "it was the thread that did not begin"


def test_a_slow_copy_from_shared_memory_slows_nobody_of_its_stage(bench: Bench) -> None:
    """A hand-off that names no address tells its stage only."""
    copy = PayloadRef(from_stage=0, to_stage=2, key="k", connector="c", size_bytes=1)
    bench.do(work("a", copy), work("late", copy))
    first, _late = bench.aside
    bench.aside.clear()
    bench.fetch(first, took_s=0.6)
    bench.do(*(work(f"b{number}", copy) for number in range(9)))
    assert len(bench.aside) == MAX_OF_PRODUCER - 1


class Silent:
    """Producers at fresh addresses, whose hand-offs do not come."""

    def __init__(self, bench: Bench, key: str | None = None) -> None:
        self._bench, self._key, self._count = bench, key, 0
        self.runs: list[Callable[[], None]] = []

    def flood(self, count: int) -> None:
        """So many more fetches are wanted, and time passes until no further one begins."""
        refs = [ref(1000 + number) for number in range(self._count, self._count + count)]
        refs = [each if self._key is None else msgspec.structs.replace(each, key=self._key) for each in refs]
        self._bench.do(*(work(f"silent{self._count + at}", each, until_s=9999.0) for at, each in enumerate(refs)))
        self._bench.now_s += LONG_S
        self._bench.do()
        self._count += count
        self.runs += self._bench.aside
        self._bench.aside.clear()


@pytest.mark.attack("P33")
def test_fresh_addresses_in_dozens_leave_threads_to_producers_that_were_good(bench: Bench) -> None:
    """1. a hand-off of one producer comes; 2. fetches of 100 others take all threads that they may, and long
    3. the fetches of that one begin at once, all four that it may have
    """
    bench.do(work("a", ref(1)))
    bench.fetch_all()
    silent = Silent(bench)
    silent.flood(100)
    assert len(silent.runs) == MAX_OF_OTHERS
    bench.do(*(work(f"b{number}", ref(1)) for number in range(6)))
    assert len(bench.aside) == MAX_OF_PRODUCER
    bench.fetch_all()
    assert "b3" in bench.engine.requests


@pytest.mark.attack("P33")
def test_good_producers_have_places_of_their_own_among_those_that_have_just_begun(bench: Bench) -> None:
    bench.do(*(work(f"a{number}", ref(number)) for number in range(2)))
    bench.fetch_all()
    bench.do(*(work(f"new{number}", ref(1000 + number)) for number in range(MAX_FETCHES)))
    bench.do(*(work(f"b{number}", ref(number % 2)) for number in range(8)))
    assert len(bench.aside) == MAX_FETCHES + MAX_OF_GOOD_AT_ONCE


@pytest.mark.attack("P33")
def test_a_producer_is_good_for_minutes_and_then_as_unknown_as_others(bench: Bench) -> None:
    bench.do(work("a", ref(1)))
    bench.fetch_all()
    bench.now_s = GOOD_S
    Silent(bench).flood(100)
    bench.do(work("b", ref(1), until_s=9999.0))
    assert not bench.aside


@pytest.mark.attack("P33")
@pytest.mark.parametrize("key", [None, "same"])
def test_late_fetches_of_which_there_are_too_many_are_given_up_while_others_wait(bench: Bench, key: str | None) -> None:
    """1. fetches of 24 producers take long, and nothing ever came from them; while nobody waits, they may go on
    2. another producer's begins as soon as the oldest have been given up; they were cancelled, and their requests fail
    3. those that end later change nothing; twelve go on
    """
    silent = Silent(bench, key)
    silent.flood(12)
    silent.flood(12)
    assert len(silent.runs) == MAX_OF_OTHERS
    bench.now_s = GIVE_UP_S + 5.0
    assert bench.do() == []
    ends = bench.do(work("new", ref(1)))
    assert not bench.aside, "a cancelled fetch has its thread until it ends"
    assert [end.key for end in ends] == [f"silent{number}" for number in range(12)]
    for end in ends:
        assert isinstance(end, RequestFailed)
        assert (end.kind, end.from_stage) == (FailureKind.PAYLOAD, 0)
        assert "others wait" in end.reason
    assert bench.connector.cancelled == [key or f"k{1000 + number}" for number in range(12)]
    bench.connector.holds = OSError("cancelled")
    for run in silent.runs[:12]:
        run()
    assert bench.do() == []
    bench.connector.holds = {"x": 1}
    bench.fetch_all()
    assert list(bench.engine.requests) == ["new"]
    assert len(bench.loop) == 1 + 12


@pytest.mark.attack("P33")
def test_a_producer_from_which_anything_ever_came_is_not_given_up(bench: Bench) -> None:
    bench.do(*(work(f"a{number}", ref(1000 + number)) for number in range(16)))
    bench.fetch_all()
    bench.now_s = GOOD_S
    silent = Silent(bench)
    silent.flood(16)
    silent.flood(8)
    assert len(silent.runs) == MAX_OF_OTHERS
    bench.now_s += 50.0
    assert bench.do(work("new", ref(1), until_s=9999.0)) == []
    assert not bench.aside
    assert not bench.connector.cancelled


@pytest.mark.attack("P33")
def test_late_fetches_are_not_given_up_for_those_of_slow_producers(bench: Bench) -> None:
    silent = Silent(bench)
    silent.flood(12)
    silent.flood(12)
    bench.now_s += GIVE_UP_S
    assert bench.do(work("slow", ref(1000))) == []
    assert not bench.connector.cancelled


def test_fetches_that_ended_while_the_engine_stepped_are_not_given_up(bench: Bench) -> None:
    """Sixteen end at once, in a step of three seconds, and their results are behind other work in the queue."""
    bench.do(*(work(f"r{number}", ref(number)) for number in range(MAX_FETCHES)))
    for number in range(12):
        bench.loop.jobs.put(work(f"more{number}", ref(100 + number)))
    due, bench.aside[:] = list(bench.aside), []
    for run in due:
        bench.fetch(run, took_s=0.0)
    bench.now_s = GIVE_UP_S + 1.0
    bench.do()
    assert len(bench.engine.requests) == MAX_FETCHES
    assert len(bench.aside) == 12
    assert not bench.connector.cancelled


def test_a_fetch_that_was_given_up_is_answered_once(bench: Bench) -> None:
    results: list[HandOffs | Exception] = []

    def keep(result: HandOffs | Exception) -> list[Outcome]:
        results.append(result)
        return []

    fetches = bench.loop._fetches
    for moment_s in (0.0, LONG_S):
        bench.now_s = moment_s
        for number in range(12):
            fetches.fetch("request", [ref(number + int(moment_s * 200))], 60.0, keep)
    bench.now_s += GIVE_UP_S
    fetches.fetch("other", [ref(9999)], 60.0, keep)
    bench.do()
    assert [type(result) for result in results] == [PayloadError] * 12
    bench.fetch_all()
    bench.fetch_all()
    assert len(results) == 12 + 12 + 1


@pytest.mark.attack("P33")
def test_a_late_fetch_is_given_up_without_the_one_of_another_producer_by_its_key(bench: Bench) -> None:
    bench.do(work("a", ref(1)))
    bench.fetch_all()
    silent = Silent(bench, "same")
    silent.flood(12)
    silent.flood(12)
    bench.now_s += GIVE_UP_S
    assert len(bench.do(work("b", msgspec.structs.replace(ref(1), key="same")), work("new", ref(2)))) == 12
    assert not bench.connector.cancelled


@pytest.mark.attack("P33")
def test_producers_that_were_slow_have_eight_threads_in_all(bench: Bench) -> None:
    bench.do(*(work(f"a{number}", ref(number)) for number in range(12)))
    bench.fetch_all(took_s=LONG_S)
    bench.do(*(work(f"b{number}", ref(number)) for number in range(12)))
    assert len(bench.aside) == MAX_OF_SLOW


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
