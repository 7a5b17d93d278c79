"""What vLLM's server logs of a client's texts, and what it remembers of them."""

from __future__ import annotations

import logging
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


@pytest.mark.attack("Z71")
def test_of_warnings_of_one_kind_few_are_written_and_short_ones() -> None:
    """One request has thousands of parts, and vLLM's server has a line for each part that is empty."""
    from hub.api.vllm.bounds import log_lines

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record)

    said: list[logging.LogRecord] = []
    logger = logging.getLogger("vllm.test_few_warnings")
    logger.addHandler(Said())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    log_lines.bound_warnings()
    log_lines.bound_warnings()
    for number in range(4000):
        logger.warning("Skipping part %s of %d", "x" * (1 << 20), number)
        logger.info("a request %d", number)
    for number in range(1000):
        logger.warning(f"{number} {'x' * 5000}")  # noqa: G004 - as vLLM-Omni does it
    logger.warning("another kind")
    warnings = [record.getMessage() for record in said if record.levelno == logging.WARNING]
    assert 20 < len(warnings) < 100
    assert max(map(len, warnings)) < 1100
    assert warnings[-1] == "another kind"
    assert sum(record.levelno == logging.INFO for record in said) == 4000
