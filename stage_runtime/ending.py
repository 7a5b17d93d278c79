"""How a replica's process ends: every part is closed, and none of them can keep the others or the process for ever."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def close_part(name: str, close: Callable[[], object]) -> None:
    """Close one part. What it raises is logged, and changes neither what comes next nor the exit code."""
    try:
        close()
    except Exception:
        logger.exception("replica.close_failed part=%s", name)


@contextmanager
def ended_within(timeout_s: float, exit_code: int, end_process: Callable[[int], object] = os._exit) -> Iterator[None]:
    """End the process with ``exit_code`` if the block takes longer: engines have hung in their own shutdown."""

    def end() -> None:
        logger.error("replica.close_hung after_s=%g code=%d: ending without it", timeout_s, exit_code)
        logging.shutdown()
        end_process(exit_code)

    watchdog = threading.Timer(timeout_s, end)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
