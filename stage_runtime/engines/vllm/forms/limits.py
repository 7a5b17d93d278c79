"""What llguidance may look through for one token of an answer, in the engine's step."""

from __future__ import annotations

from typing import Any

from omni_discovery.inputs.form_width import MAX_ROW, MAX_STEP


def limit_forms() -> None:
    """Have vLLM make its readers of forms with these limits from now on."""
    import llguidance
    from vllm.v1.structured_output import backend_guidance

    backend: Any = backend_guidance
    # vLLM's own stand-in would put the library into its place as it loads that.
    backend.llguidance = _Limited(llguidance)


class _Limited:
    """The library, whose matchers have our limits."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        return _LimitedMatcher(found, self._library.LLParserLimits) if name == "LLMatcher" else found


class _LimitedMatcher:
    """The class of matchers: it makes them with our limits, and has all that the class has."""

    def __init__(self, matcher: Any, limits: Any) -> None:
        self._matcher, self._limits = matcher, limits

    def __call__(self, *given: Any, **more: Any) -> Any:
        limits = self._limits(max_items_in_row=MAX_ROW, step_max_items=MAX_STEP)
        return self._matcher(*given, **{"limits": limits, **more})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)
