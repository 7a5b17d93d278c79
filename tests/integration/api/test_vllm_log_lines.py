"""What vLLM's server logs of a client's texts, and what it remembers of them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.attack("Z5")
@pytest.mark.parametrize("method", ["debug_once", "info_once", "warning_once"])
def test_a_line_that_is_logged_once_is_short_and_is_remembered_short(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a line for each beginning and end of a text, and another one for another."""
    from vllm import logger as vllm_logger

    from hub.api.vllm.bounds import log_lines

    heard: list[tuple[Any, ...]] = []
    printer = f"_print_{method}"
    monkeypatch.setattr(vllm_logger, printer, lambda _logger, _message, *args: heard.append(args))
    log_lines.remember_little()
    logger = vllm_logger.init_logger("vllm.test_log_lines")
    monkeypatch.setattr(vllm_logger, "_should_log_with_scope", lambda _scope: True, raising=False)
    getattr(logger, method)("unknown type %s of %d", "x" * (1 << 20), 3)
    ((text, number),) = heard
    assert (len(text), number) == (log_lines.MOST, 3)
