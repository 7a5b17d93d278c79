"""The limit of how long an engine may take to load, kept by a thread: the main thread is in the load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def load_deadline(limit_s: float | None, give_up: Callable[[str], object]) -> Iterator[None]:
    """Call ``give_up`` with the reason, from a thread, if the block takes longer than ``limit_s``; None: no limit."""
    if limit_s is None:
        yield
        return
    timer = threading.Timer(
        limit_s, give_up, [f"its engine had not loaded within {limit_s:g} s (--stage-init-timeout)"]
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
