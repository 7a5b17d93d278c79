"""What every engine promises, as tests: for engines of third parties, and run over all of ours. Needs pytest.

Derive a class whose name begins with ``Test`` from ``EngineContract``; docs/engines.md has a whole example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

import pytest
from msgspec.structs import replace

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import Resume
from stage_runtime.config import NotResumableError
from stage_runtime.connectors.serialization import serialize
from stage_runtime.engines.base import CONTROL_METHODS, Engine, EngineOutput, ResumingEngine, StageRequest
from stage_runtime.engines.capabilities import capabilities_of, misspelled_members

#: Steps after which an engine that has not ended counts as one that never will.
_MAX_STEPS: Final = 100_000


def drain(engine: Engine) -> list[EngineOutput]:
    """Step until there is nothing to do; everything that was said. Raise AssertionError if that never comes."""
    said: list[EngineOutput] = []
    for _ in range(_MAX_STEPS):
        if not engine.has_unfinished():
            return said
        said += engine.step()
    raise AssertionError(f"the engine still has something to do after {_MAX_STEPS} steps")


def run(engine: Engine, *requests: StageRequest) -> dict[str, list[EngineOutput]]:
    """Everything said about these requests, by their keys. Raise AssertionError if more was said."""
    for request in requests:
        engine.add(request)
    said: dict[str, list[EngineOutput]] = {request.key: [] for request in requests}
    for output in drain(engine):
        assert output.key in said, f"an output is of {output.key!r}, which is none of {list(said)}"
        said[output.key].append(output)
    return said


def resume_of(outputs: Sequence[EngineOutput]) -> Resume:
    """What a client has seen, as another replica is told of it."""
    return Resume(
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        text="".join(output.text for output in outputs),
    )


def check_every_cut(engine: Engine, request: StageRequest) -> int:
    """Cut the answer behind each of its pieces, none and all included, and continue it; return how many there were.

    Each continuation must be what was missing, with the whole answer's end, usage and hand-off. The whole is asked
    again besides, so that the continuations run in company. Raise AssertionError, or NotResumableError of the engine.
    """
    whole = run(engine, request)[request.key]
    cuts = [
        replace(request, key=f"{request.key}/{cut}", attempt=1, resume=resume_of(whole[:cut]))
        for cut in range(len(whole) + 1)
    ]
    continued = run(engine, *cuts, request)
    for cut, asked in enumerate(cuts):
        rest = continued[asked.key]
        _check_end(rest)
        assert resume_of([*whole[:cut], *rest]) == resume_of(whole), f"cut behind piece {cut}: another answer"
        assert rest[-1].finish_reason == whole[-1].finish_reason, f"cut behind piece {cut}: another finish_reason"
        assert rest[-1].usage == whole[-1].usage, f"cut behind piece {cut}: the usage is not that of the whole answer"
        assert serialize(rest[-1].handoff) == serialize(whole[-1].handoff), f"cut behind piece {cut}: another hand-off"
    return len(whole)


def shown(outputs: Sequence[EngineOutput]) -> tuple[Resume, list[bytes]]:
    """What a client has of these outputs, however they were cut: the text with its tokens, and the files."""
    files = [file for each in outputs for file in _files(each) if file is not None]
    return resume_of(outputs), files


def _files(output: EngineOutput) -> tuple[bytes | None, ...]:
    return output.image_png, output.audio_wav, output.pooled_npy


def _check_end(outputs: Sequence[EngineOutput], *, reason: str = "") -> None:
    assert outputs, "nothing was said of a request"
    ends = [output for output in outputs if output.finished]
    assert len(ends) == 1, f"{len(ends)} outputs have a finish_reason or an error; exactly the last one has"
    assert outputs[-1].finished, "something was said of a request behind its end"
    assert outputs[-1].error is None, f"a good request failed: {outputs[-1].error}"
    if reason:
        assert outputs[-1].finish_reason == reason, f"it ended with {outputs[-1].finish_reason!r}, not {reason!r}"
    else:
        assert outputs[-1].finish_reason != "abort", "a request that nobody aborted ended with 'abort'"


#: What an engine may have beyond Engine, and the test of that. ``not_resumable`` counts where it is not None.
OPTIONAL: Final = {
    "pause": "test_pausing_holds_a_request_until_it_is_told_to_go_on",
    "feed": "test_a_hand_off_in_pieces_is_fed",
    "update": "test_segments_are_answered_one_after_the_other",
    "controls": "test_controls_have_known_names_and_sleep_can_be_told",
    "not_resumable": "test_an_answer_begun_elsewhere_goes_on_at_every_cut",
}


class EngineContract:
    """The tests. Define ``make_engine``, ``good_request`` and ``bad_request``; the engine is loaded once for all.

    Take a small capacity, 2 or 4: the tests put twice as many requests and one more into the engine at once. What the
    engine has besides of ``OPTIONAL`` stands in ``offers``; there are tests for each, which it has only then.
    """

    offers: ClassVar[frozenset[str]] = frozenset()
    #: What is tested, and what its loading has said.
    loaded: ClassVar[Engine | None] = None
    reports: ClassVar[list[tuple[str, float]]] = []

    def make_engine(self) -> Engine:
        """A new engine, not loaded yet."""
        raise NotImplementedError

    def good_request(self, key: str) -> StageRequest:
        """A request that the engine can serve, if possible in several steps; the same for every key, but for that."""
        raise NotImplementedError

    def bad_request(self, key: str) -> StageRequest:
        """One that it must refuse."""
        raise NotImplementedError

    def pieces(self) -> Sequence[Mapping[str, Any]]:
        """For an engine with ``feed``: a hand-off in pieces, as stage 0 would make them."""
        raise NotImplementedError

    def __init_subclass__(cls) -> None:
        """Only what is offered is tested."""
        for name, test in OPTIONAL.items():
            if test not in vars(cls):
                setattr(cls, test, getattr(EngineContract, test) if name in cls.offers else None)

    @pytest.fixture
    def engine(self) -> Engine:
        """The engine, loaded, with nothing to do. May be overridden where it is loaded elsewhere."""
        kind = type(self)
        if kind.loaded is None:
            kind.loaded, kind.reports = self.make_engine(), []
            kind.loaded.load(lambda phase, share: kind.reports.append((phase, share)))
        assert not kind.loaded.has_unfinished(), "the test before has left something to do"
        return kind.loaded

    @classmethod
    def teardown_class(cls) -> None:
        """Close it, twice: that must be the same as once."""
        if cls.loaded is not None:
            cls.loaded.close()
            cls.loaded.close()
            cls.loaded = None

    def test_loading_says_how_far_it_is(self, engine: Engine) -> None:
        shares = [share for _, share in self.reports]
        assert shares == sorted(shares), f"the progress goes back: {shares}"
        assert all(phase and 0 <= share <= 1 for phase, share in self.reports), f"not from 0 to 1: {self.reports}"
        assert type(engine.capacity) is int, "capacity is a whole number"
        assert engine.capacity >= 1, "capacity is at least 1"
        assert engine.modality in ("text", "image", "audio", "embedding"), f"the modality is {engine.modality!r}"

    def test_all_that_it_offers_is_tested(self, engine: Engine) -> None:
        has = {name for name in OPTIONAL if getattr(engine, name, None) is not None}
        assert has == self.offers, f"the engine has {sorted(has)}, and 'offers' of its tests is {sorted(self.offers)}"

    def test_no_optional_method_is_misspelled(self, engine: Engine) -> None:
        assert misspelled_members(engine) == []

    def test_more_than_the_capacity_all_end_once_and_leave_nothing(self, engine: Engine) -> None:
        said = run(engine, *(self.good_request(f"k{number}") for number in range(2 * engine.capacity + 1)))
        for outputs in said.values():
            _check_end(outputs)
        assert not engine.has_unfinished()

    def test_an_abort_ends_a_running_request_and_touches_no_other(self, engine: Engine) -> None:
        engine.add(self.good_request("gone"))
        engine.add(self.good_request("stays"))
        said = engine.step()
        # One that took a single step may be over already; then the abort is of an unknown key.
        was_over = any(output.key == "gone" and output.finished for output in said)
        engine.abort("gone")
        engine.abort("gone")
        engine.abort("never heard of")
        said += drain(engine)
        gone = [output for output in said if output.key == "gone"]
        _check_end(gone, reason="" if was_over else "abort")
        assert was_over or gone[-1].handoff is None, "an aborted request hands nothing over"
        _check_end([output for output in said if output.key == "stays"])

    def test_a_request_that_waits_can_be_aborted(self, engine: Engine) -> None:
        keys = [f"k{number}" for number in range(engine.capacity + 2)]
        for key in keys:
            engine.add(self.good_request(key))
        engine.abort(keys[-1])
        said = drain(engine)
        _check_end([output for output in said if output.key == keys[-1]], reason="abort")
        for key in keys[:-1]:
            _check_end([output for output in said if output.key == key])

    def test_a_finished_request_may_come_again_under_its_key_and_is_answered_the_same(self, engine: Engine) -> None:
        first, again = (run(engine, self.good_request("k"))["k"] for _ in range(2))
        _check_end(again)
        assert shown(first) == shown(again), "the same request was answered in two ways"

    def test_a_key_that_runs_is_refused_and_goes_on(self, engine: Engine) -> None:
        engine.add(self.good_request("k"))
        with pytest.raises(InvalidRequestError):
            engine.add(self.good_request("k"))
        _check_end(drain(engine))

    def test_a_bad_request_is_refused_at_the_door_and_leaves_nothing(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequestError) as refused:
            engine.add(self.bad_request("bad"))
        assert str(refused.value), "the refusal says nothing"
        assert not engine.has_unfinished()
        _check_end(run(engine, self.good_request("bad"))["bad"])

    def test_pausing_holds_a_request_until_it_is_told_to_go_on(self, engine: Engine) -> None:
        pause: Callable[[str, bool], None] = engine.pause  # type: ignore[attr-defined]
        whole = run(engine, self.good_request("k"))["k"]
        pause("never heard of", True)
        engine.add(self.good_request("k"))
        pause("k", True)
        drain(engine)
        assert not engine.has_unfinished(), "a paused request is nothing to step for"
        pause("k", False)
        said = drain(engine)
        _check_end(said)
        assert shown(said) == shown(whole), "a request that was paused was answered in another way"
        engine.add(self.good_request("k"))
        pause("k", True)
        engine.abort("k")
        _check_end(drain(engine), reason="abort")

    def test_a_hand_off_in_pieces_is_fed(self, engine: Engine) -> None:
        feed: Callable[[str, int, Any, bool], None] = engine.feed  # type: ignore[attr-defined]
        wants = capabilities_of(engine).wants or (lambda _key, _stage: True)
        engine.add(replace(self.good_request("k"), inputs={}, payloads={}, stream_from=(0,)))
        said: list[EngineOutput] = []
        for piece in self.pieces():
            said += drain(engine)
            assert wants("k", 0), "it has nothing to do and wants no piece"
            feed("k", 0, piece, False)
        said += drain(engine)
        assert not any(output.finished for output in said), "it ended before it heard that no more comes"
        feed("k", 0, None, True)
        _check_end([*said, *drain(engine)])

    def test_segments_are_answered_one_after_the_other(self, engine: Engine) -> None:
        update: Callable[[StageRequest], None] = engine.update  # type: ignore[attr-defined]
        engine.add(replace(self.good_request("k"), segment=0))
        _check_end(drain(engine))
        update(replace(self.good_request("k"), segment=1))
        _check_end(drain(engine))
        engine.abort("k")
        drain(engine)

    def test_controls_have_known_names_and_sleep_can_be_told(self, engine: Engine) -> None:
        controls: Mapping[str, Callable[..., Any]] = engine.controls  # type: ignore[attr-defined]
        assert set(controls) <= set(CONTROL_METHODS), f"unknown: {sorted(set(controls) - set(CONTROL_METHODS))}"
        if "sleep" not in controls:
            return
        assert {"wake_up", "is_sleeping"} <= set(controls), "an engine that can sleep can wake up, and says which"
        controls["sleep"](0)
        assert controls["is_sleeping"]() is True
        controls["wake_up"]()
        assert controls["is_sleeping"]() is False
        _check_end(run(engine, self.good_request("k"))["k"])

    def test_an_answer_begun_elsewhere_goes_on_at_every_cut(self, engine: Engine) -> None:
        obstacles = cast(ResumingEngine, engine).not_resumable or {}
        assert all(name and reason for name, reason in obstacles.items()), "each obstacle has a reason"
        assert check_every_cut(engine, replace(self.good_request("k"), next_stages=(1,))) >= 1
        with pytest.raises(NotResumableError):
            engine.add(replace(self.good_request("k"), resume=Resume(text="nobody has ever said this")))
        assert not engine.has_unfinished()
