"""What becomes of a request that vLLM refuses."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.vllm.runs import Runs
from tests.support.panics import panic

FORM = SimpleNamespace(structured_outputs=SimpleNamespace(json="{}"))
NO_FORM = SimpleNamespace(structured_outputs=None)


def runs_that_raise(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Runs:
    for name in ("vllm", "vllm.exceptions"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(VLLMValidationError=ValueError))

    class Llm:
        vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs"))

        def add_request(self, name: str, prompt: Any, params: Any, **more: Any) -> str:
            raise error

    return Runs(Llm())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(AssertionError("trigger must not be empty"), marks=pytest.mark.attack("L6")),
        pytest.param(RecursionError("trigger must not be empty\nand more"), marks=pytest.mark.attack("L6")),
        pytest.param(panic("trigger must not be empty\n  0: <unknown>"), marks=pytest.mark.attack("L1")),
    ],
)
def test_whatever_the_check_of_a_form_raises_is_its_clients_mistake(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    runs = runs_that_raise(monkeypatch, error)
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: .* this form: trigger must not be empty$"):
        runs.start("a", {"prompt": "x"}, FORM)
    assert not runs


@pytest.mark.parametrize(
    ("params", "error"),
    [(NO_FORM, AssertionError("no")), (NO_FORM, panic("no")), (FORM, MemoryError()), (FORM, KeyboardInterrupt())],
)
def test_other_failures_stay_the_engines(monkeypatch: pytest.MonkeyPatch, params: Any, error: BaseException) -> None:
    runs = runs_that_raise(monkeypatch, error)
    with pytest.raises(type(error)):
        runs.start("a", {"prompt": "x"}, params)
    assert not runs
