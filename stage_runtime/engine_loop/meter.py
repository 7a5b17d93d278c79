"""EngineMeter: counts the engine's work for metrics, and reads what the engine measures itself. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

from stage_runtime.engine_loop.running import Running
from stage_runtime.engines.base import EngineOutput

logger = logging.getLogger(__name__)

_READ_INTERVAL_S: Final = 0.25
#: What ``MeasuredEngine.metrics`` may name.
_NAMES: Final = ("requests_running", "requests_waiting", "kv_cache_usage")


class EngineMeter:
    """Written by the engine's thread; every attribute may be read by others."""

    def __init__(self, metrics: Callable[[], Mapping[str, float]] | None) -> None:
        self._metrics = metrics
        self._read_at_s = float("-inf")
        self.steps = 0
        #: Tokens of the prompts of requests that ended, and tokens that were put out.
        self.prompt_tokens = 0
        self.completion_tokens = 0
        #: The engine's own figures, replaced as a whole; empty if it has none.
        self.engine: Mapping[str, float] = {}

    def count_output(self, running: Running, output: EngineOutput) -> None:
        """Count the tokens of one output."""
        tokens = len(output.token_ids)
        running.tokens += tokens
        self.completion_tokens += tokens

    def count_end(self, running: Running, output: EngineOutput) -> None:
        """Count the end of a request, or of its present segment, by the usage that comes with it."""
        self.prompt_tokens += output.usage.get("prompt_tokens", 0)
        if not running.tokens and running.work.resume is None:
            # The engine puts out text, or sound, and tells the number of its tokens only now.
            self.completion_tokens += output.usage.get("completion_tokens", 0)

    def read_engine(self, now_s: float) -> None:
        """Read the engine's own figures, at most four times a second. An exception of the engine costs only these."""
        if self._metrics is None or now_s < self._read_at_s + _READ_INTERVAL_S:
            return
        self._read_at_s = now_s
        try:
            found = self._metrics()
            figures = {name: float(found[name]) for name in _NAMES if name in found}
            self.engine = {name: figure for name, figure in figures.items() if math.isfinite(figure)}
        except Exception:
            logger.exception("engine.metrics_failed: they are not read any more")
            self._metrics, self.engine = None, {}
