"""The contract suite finds what it is there to find: an engine for each way to break it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from omni_discovery.deploy.document import StageConfig
from stage_runtime.config import NotResumableError
from stage_runtime.engines.base import EngineOutput, StageRequest
from stage_runtime.engines.echo.engine import EchoEngine
from stage_runtime.testing import OPTIONAL, EngineContract


class Deaf(EchoEngine):
    """It does not hear of aborts."""

    def abort(self, key: str) -> None:
        del key


class Doubtful(EchoEngine):
    """It ends everything twice."""

    def step(self) -> list[EngineOutput]:
        said = super().step()
        return [*said, *(output for output in said if output.finished)]


class Careless(EchoEngine):
    """It takes a key that runs."""

    def add(self, request: StageRequest) -> None:
        self._speeches.pop(request.key, None)
        super().add(request)


class Polite(EchoEngine):
    """It takes what it can't serve."""

    def add(self, request: StageRequest) -> None:
        super().add(replace(request, inputs={"prompt": "x"}) if not request.inputs.get("prompt") else request)


class Restless(EchoEngine):
    """It can't be paused."""

    def pause(self, key: str, paused: bool) -> None:
        del key, paused


class Hasty(EchoEngine):
    """It ends before it has heard all."""

    def feed(self, key: str, from_stage: int, piece: Mapping[str, Any] | None, is_last: bool) -> None:
        super().feed(key, from_stage, piece, is_last)
        super().feed(key, from_stage, None, True)


class Forgetful(EchoEngine):
    """It takes further segments and does nothing with them."""

    def update(self, request: StageRequest) -> None:
        del request


class Sleepless(EchoEngine):
    """It says that it is awake, whatever it was told."""

    @property
    def controls(self) -> Mapping[str, Callable[..., Any]]:
        return {**super().controls, "is_sleeping": lambda: False}


class Repetitive(EchoEngine):
    """It says again what another replica has said."""

    def add(self, request: StageRequest) -> None:
        super().add(replace(request, resume=None))


class Moody(EchoEngine):
    """It says something else each time."""

    def step(self) -> list[EngineOutput]:
        self.steps = getattr(self, "steps", 0) + 1
        return [replace(output, text=f"{output.text}{self.steps}") for output in super().step()]


class Backward(EchoEngine):
    """Its progress goes back."""

    def load(self, report: Callable[[str, float], None]) -> None:
        report("loading", 0.5)
        report("loading", 0.2)


class Modest(EchoEngine):
    """It has something that its tests don't know of."""

    pause = None  # type: ignore[assignment]


class Boastful(EchoEngine):
    """It says that it works while it rests."""

    def metrics(self) -> Mapping[str, float]:
        return {"requests_running": 1, "requests_waiting": 0}


class Misspelling(EchoEngine):
    """One of its attributes is read by nothing."""

    def moved_at(self) -> float:
        return 0.0


class EchoContract(EngineContract):
    offers = frozenset(OPTIONAL) - {"deterministic", "gives_partial_images"}

    def __init__(self, kind: type[EchoEngine]) -> None:
        self._kind = kind

    def make_engine(self) -> EchoEngine:
        return self._kind(StageConfig(stage_id=0, engine="echo", engine_args={"capacity": 2}))

    def good_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": "one two three"})

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": ""})

    def pieces(self) -> list[dict[str, Any]]:
        return [{"token_ids": np.frombuffer(word, np.uint8)} for word in (b"to ", b"be ")]


TESTS = sorted(
    {name for name in dir(EchoContract) if name.startswith("test_")}
    - {OPTIONAL["deterministic"], OPTIONAL["gives_partial_images"]}
)
RESUMED = OPTIONAL["not_resumable"]


@pytest.mark.parametrize(
    ("kind", "found_by"),
    [
        (EchoEngine, set()),
        (Deaf, {"test_an_abort_ends_a_running_request_and_touches_no_other", "test_a_request_that_waits_can_be_aborted",
                OPTIONAL["pause"]}),
        (Doubtful, set(TESTS) - {"test_all_that_it_offers_is_tested", "test_loading_says_how_far_it_is",
                                 "test_no_optional_method_is_misspelled", OPTIONAL["metrics"]}),
        (Careless, {"test_a_key_that_runs_is_refused_and_goes_on"}),
        (Polite, {"test_a_bad_request_is_refused_at_the_door_and_leaves_nothing"}),
        (Restless, {OPTIONAL["pause"]}),
        (Hasty, {OPTIONAL["feed"]}),
        (Forgetful, {OPTIONAL["update"]}),
        (Sleepless, {OPTIONAL["controls"]}),
        (Repetitive, {RESUMED}),
        (Moody, {RESUMED, OPTIONAL["pause"],
                 "test_a_finished_request_may_come_again_under_its_key_and_is_answered_the_same"}),
        (Backward, {"test_loading_says_how_far_it_is"}),
        (Modest, {"test_all_that_it_offers_is_tested", OPTIONAL["pause"]}),
        (Boastful, {OPTIONAL["metrics"]}),
        (Misspelling, {"test_no_optional_method_is_misspelled"}),
    ],
)  # fmt: skip
def test_each_way_to_break_the_contract_is_found_by_the_tests_of_it(kind: type[EchoEngine], found_by: set[str]) -> None:
    found = set()
    for name in TESTS:
        contract = EchoContract(kind)
        engine = contract.make_engine()
        contract.reports = []  # type: ignore[misc]
        engine.load(lambda phase, share, reports=contract.reports: reports.append((phase, share)))
        try:
            getattr(contract, name)(engine)
        except (AssertionError, TypeError, NotResumableError, pytest.fail.Exception):
            found.add(name)
    assert found == found_by


def test_only_what_is_offered_is_tested() -> None:
    class Plain(EngineContract):
        offers = frozenset({"pause"})

    has = {name for name, test in OPTIONAL.items() if getattr(Plain, test) is not None}
    assert has == {"pause"}
