"""What holds for all tests."""

from __future__ import annotations

import signal
from contextlib import suppress


def pytest_configure() -> None:
    """Let Ctrl-C reach the tests' children: a script's background jobs start with SIGINT ignored, and inherit that.

    No property is judged by its time, which is the machine's.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The environment of vLLM-Omni has no hypothesis.
    with suppress(ImportError):
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile("any machine", settings.default, deadline=None, suppress_health_check=slow)
        settings.load_profile("any machine")
