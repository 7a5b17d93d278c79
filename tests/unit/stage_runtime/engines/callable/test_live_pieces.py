"""Callables that read the pieces of a hand-off while they come."""

from __future__ import annotations

from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import EngineOutput, StageRequest, create_engine
from stage_runtime.engines.callable.engine import TorchEngine
from stage_runtime.testing import run
from tests.support.callables import SEEN


def engine(name: str, **args: Any) -> TorchEngine:
    target = {"target": f"tests.support.callables:{name}"}
    made = create_engine(StageConfig(stage_id=3, engine="torch", engine_args={**target, **args}, final_output="text"))
    assert isinstance(made, TorchEngine)
    made.load(lambda _phase, _progress: None)
    return made


def ask(key: str = "k", **more: Any) -> StageRequest:
    return StageRequest(key, key, **{"stream_from": (2,), **more})


def drain(made: TorchEngine) -> list[EngineOutput]:
    outputs = []
    while made.has_unfinished():
        outputs += made.step()
    return outputs


def texts(outputs: list[EngineOutput]) -> list[str]:
    return [output.text for output in outputs if output.text]


def test_what_a_piece_gives_comes_out_before_the_next_piece_is_there() -> None:
    """And between two pieces there is nothing to step for."""
    made = engine("recite")
    made.add(ask(next_stages=(4,), stream_to=(4,)))
    assert drain(made) == []
    made.feed("k", 2, {"text": "a b"}, is_last=False)
    first = drain(made)
    assert texts(first) == ["a ", "b "]
    assert [output.handoff_piece for output in first if output.handoff_piece] == [{"text": "a "}, {"text": "b "}]
    made.feed("k", 2, {"text": "c"}, is_last=False)
    assert texts(drain(made)) == ["c "]
    made.feed("k", 2, None, is_last=True)
    last = drain(made)
    assert texts(last) == ["over"]
    assert last[-1].finish_reason == "stop"


def test_a_whole_hand_off_is_a_single_piece_and_gathered_pieces_are_several() -> None:
    for payload in ({"text": "a b"}, {"pieces": [{"text": "a"}, {"text": "b"}]}):
        said = run(engine("recite"), ask(stream_from=(), payloads={2: payload}))["k"]
        assert texts(said) == ["a ", "b ", "over"]


def test_one_that_waits_for_a_piece_holds_up_no_other() -> None:
    made = engine("recite", capacity=2)
    made.add(ask("waits"))
    made.add(ask("runs"))
    made.feed("runs", 2, {"text": "a"}, is_last=False)
    made.feed("runs", 2, None, is_last=True)
    assert {output.key for output in drain(made)} == {"runs"}
    made.feed("waits", 2, None, is_last=True)
    assert texts(drain(made)) == ["over"]


def test_no_more_pieces_are_wanted_than_are_read() -> None:
    """Of a request that is paused, or waits for its turn."""
    made = engine("recite")
    made.add(ask())
    made.pause("k", True)
    fed = 0
    while made.wants("k", 2):
        made.feed("k", 2, {"text": "a"}, is_last=False)
        fed += 1
        assert fed < 100, "it wants pieces without end"
    assert drain(made) == []
    made.pause("k", False)
    assert texts(drain(made)) == ["a "] * fed
    assert made.wants("k", 2)


def test_a_wrong_piece_is_refused_with_its_field() -> None:
    made = engine("recite")
    made.add(ask())
    with pytest.raises(InvalidRequestError, match=r"text \(handed over by a stage before\)"):
        made.feed("k", 2, {"text": 5}, is_last=False)


def test_pieces_of_two_stages_have_no_order_and_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="from a single stage, here 2 hand over"):
        engine("recite").add(ask(stream_from=(1, 2)))


@pytest.mark.parametrize("fed", [0, 1])
def test_an_aborted_one_is_closed_where_it_stands(fed: int) -> None:
    """Where it waits for a piece, and where it has given a value."""
    made = engine("recite")
    made.add(ask())
    drain(made)
    if fed:
        made.feed("k", 2, {"text": "a b"}, is_last=False)
        made.step()
    SEEN.clear()
    made.abort("k")
    assert [output.finish_reason for output in drain(made)] == ["abort"]
    assert SEEN == ["closed"]
    made.feed("k", 2, {"text": "late"}, is_last=True)
    assert not made.has_unfinished()


def test_what_it_raises_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    made = engine("recite", capacity=2)
    made.add(ask("bad"))
    made.add(ask("good"))
    for key, text in (("bad", "a FAIL"), ("good", "a")):
        made.feed(key, 2, {"text": text}, is_last=False)
        made.feed(key, 2, None, is_last=True)
    ends = {output.key: output for output in drain(made) if output.finished}
    assert ends["bad"].error is not None
    assert "it was told to fail" in ends["bad"].error[1]
    assert ends["good"].finish_reason == "stop"
    assert "close_failed" not in caplog.text


def test_an_object_can_be_called_too_and_nothing_but_pieces_can_be_awaited() -> None:
    assert texts(run(engine("Reciter"), ask(stream_from=(), payloads={2: {"text": "a"}}))["k"]) == ["a"]
    (output,) = run(engine("sleepy"), ask(stream_from=(), inputs={"prompt": "x"}))["k"]
    assert output.error is not None
    assert "only its pieces can be awaited" in output.error[1]


def test_others_get_all_pieces_together_when_the_last_stage_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Which is said once, with what to write to have it otherwise."""
    made = engine("count_pieces")
    made.add(ask(stream_from=(1, 2)))
    made.feed("k", 1, {"text": "a"}, is_last=False)
    made.feed("k", 1, None, is_last=True)
    assert not made.has_unfinished()
    made.feed("k", 2, {"text": "b"}, is_last=False)
    made.feed("k", 2, None, is_last=True)
    assert texts(drain(made)) == ["1 pieces, 2 payloads, []"]
    made.add(ask("again"))
    assert caplog.text.count("torch.waits_for_all_pieces target=tests.support.callables:count_pieces") == 1


def test_one_that_is_aborted_while_its_pieces_are_collected_ends() -> None:
    made = engine("count_pieces")
    made.add(ask())
    made.feed("k", 2, {"text": "a"}, is_last=False)
    made.abort("k")
    assert [output.finish_reason for output in drain(made)] == ["abort"]
    made.feed("k", 2, None, is_last=True)
    assert not made.has_unfinished()
