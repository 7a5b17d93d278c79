"""Texts of errors: vLLM's server looks for paths in them, in a time that grows with the cube of their length."""

from __future__ import annotations

from typing import Any, Final

from vllm.entrypoints.serve.exception_handling import utils

from omni_discovery.text import shortened

#: Characters of an error in which paths are looked for; of longer ones a client gets as many.
MOST: Final = 1000


class _ShortTexts:
    """The library of patterns, for short texts."""

    def __init__(self, patterns: Any) -> None:
        self._patterns = patterns

    def sub(self, pattern: str, instead: str, text: str) -> str:
        """See ``re.sub``."""
        return str(self._patterns.sub(pattern, instead, shortened(text, MOST)))


def look_through_short_texts() -> None:
    """Have vLLM's server look through short texts only. Idempotent."""
    # The library, and not the function, which other modules have by name.
    module: Any = utils
    if not isinstance(module.re, _ShortTexts):
        module.re = _ShortTexts(module.re)
