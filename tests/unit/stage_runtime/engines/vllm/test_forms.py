"""The threads that check and compile forms of answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from stage_runtime.engines.vllm.forms.threads import put_forms_behind_engine
from tests.support.panics import panic


@pytest.mark.attack("L1")
def test_a_panic_in_a_thread_of_forms_is_an_exception_there() -> None:
    """VLLM ends one request for that; what is no Exception ended its step."""
    manager = SimpleNamespace(executor=ThreadPoolExecutor(1))
    threads = put_forms_behind_engine(SimpleNamespace(engine_core=SimpleNamespace(engine_core=core_of(manager))))
    assert manager.executor is threads

    def raise_it(error: BaseException) -> None:
        raise error

    with threads:
        assert threads.submit(str, 7).result() == "7"
        with pytest.raises(RuntimeError, match="a library panicked: unclosed group"):
            threads.submit(raise_it, panic("unclosed group")).result()
        for other in (ValueError("no"), SystemExit()):
            with pytest.raises(type(other)):
                threads.submit(raise_it, other).result()


def core_of(manager: Any) -> Any:
    return SimpleNamespace(structured_output_manager=manager)
