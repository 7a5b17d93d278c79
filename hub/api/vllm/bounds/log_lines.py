"""Lines that vLLM's server logs once: it remembers what they were made of, which may be megabytes of a client's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm import logger as vllm_logger

from hub.api.vllm.bounds.wrapping import wrapped_once
from omni_discovery.text import shortened

#: The longest text of such a line, in characters.
MOST: Final = 256
_PRINTERS: Final = {"_print_debug_once", "_print_info_once", "_print_warning_once", "_print_error_once"}


def remember_little() -> None:
    """Have vLLM's own logging remember, and write, no long text. Idempotent."""
    known = vars(vllm_logger)
    # Not each version has each of them.
    for name in known.keys() & _PRINTERS:
        known[name] = wrapped_once(known[name], _with_short_texts)


def _with_short_texts(prints: Any) -> Callable[..., Any]:
    def print_short(logger: Any, message: str, *args: Any) -> Any:
        if not args:
            return prints(logger, shortened(message, MOST))
        return prints(logger, message, *(shortened(each, MOST) if isinstance(each, str) else each for each in args))

    return print_short
