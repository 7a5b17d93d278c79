"""The contracts of engines and of connectors, as tests: run over the built-in ones, and for those of other packages.

Derive a class whose name begins with ``Test`` from ``EngineContract`` or ``ConnectorContract``; docs/examples has one
of each. Needs pytest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, cast

import msgspec
import pytest
from msgspec.structs import replace

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import Resume
from stage_runtime.config import NotResumableError
from stage_runtime.connectors.base import OmniConnectorBase
from stage_runtime.connectors.errors import TransferTimeoutError
from stage_runtime.connectors.serialization import serialize
from stage_runtime.engines.base import CONTROL_METHODS, Engine, EngineOutput, ResumingEngine, StageRequest
from stage_runtime.engines.capabilities import capabilities_of, misspelled_members

#: Steps after which an engine that has not ended counts as one that never will.
_MAX_STEPS: Final = 100_000


def drain(engine: Engine) -> list[EngineOutput]:
    """Step until no request is unfinished; return all outputs. Raise AssertionError if the engine never finishes."""
    said: list[EngineOutput] = []
    for _ in range(_MAX_STEPS):
        if not engine.has_unfinished():
            return said
        said += engine.step()
    raise AssertionError(f"the engine still has something to do after {_MAX_STEPS} steps")


def run(engine: Engine, *requests: StageRequest) -> dict[str, list[EngineOutput]]:
    """Run these requests; return their outputs by key. Raise AssertionError for an output of any other key."""
    for request in requests:
        engine.add(request)
    said: dict[str, list[EngineOutput]] = {request.key: [] for request in requests}
    for output in drain(engine):
        assert output.key in said, f"an output is of {output.key!r}, which is none of {list(said)}"
        said[output.key].append(output)
    return said


def resume_of(outputs: Sequence[EngineOutput]) -> Resume:
    """The output that a client has seen, as another replica gets it to continue the answer."""
    return Resume(
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        text="".join(output.text for output in outputs),
    )


def check_every_cut(engine: Engine, request: StageRequest) -> int:
    """Cut the answer behind each of its pieces, none and all included, and continue it; return how many there were.

    Each continuation must be the missing part, with the whole answer's end, usage and hand-off. The whole request runs
    again beside the continuations, so that they share a batch. Raise AssertionError, or the engine's NotResumableError.
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
    """The client's part of these outputs, however they were cut: the text with its tokens, and the files."""
    files = [file for each in outputs for file in _files(each) if file is not None]
    return resume_of(outputs), files


def _files(output: EngineOutput) -> tuple[bytes | None, ...]:
    return output.image_png if output.partial_image is None else None, output.audio_wav, output.pooled_npy


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


#: What an engine may have beyond Engine, and the test of that. ``not_resumable`` counts where it is not None,
#: ``deterministic`` and ``gives_partial_images`` where they are true.
OPTIONAL: Final = {
    "pause": "test_pausing_holds_a_request_until_it_is_told_to_go_on",
    "feed": "test_a_hand_off_in_pieces_is_fed",
    "update": "test_segments_are_answered_one_after_the_other",
    "controls": "test_controls_have_known_names_and_sleep_can_be_told",
    "metrics": "test_its_metrics_follow_its_requests",
    "gives_partial_images": "test_unfinished_pictures_come_in_order_and_change_nothing",
    "not_resumable": "test_an_answer_begun_elsewhere_goes_on_at_every_cut",
    "deterministic": "test_a_request_gets_the_same_output_alone_and_beside_others",
}


class EngineContract:
    """The tests. Define ``make_engine``, ``good_request`` and ``bad_request``; the engine is loaded once for all.

    Take a small capacity, 2 or 4: the tests put twice as many requests and one more into the engine at once. What the
    engine has besides of ``OPTIONAL`` stands in ``offers``; there are tests for each, which it has only then.
    """

    offers: ClassVar[frozenset[str]] = frozenset()
    #: The engine under test, and the reports of its loading.
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
        known = ("text", "image", "audio", "video", "embedding")
        assert engine.modality in known, f"the modality is {engine.modality!r}"

    def test_all_that_it_offers_is_tested(self, engine: Engine) -> None:
        has = {name for name in OPTIONAL if getattr(engine, name, None) is not None}
        if not capabilities_of(engine).is_deterministic():
            has.discard("deterministic")
        if not capabilities_of(engine).gives_partial_images():
            has.discard("gives_partial_images")
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

    def test_its_metrics_follow_its_requests(self, engine: Engine) -> None:
        metrics: Callable[[], Mapping[str, float]] = engine.metrics  # type: ignore[attr-defined]
        requests = ("requests_running", "requests_waiting")
        assert {metrics().get(name, 0) for name in requests} == {0}, f"it has nothing to do, and says {metrics()}"
        count = 2 * engine.capacity + 1
        for number in range(count):
            engine.add(self.good_request(f"k{number}"))
        ended = sum(output.finished for output in engine.step())
        busy = metrics()
        drain(engine)
        assert set(busy) <= {*requests, "kv_cache_usage"}, f"unknown: {sorted(busy)}"
        if set(requests) <= set(busy):
            assert sum(busy[name] for name in requests) == count - ended, f"{busy} with {count - ended} requests"
        assert 0 <= busy.get("kv_cache_usage", 0) <= 1, "the use of the KV cache is from 0 to 1"

    def test_an_answer_begun_elsewhere_goes_on_at_every_cut(self, engine: Engine) -> None:
        obstacles = cast(ResumingEngine, engine).not_resumable or {}
        assert all(name and reason for name, reason in obstacles.items()), "each obstacle has a reason"
        assert check_every_cut(engine, replace(self.good_request("k"), next_stages=(1,))) >= 1
        with pytest.raises(NotResumableError):
            engine.add(replace(self.good_request("k"), resume=Resume(text="nobody has ever said this")))
        assert not engine.has_unfinished()

    def test_a_request_gets_the_same_output_alone_and_beside_others(self, engine: Engine) -> None:
        """The same text, tokens, pictures and hand-offs in the same pieces, and sound to a step of 16 bits."""
        asked = [replace(self.good_request(f"k{number}"), request_id="same") for number in range(engine.capacity + 1)]
        alone = run(engine, asked[0])["k0"]
        said = run(engine, self.good_request("other"), *asked)
        for request in asked:
            again = said[request.key]
            assert len(again) == len(alone), f"{len(alone)} outputs alone, {len(again)} beside others"
            for mine, theirs in zip(alone, again, strict=True):
                assert (mine.text, mine.token_ids, mine.image_png) == (theirs.text, theirs.token_ids, theirs.image_png)
                assert _is_same_sound(mine.audio_wav, theirs.audio_wav), "another sound beside others"
                for name in ("handoff", "handoff_piece"):
                    one, two = (serialize(getattr(each, name)) for each in (mine, theirs))
                    assert one == two, f"another {name} beside others"

    def test_unfinished_pictures_come_in_order_and_change_nothing(self, engine: Engine) -> None:
        """As many as were asked for, or fewer, each another than the picture that comes behind them."""
        plain, asked = self.good_request("plain"), self.good_request("asked")
        asked = replace(asked, request_id=plain.request_id, params={**asked.params, "partial_images": 2})
        said = run(engine, plain, asked)
        partial = [output for output in said["asked"] if output.partial_image is not None]
        assert [output.partial_image for output in partial] == list(range(len(partial))), "not counted from 0"
        assert 1 <= len(partial) <= 2, f"{len(partial)} unfinished pictures, where 2 were asked for"
        pictures = [output for output in said["asked"] if output.image_png is not None]
        assert pictures[: len(partial)] == partial, "an unfinished picture came behind the finished one"
        assert shown(said["asked"]) == shown(said["plain"]), "another picture with unfinished ones before it"
        assert not any(output.image_png in shown(said["plain"])[1] for output in partial), "it was finished already"
        with pytest.raises(InvalidRequestError):
            engine.add(replace(asked, key="many", params={**asked.params, "partial_images": 4}))


def _is_same_sound(one: bytes | None, two: bytes | None) -> bool:
    import numpy as np

    if one == two or one is None or two is None or len(one) != len(two):
        return one == two
    samples = [np.frombuffer(each[: len(each) // 2 * 2], np.int16).astype(np.int32) for each in (one, two)]
    return bool(np.abs(samples[0] - samples[1]).max() <= 1)


#: Makes a connector with these settings beside those that the test class gives it.
MakeConnector = Callable[..., OmniConnectorBase]
#: Metadata of a ``get`` that leaves the hand-off where it is.
_KEEP: Final = {"consume": False}
#: How long a producer may take to learn that its hand-off was fetched.
_SOON_S: Final = 5.0


class ConnectorContract:
    """The contract of every connector. Define ``make_connector``; the connectors of a test see each other's hand-offs.

    What the connector has beyond the base class stands in ``offers``; the tests of the others are left out:
    ``limits`` (the settings ``max_inflight``, ``window_size`` and ``max_inflight_bytes``), ``ttl`` (the setting
    ``ttl_s``), ``pending`` (``health`` counts the hand-offs that are stored under that name).
    """

    offers: ClassVar[frozenset[str]] = frozenset()

    def make_connector(self, **settings: Any) -> OmniConnectorBase:
        """A new connector with these settings, which are of those that ``offers`` stands for."""
        raise NotImplementedError

    def payload(self, size_bytes: int, seed: int = 0) -> dict[str, Any]:
        """A hand-off of about that size, whose content follows from ``seed``, which is part of it."""
        import numpy as np

        return {"seed": seed, "numbers": np.arange(max(1, size_bytes // 8), dtype=np.int64) + seed}

    def is_intact(self, value: Mapping[str, Any]) -> bool:
        """Whether that is what ``payload`` made for its seed."""
        numbers = value["numbers"]
        return bool((numbers == self.payload(8 * len(numbers), value["seed"])["numbers"]).all())

    def __init_subclass__(cls) -> None:
        """Leave out the tests of what is not offered."""
        for name, tests in _OFFERED.items():
            for test in tests:
                if test not in vars(cls):
                    setattr(cls, test, getattr(ConnectorContract, test) if name in cls.offers else None)

    @pytest.fixture
    def make(self) -> Iterator[MakeConnector]:
        """Makes connectors and closes them when the test ends. May be overridden in place of ``make_connector``."""
        made: list[OmniConnectorBase] = []

        def build(**settings: Any) -> OmniConnectorBase:
            made.append(self.make_connector(**settings))
            return made[-1]

        yield build
        for connector in made:
            connector.close()

    @staticmethod
    def put(connector: OmniConnectorBase, key: str, value: Any) -> dict[str, Any]:
        """Store a hand-off from stage 0 to 1; return its metadata. Raise AssertionError if it is not stored."""
        stored, size_bytes, metadata = connector.put("0", "1", key, value)
        assert stored, f"put failed: {connector.last_error or 'last_error says nothing'}"
        assert size_bytes > 0, "the size of a stored hand-off is above 0"
        assert metadata is not None, "a stored hand-off has metadata, which may be empty"
        return metadata

    @staticmethod
    def get(connector: OmniConnectorBase, key: str, metadata: Mapping[str, Any] | None, **more: Any) -> Any:
        """Fetch a hand-off from stage 0 to 1; None if it is not there."""
        got = connector.get("0", "1", key, {**(metadata or {}), **more})
        return None if got is None else got[0]

    @pytest.mark.parametrize(
        "value",
        [{}, {"nothing": None}, {"empty": b""}, {"bytes": bytes(range(256)) * 1000}, {"deep": [{"n": [1.5, "ü"]}, -7]}],
        ids=["empty", "none", "no bytes", "bytes", "nested"],
    )
    def test_what_one_puts_the_other_gets(self, make: MakeConnector, value: Any) -> None:
        producer, consumer = make(), make()
        stored, size_bytes, metadata = producer.put("0", "1", "key", value)
        assert stored, producer.last_error
        assert consumer.get("0", "1", "key", metadata) == (value, size_bytes)

    def test_the_metadata_can_be_sent(self, make: MakeConnector) -> None:
        metadata = self.put(make(), "key", self.payload(100_000, 3))
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(metadata))
        assert sent == metadata, "what is put into the metadata reaches the consumer as it is: no tuples, no classes"

    def test_arrays_are_got_as_they_were_put(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        got = self.get(consumer, "key", self.put(producer, "key", self.payload(300_000, 5)))
        assert got["seed"] == 5
        assert self.is_intact(got)

    def test_get_consumes_once_unless_it_is_told_not_to(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        metadata = self.put(producer, "key", {"a": 1})
        for _ in range(3):
            assert self.get(consumer, "key", metadata, **_KEEP) == {"a": 1}
        assert self.get(consumer, "key", metadata) == {"a": 1}
        assert self.get(consumer, "key", metadata) is None
        assert self.get(consumer, "key", metadata, **_KEEP) is None

    def test_of_many_that_would_consume_at_once_one_gets_it(self, make: MakeConnector) -> None:
        producer, consumers = make(), [make() for _ in range(4)]
        for number in range(5):
            key, metadata = f"key{number}", self.put(producer, f"key{number}", self.payload(1 << 20, number))
            with ThreadPoolExecutor(4) as threads:
                got = list(threads.map(lambda one: self.get(one, key, metadata), consumers))  # noqa: B023
            assert [value is not None for value in got].count(True) == 1

    def test_what_is_not_there_is_none(self, make: MakeConnector) -> None:
        """1. never put; 2. put and released by its producer."""
        producer, consumer = make(), make()
        assert consumer.get("0", "1", "never put") is None
        assert consumer.get("0", "1", "never put", {"source_host": "elsewhere", "source_port": 1}) is None
        metadata = self.put(producer, "key", {"a": 1})
        producer.cleanup("key")
        assert self.get(consumer, "key", metadata) is None

    def test_a_hand_off_of_another_time_is_not_taken_for_the_one_that_is_meant(self, make: MakeConnector) -> None:
        """The same key again replaces what was there: the older metadata means something that is gone."""
        producer, consumer = make(), make()
        older = self.put(producer, "key", {"a": 1})
        newer = self.put(producer, "key", {"a": 2})
        assert self.get(consumer, "key", older, **_KEEP) is None
        assert self.get(consumer, "key", newer, **_KEEP) == {"a": 2}
        self.check_pending(producer, 1)

    @pytest.mark.parametrize("key", ["a/b", "../../etc/passwd", "ü" * 300, "\0", ".", "\ud800"])
    def test_any_text_is_a_key(self, make: MakeConnector, key: str) -> None:
        producer, consumer = make(), make()
        assert self.get(consumer, key, self.put(producer, key, {"a": 1})) == {"a": 1}

    def test_what_can_not_be_stored_is_said_and_not_raised(self, make: MakeConnector) -> None:
        connector = make()
        assert connector.put("0", "1", "key", {"f": print}) == (False, 0, None)
        assert "builtin_function" in connector.last_error, "last_error says what can't be stored"
        self.check_pending(connector, 0)

    def test_cleanup_drops_a_requests_keys_and_no_others(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        all_metadata = {key: self.put(producer, key, {"a": 1}) for key in ("r1", "r1_0", "0_r1", "r10", "xr1")}
        producer.cleanup("r1")
        producer.cleanup("unknown")
        there = {key for key, metadata in all_metadata.items() if self.get(consumer, key, metadata, **_KEEP)}
        assert there == {"r10", "xr1"}

    def test_close_may_be_called_twice_and_refuses_afterwards(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        metadata = self.put(producer, "a", self.payload(100_000, 3))
        got = self.get(consumer, "a", metadata, **_KEEP)
        for connector in (producer, consumer) * 2:
            connector.close()
        assert producer.put("0", "1", "b", self.payload(100_000)) == (False, 0, None)
        # What was fetched belongs to the consumer.
        assert self.is_intact(got)

    def test_health_has_a_status(self, make: MakeConnector) -> None:
        connector = make()
        self.put(connector, "a", {"a": 1})
        assert connector.health()["status"] == "healthy"
        self.check_pending(connector, 1)

    def test_what_was_got_may_be_changed_without_changing_it_for_others(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        metadata = self.put(producer, "key", self.payload(800_000))
        first = self.get(consumer, "key", metadata, **_KEEP)
        for array in first.values():
            if isinstance(array, int):
                continue
            if hasattr(array, "flags") and not array.flags.writeable:
                # It can't be changed at all.
                return
            array += 1  # noqa: PLW2901 - in place
        assert not self.is_intact(first)
        assert self.is_intact(self.get(consumer, "key", metadata, **_KEEP))

    def test_what_was_got_stays_as_it_is_when_its_producer_drops_it(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        held = self.get(consumer, "first", self.put(producer, "first", self.payload(200_000, 1)), **_KEEP)
        producer.cleanup("first")
        for number in range(20):
            metadata = self.put(producer, f"k{number}", self.payload(200_000, 100 + number))
            got = self.get(consumer, f"k{number}", metadata, **_KEEP)
            assert (got["seed"], self.is_intact(got)) == (100 + number, True)
            producer.cleanup(f"k{number}")
        assert (held["seed"], self.is_intact(held)) == (1, True)
        consumer.release(held)
        consumer.release(object())

    def test_many_threads_get_at_once(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        stored = {f"k{number}": self.put(producer, f"k{number}", self.payload(500_000, number)) for number in range(8)}

        def read(key: str) -> bool:
            got = self.get(consumer, key, stored[key], **_KEEP)
            return got["seed"] == int(key[1:]) and self.is_intact(got)

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read, list(stored) * 8))

    def test_puts_and_gets_of_many_threads_do_not_mix(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()

        def wrong(base: int) -> list[int]:
            found = []
            for number in range(base, base + 15):
                metadata = self.put(producer, f"k{number}", self.payload(70_000 + number, number))
                got = self.get(consumer, f"k{number}", metadata, **_KEEP)
                if got is None or got["seed"] != number or not self.is_intact(got):
                    found.append(number)
                producer.cleanup(f"k{number}")
            return found

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(wrong, (0, 100, 200, 300))) == [[]] * 4
        self.check_pending(producer, 0)

    def test_a_deadline_that_has_passed_is_an_error_or_not_needed(self, make: MakeConnector) -> None:
        producer, consumer = make(), make()
        metadata = self.put(producer, "key", self.payload(1000, 1))
        try:
            got = self.get(consumer, "key", metadata, timeout_s=0.0, **_KEEP)
        except TransferTimeoutError:
            return
        assert self.is_intact(got)

    def test_cancel_of_what_is_not_under_way_is_silent(self, make: MakeConnector) -> None:
        connector = make()
        connector.cancel("unknown")
        metadata = self.put(connector, "key", {"a": 1})
        connector.cancel("key")
        assert self.get(make(), "key", metadata) == {"a": 1}

    def test_the_endpoint_is_text_and_numbers(self, make: MakeConnector) -> None:
        found: Mapping[Any, Any] = make().endpoint()
        assert all(isinstance(name, str) and isinstance(value, str | int | float) for name, value in found.items())

    def test_beyond_the_limits_of_an_edge_put_fails_at_once_and_says_which(self, make: MakeConnector) -> None:
        """1. two in flight are allowed: the third is refused until one is cleaned up
        2. one unfetched hand-off is allowed: the next one is refused until that one is fetched
        3. bytes are bounded in the same way; the same key again needs no room of its own.
        """
        producer, consumer = make(max_inflight=2), make()
        self.put(producer, "a", self.payload(1000))
        self.put(producer, "b", self.payload(1000))
        begun_s = time.monotonic()
        assert producer.put("0", "1", "c", self.payload(1000)) == (False, 0, None)
        assert time.monotonic() - begun_s < 0.5, "put never waits"
        assert "max_inflight is 2" in producer.last_error
        self.put(producer, "b", self.payload(1000))
        producer.cleanup("a")
        self.put(producer, "c", self.payload(1000))
        window = make(window_size=1)
        first = self.put(window, "a", self.payload(1000))
        assert window.put("0", "1", "b", self.payload(1000)) == (False, 0, None)
        assert "window_size is 1" in window.last_error
        assert self.get(consumer, "a", first, **_KEEP) is not None
        # Over a network the producer learns of the fetch a moment later.
        until_s = time.monotonic() + _SOON_S
        while not window.put("0", "1", "b", self.payload(1000))[0]:
            assert time.monotonic() < until_s, "what was fetched makes no room"
            time.sleep(0.01)
        narrow = make(max_inflight_bytes=100_000)
        self.put(narrow, "a", self.payload(60_000))
        assert narrow.put("0", "1", "b", self.payload(60_000)) == (False, 0, None)
        assert "max_inflight_bytes is 100000" in narrow.last_error
        self.put(narrow, "a", self.payload(60_000))

    def test_what_was_consumed_makes_room(self, make: MakeConnector) -> None:
        producer, consumer = make(max_inflight=3), make()
        for number in range(20):
            metadata = self.put(producer, f"k{number}", self.payload(1000, number))
            assert self.get(consumer, f"k{number}", metadata)["seed"] == number

    def test_what_nobody_cleans_up_goes_after_its_time(self, make: MakeConnector) -> None:
        producer, consumer = make(ttl_s=0.05), make()
        metadata = self.put(producer, "old", {"a": 1})
        time.sleep(0.1)
        self.put(producer, "new", {"a": 1})
        self.check_pending(producer, 1)
        assert self.get(consumer, "old", metadata) is None

    def check_pending(self, producer: OmniConnectorBase, count: int) -> None:
        """Raise AssertionError if ``health`` counts other than ``count`` hand-offs, where it counts them."""
        assert "pending" not in self.offers or producer.health()["pending"] == count


#: The tests of ConnectorContract that are run only for what is offered.
_OFFERED: Final = {
    "limits": (
        "test_beyond_the_limits_of_an_edge_put_fails_at_once_and_says_which",
        "test_what_was_consumed_makes_room",
    ),
    "ttl": ("test_what_nobody_cleans_up_goes_after_its_time",),
}
