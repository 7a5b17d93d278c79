"""Lines that vLLM's server logs of what clients send: short ones, and few.

Of lines that it logs once it remembers what they were made of, which may be megabytes of a client's. Others it writes
for each part of a message, thousands for one request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from vllm import logger as vllm_logger

from hub.api.vllm.bounds.wrapping import wrapped_once
from omni_discovery.log_once import LinePace
from omni_discovery.text import shortened

#: The longest text of such a line, in characters.
MOST: Final = 256
#: Warnings of one kind that are written at once; and the longest that is written as it is.
_AT_ONCE: Final = 10
_LONGEST_LINE: Final = 1024
_LIBRARIES: Final = ("vllm", "vllm_omni")
_PRINTERS: Final = {"_print_debug_once", "_print_info_once", "_print_warning_once", "_print_error_once"}


def remember_little() -> None:
    """Have vLLM's own logging remember, and write, no long text. Idempotent."""
    known = vars(vllm_logger)
    # Not each version has each of them.
    for name in known.keys() & _PRINTERS:
        known[name] = wrapped_once(known[name], _with_short_texts)


def bound_warnings() -> None:
    """Have all loggers of vLLM that there are write few warnings of one kind, and short ones. Idempotent."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] in _LIBRARIES and isinstance(logger, logging.Logger):
            logger.addFilter(_FEW)


class _FewWarnings(logging.Filter):
    """Lets a line of each kind pass every second, and some more at first, with short texts in it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        #: By the place in the code that writes the line.
        self._paces: dict[tuple[str, int], LinePace] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging."""
        if record.levelno < logging.WARNING:
            return True
        place = record.pathname, record.lineno
        with self._lock:
            pace = self._paces.setdefault(place, LinePace(time.monotonic, _AT_ONCE))
            if not pace.may_log():
                return False
        if isinstance(record.args, tuple) and record.args:
            record.args = tuple(shortened(each, MOST) if isinstance(each, str) else each for each in record.args)
        elif not record.args:
            record.msg = shortened(str(record.msg), _LONGEST_LINE)
        return True


_FEW: Final = _FewWarnings()


def _with_short_texts(prints: Any) -> Callable[..., Any]:
    def print_short(logger: Any, message: str, *args: Any) -> Any:
        if not args:
            return prints(logger, shortened(message, MOST))
        return prints(logger, message, *(shortened(each, MOST) if isinstance(each, str) else each for each in args))

    return print_short
