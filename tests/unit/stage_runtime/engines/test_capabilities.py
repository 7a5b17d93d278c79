"""What an engine offers is looked up once, by typed names; a name that is nearly an optional one is reported."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig
from stage_runtime.engine_loop.loop import EngineLoop
from stage_runtime.engine_loop.payloads import Payloads
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.capabilities import (
    OPTIONAL_ATTRIBUTES,
    OPTIONAL_METHODS,
    capabilities_of,
    misspelled_members,
)
from stage_runtime.engines.echo.engine import EchoEngine
from tests.support.replica_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[4]


class Misspelled(ScriptedEngine):
    """Two names that nothing reads."""

    control: dict[str, Any] = {}  # noqa: RUF012

    def udpate(self, request: StageRequest) -> None:
        del request


class Delegating:
    """Passes everything on to another engine, as a wrapper of a third party may."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_engine_without_options_offers_none() -> None:
    offered = capabilities_of(ScriptedEngine())
    assert all(getattr(offered, name) is None for name in OPTIONAL_METHODS)
    assert (offered.controls(), offered.model_details(), offered.can_resume(), offered.takes_companions()) == (
        {},
        {},
        False,
        False,
    )


@pytest.mark.parametrize("wrap", [lambda engine: engine, Delegating])
def test_an_engine_is_deterministic_only_where_it_says_true(wrap: Any) -> None:
    for said, counts in ((True, True), (False, False), (None, False), ("yes", False)):
        engine = ScriptedEngine()
        engine.deterministic = said  # type: ignore[attr-defined]
        assert capabilities_of(wrap(engine)).is_deterministic() is counts
    assert not capabilities_of(wrap(ScriptedEngine())).is_deterministic()


@pytest.mark.parametrize("wrap", [lambda engine: engine, Delegating])
def test_what_an_engine_has_is_found_also_behind_a_wrapper(wrap: Any) -> None:
    engine = EchoEngine(StageConfig(stage_id=0, engine="echo"))
    offered = capabilities_of(wrap(engine))
    assert offered.update == engine.update
    assert offered.feed == engine.feed
    assert offered.wants == engine.wants
    assert offered.pause == engine.pause
    assert offered.controls() == engine.controls
    assert offered.can_resume()
    assert offered.takes_companions()


def test_a_method_that_is_none_is_not_offered() -> None:
    engine = ScriptedEngine()
    engine.pause = None  # type: ignore[attr-defined]
    assert capabilities_of(engine).pause is None


def test_attributes_are_read_when_they_are_used() -> None:
    """Loading may change them, and the loop is built before that."""
    engine = ScriptedEngine()
    offered = capabilities_of(engine)
    engine.takes_companions = True
    assert offered.takes_companions()


def test_a_misspelled_member_is_reported_when_the_loop_is_built(caplog: pytest.LogCaptureFixture) -> None:
    sentences = [
        "attribute 'control' is near 'controls' and is never read",
        "method 'udpate' is near 'update' and is never called",
    ]
    assert sorted(misspelled_members(Misspelled())) == sentences
    with caplog.at_level(logging.WARNING):
        EngineLoop(Misspelled(), Payloads(0, {}, lambda: 0.0), {}, lambda _: None)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"engine.misspelled engine=Misspelled {sentence}" for sentence in sentences
    ]


def test_a_name_near_an_option_that_is_offered_is_no_misspelling() -> None:
    class Both(EchoEngine):
        def updates(self) -> None: ...

    assert misspelled_members(Both(StageConfig(stage_id=0, engine="echo"))) == []


def test_no_capability_is_asked_for_by_a_string() -> None:
    options = {*OPTIONAL_METHODS, *OPTIONAL_ATTRIBUTES}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "stage_runtime").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if any(isinstance(leaf, ast.Constant) and leaf.value in options for leaf in ast.walk(node.args[1]))
    ]
    assert found == []
