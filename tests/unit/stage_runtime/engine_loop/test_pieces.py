"""The engine's thread and hand-offs that travel piece by piece: windows, engines that offer less, what breaks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind, PayloadRef
from stage_runtime.connectors.shm.connector import SharedMemoryConnector
from stage_runtime.engine_loop import pieces as pieces_module
from stage_runtime.engine_loop.jobs import (
    Cancel,
    Finished,
    HandedPiece,
    Job,
    Outcome,
    PieceArrived,
    ReleasePayload,
    RequestFailed,
    TookPiece,
    Wake,
    WindowUpdate,
    Work,
)
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Edge, Payloads
from stage_runtime.engines.base import EngineOutput
from tests.support.replica_engine import ScriptedEngine, at_once


class PieceEngine(ScriptedEngine):
    """Wants so many pieces, and writes down what it is fed and told."""

    def __init__(self) -> None:
        super().__init__()
        self.appetite = 100
        self.fed: list[tuple[str, int, Any, bool]] = []
        self.pauses: list[bool] = []

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        if piece is not None and piece.get("bad"):
            raise InvalidRequestError("a bad piece")
        self.appetite -= 1
        self.fed.append((key, from_stage, None if piece is None else piece["n"], is_last))

    def wants(self, key: str, from_stage: int) -> bool:
        return self.appetite > 0

    def pause(self, key: str, paused: bool) -> None:
        self.pauses.append(paused)


class Bench:
    """One loop of stage 1 between stage 0 and the stages 2 and 3; at most two pieces are on their way to stage 2."""

    def __init__(self, folder: Path, engine: ScriptedEngine, window_to_3: int = 0) -> None:
        self.engine, self.folder, self.now_s = engine, folder, 0.0
        config = {"directory": str(folder), "shm_threshold_bytes": 0}
        self.incoming, outgoing = SharedMemoryConnector(config), SharedMemoryConnector(config)
        edges = {
            (0, 1): Edge("shm", self.incoming),
            (1, 2): Edge("shm", outgoing, window=2),
            (1, 3): Edge("shm", outgoing, window=window_to_3),
        }
        self.said: list[Outcome] = []
        payloads = Payloads(1, edges, lambda: self.now_s)
        self.loop = EngineLoop(engine, payloads, {}, self.said.extend, lambda: self.now_s, at_once)

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

    def fed(self, number: int, content: Mapping[str, Any] | None = None) -> PieceArrived:
        """A piece of stage 0 in its connector."""
        key = f"k_{number}"
        _, size_bytes, metadata = self.incoming.put("0", "1", key, content or {"n": number})
        ref = PayloadRef(
            from_stage=0, to_stage=1, key=key, connector="shm", size_bytes=size_bytes,
            metadata={**(metadata or {}), "consume": False},
        )  # fmt: skip
        return PieceArrived("a", 0, number, ref, False)

    def files(self) -> int:
        return len(list(self.folder.iterdir()))


def work(**fields: Any) -> Work:
    return Work("a", "hub/a", "a", 0, {"prompt": "hi"}, {}, (), (2,), 0.0, 60.0, **fields)


def piece(number: int) -> EngineOutput:
    return EngineOutput("a", handoff_piece={"n": number})


def numbers(outcomes: list[Outcome]) -> list[int]:
    return [outcome.number for outcome in outcomes if isinstance(outcome, HandedPiece)]


END = PieceArrived("a", 0, 3, None, True)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, PieceEngine())


# ---- out


def test_pieces_go_out_as_far_as_the_window_and_the_end_waits_for_the_last(bench: Bench) -> None:
    """1. the engine, which does not care that it is paused, makes four pieces and ends
    2. two are said; as they are taken, the others follow, and then the end with the rest for nobody
    """
    bench.do(work(stream_to=(2,)))
    said = [bench.put_out(piece(number)) for number in range(4)]
    assert [numbers(each) for each in said] == [[0], [1], [], []]
    assert bench.put_out(EngineOutput("a", finish_reason="stop", handoff={"whole": 1})) == []
    assert isinstance(bench.engine, PieceEngine)
    assert bench.engine.pauses == [True]
    assert numbers(bench.do(WindowUpdate("a", 2, 1))) == [2]
    *pieces, end = bench.do(WindowUpdate("a", 2, 3))
    assert numbers(pieces) == [3]
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.payloads) == ("stop", ())
    assert bench.files() > 0
    bench.do(ReleasePayload("hub/a"))
    assert len(bench.loop) == 0


def test_the_engine_is_paused_while_the_next_stage_is_behind(bench: Bench) -> None:
    bench.do(work(stream_to=(2,)))
    bench.put_out(piece(0), piece(1))
    bench.do(WindowUpdate("a", 2, 1), WindowUpdate("a", 2, 1))
    assert isinstance(bench.engine, PieceEngine)
    assert bench.engine.pauses == [True, False]


def test_a_stage_that_takes_no_pieces_gets_the_hand_off_whole(bench: Bench) -> None:
    bench.do(Work("a", "hub/a", "a", 0, {"prompt": "hi"}, {}, (), (2, 3), 0.0, 60.0, stream_to=(2,)))
    (first,) = bench.put_out(piece(0))
    assert isinstance(first, HandedPiece)
    assert [ref.to_stage for ref in first.payloads] == [2]
    (end,) = bench.put_out(EngineOutput("a", finish_reason="stop", handoff={"n": 1}))
    assert isinstance(end, Finished)
    assert [ref.to_stage for ref in end.payloads] == [3]


def test_without_pieces_the_hand_off_goes_whole_to_whoever_would_take_them(bench: Bench) -> None:
    bench.do(work(stream_to=(2,)))
    (end,) = bench.put_out(EngineOutput("a", finish_reason="stop", handoff={"n": 1}))
    assert isinstance(end, Finished)
    assert [ref.to_stage for ref in end.payloads] == [2]


def test_pieces_that_nobody_asked_for_go_nowhere(bench: Bench) -> None:
    bench.do(work())
    assert bench.put_out(piece(0)) == []


def test_what_is_said_and_not_taken_is_said_again_when_a_connection_broke(bench: Bench) -> None:
    bench.do(work(stream_to=(2,)))
    bench.put_out(piece(0), piece(1))
    assert numbers(bench.do(WindowUpdate("a", 2, 0, True))) == [0, 1]
    assert numbers(bench.do(WindowUpdate("a", 2, 1, True))) == [1]
    assert bench.do(WindowUpdate("a", 2, 99), WindowUpdate("b", 2, 1), WindowUpdate("a", 7, 1)) == []


def test_a_piece_is_said_again_until_every_stage_that_takes_pieces_has_taken_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, PieceEngine(), window_to_3=2)
    bench.do(Work("a", "hub/a", "a", 0, {"prompt": "hi"}, {}, (), (2, 3), 0.0, 60.0, stream_to=(2, 3)))
    bench.put_out(piece(0), piece(1))
    bench.do(WindowUpdate("a", 2, 2))
    assert numbers(bench.do(WindowUpdate("a", 3, 1, True))) == [1]


def test_a_request_that_waits_for_its_pieces_to_be_taken_can_be_aborted_and_runs_out_of_time(bench: Bench) -> None:
    for deadline in (False, True):
        bench.do(work(stream_to=(2,)))
        bench.put_out(piece(0), piece(1), piece(2), EngineOutput("a", finish_reason="stop"))
        bench.now_s = 61.0 if deadline else 0.0
        (end,) = bench.do() if deadline else bench.do(Cancel("a"))
        assert isinstance(end, RequestFailed if deadline else Finished)
        assert len(bench.loop) == 0


def test_releasing_a_request_drops_all_its_pieces(bench: Bench) -> None:
    bench.do(work(stream_to=(2,)))
    free = bench.files()
    for number in range(5):
        bench.put_out(piece(number))
        bench.do(WindowUpdate("a", 2, number + 1))
    assert bench.files() >= free + 5
    health = bench.loop._payloads._edges[1, 2].connector.health
    assert health()["pending"] == 5
    bench.do(ReleasePayload("hub/a"))
    assert health()["pending"] == 0


# ---- in


def test_pieces_reach_the_engine_in_order_and_are_answered(bench: Bench) -> None:
    bench.do(work(stream_from=(0,)))
    assert bench.do(bench.fed(0)) == [TookPiece("a", 0, 0)]
    assert bench.do(bench.fed(1), bench.fed(2), END) == [TookPiece("a", 0, 1), TookPiece("a", 0, 2)]
    assert isinstance(bench.engine, PieceEngine)
    assert bench.engine.fed == [("a", 0, 0, False), ("a", 0, 1, False), ("a", 0, 2, False), ("a", 0, None, True)]


def test_a_piece_that_comes_again_is_answered_again_and_not_fed_again(bench: Bench) -> None:
    bench.do(work(stream_from=(0,)))
    bench.do(bench.fed(0), bench.fed(1))
    assert bench.do(bench.fed(0)) == [TookPiece("a", 0, 1)]
    assert isinstance(bench.engine, PieceEngine)
    assert len(bench.engine.fed) == 2


def test_the_engine_gets_no_more_than_it_wants(bench: Bench) -> None:
    assert isinstance(bench.engine, PieceEngine)
    bench.engine.appetite = 1
    bench.do(work(stream_from=(0,)))
    assert bench.do(bench.fed(0), bench.fed(1), bench.fed(2)) == [TookPiece("a", 0, 0)]
    bench.engine.appetite = 1
    assert bench.do() == [TookPiece("a", 0, 1)]


def test_a_gap_a_bad_piece_and_one_that_is_gone_end_the_request(bench: Bench) -> None:
    for wrong, kind in (
        (bench.fed(1), FailureKind.PAYLOAD),
        (bench.fed(0, {"bad": True}), FailureKind.INVALID),
        (PieceArrived("a", 0, 0, None, False), FailureKind.PAYLOAD),
    ):
        bench.do(work(stream_from=(0,)))
        (end,) = bench.do(wrong)
        assert isinstance(end, RequestFailed)
        assert end.kind is kind
        assert len(bench.loop) == 0
        assert bench.engine.aborted[-1] == "a"
        bench.do()


@pytest.mark.attack("P32")
def test_a_hub_that_does_not_keep_to_the_window_loses_the_request(bench: Bench) -> None:
    """Sixteen pieces may wait: a repeated one and the end of the hand-off take no place, the seventeenth has none."""
    assert isinstance(bench.engine, PieceEngine)
    bench.engine.appetite = 1
    bench.do(work(stream_from=(0,)))
    bench.do(bench.fed(0))
    bench.do(*(bench.fed(number) for number in range(1, 17)), bench.fed(16))
    assert len(bench.loop) == 1
    (end,) = bench.do(bench.fed(17))
    assert isinstance(end, RequestFailed)
    assert (end.kind, end.reason) == (FailureKind.OVERLOADED, "17 pieces of stage 0 wait; the window is 16")
    assert bench.engine.aborted == ["a"]


def test_the_end_of_a_hand_off_needs_no_window(bench: Bench) -> None:
    assert isinstance(bench.engine, PieceEngine)
    bench.engine.appetite = 0
    bench.do(work(stream_from=(0,)))
    assert bench.do(*(bench.fed(n) for n in range(16)), PieceArrived("a", 0, 16, None, True)) == []
    bench.engine.appetite = 100
    assert TookPiece("a", 0, 15) in [*bench.do(), *bench.do()]


@pytest.mark.attack("P32")
def test_pieces_of_a_stage_that_no_edge_leads_from_are_not_waited_for(bench: Bench) -> None:
    (end,) = bench.do(work(stream_from=(0, 7)))
    assert isinstance(end, RequestFailed)
    assert "no edge from stage 7" in end.reason
    assert len(bench.loop) == 0


@pytest.mark.attack("P32")
def test_an_engine_that_takes_pieces_together_is_not_given_more_than_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage_runtime.engine_loop.pieces.MOST_COLLECTED", 2)
    bench = Bench(tmp_path, ScriptedEngine())
    bench.do(work(stream_from=(0,)))
    bench.do(bench.fed(0), bench.fed(1))
    (end,) = bench.do(bench.fed(2))
    assert isinstance(end, RequestFailed)
    assert "3 pieces of stage 0" in end.reason


def test_an_engine_that_takes_no_pieces_gets_them_when_all_are_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ScriptedEngine())
    bench.do(work(stream_from=(0,)))
    assert bench.do(bench.fed(0), bench.fed(1)) == [TookPiece("a", 0, 0), TookPiece("a", 0, 1)]
    assert not bench.engine.requests
    bench.do(bench.fed(2), END)
    request = bench.engine.requests["a"]
    assert request.payloads == {0: {"pieces": [{"n": 0}, {"n": 1}, {"n": 2}]}}
    assert request.stream_from == ()


class CollectingEngine(PieceEngine):
    """Keeps all pieces, as one does whose calls begin with the last."""

    def keeps_pieces(self, key: str) -> bool:
        return key == "a"


@pytest.mark.attack("Z80")
@pytest.mark.parametrize("engine", [ScriptedEngine, CollectingEngine], ids=["no_feed", "keeps_pieces"])
def test_pieces_that_are_kept_until_the_last_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: type[ScriptedEngine]
) -> None:
    """A request may take no more than it leaves to others; what is used up piece by piece counts for nothing."""
    monkeypatch.setattr(pieces_module, "MOST_COLLECTED_BYTES", 10_000)
    large = {"n": 0, "x": bytes(2_000)}
    bench = Bench(tmp_path, engine())
    bench.do(work(stream_from=(0,)))
    assert bench.do(bench.fed(0, large), bench.fed(1, large)) == [TookPiece("a", 0, 0), TookPiece("a", 0, 1)]
    (end,) = bench.do(bench.fed(2, large))
    assert isinstance(end, RequestFailed)
    assert end.kind is FailureKind.OVERLOADED
    assert "are more than this engine, which takes them together" in end.reason
    live = Bench(tmp_path, PieceEngine())
    live.do(work(stream_from=(0,)))
    assert live.do(*(live.fed(number, large) for number in range(9)))[-1] == TookPiece("a", 0, 8)


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_collects_its_pieces_can_be_aborted_and_runs_out_of_time(tmp_path: Path, late: bool) -> None:
    bench = Bench(tmp_path, ScriptedEngine())
    bench.do(work(stream_from=(0,)), bench.fed(0))
    bench.now_s = 61.0 if late else 0.0
    (end,) = bench.do() if late else bench.do(Cancel("a"))
    assert isinstance(end, RequestFailed if late else Finished)
    assert len(bench.loop) == 0
    assert bench.do(bench.fed(1)) == []
