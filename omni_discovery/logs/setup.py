"""How this process logs to standard error: from which level on, and as text or JSON."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import msgspec

from omni_discovery.logs.lines import bounded, bounded_traceback, json_line, relayed_line, text_line

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")

_TEXT: Final = "%(asctime)s %(levelname)-7s %(message)s"
_DATE: Final = "%Y-%m-%d %H:%M:%S"
#: Loggers of this project. Libraries write thousands of debug lines.
_OURS: Final = ("omni_discovery", "stage_runtime", "hub")

logger = logging.getLogger(__name__)


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--log-level`` and ``--log-format`` say."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"

    @property
    def is_json(self) -> bool:
        """Whether each line is a JSON object."""
        return self.format == "json"


class _Formatter(logging.Formatter):
    """Whose tracebacks are bounded."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """See logging.Formatter."""
        return bounded_traceback(super().formatException(ei))


class TextFormatter(_Formatter):
    """Date, level and message, with the traceback indented behind them."""

    def __init__(self, form: str = _TEXT) -> None:
        super().__init__(form, _DATE)

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return text_line(super().format(bounded(record)))


class JsonFormatter(_Formatter):
    """One JSON object per record."""

    def __init__(self) -> None:
        super().__init__()
        #: What each line says of this process. Swapped whole, so that any thread may format meanwhile.
        self.process: dict[str, Any] = {"pid": os.getpid()}

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        error = self.formatException(record.exc_info) if record.exc_info else ""
        return json_line(bounded(record), self.process, error)


class LoggedStream(io.TextIOBase):
    """In place of ``sys.stderr``: each line that somebody prints there is written as a JSON object, at any level.

    Bytes that are written to ``buffer`` go where they would have gone.
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO, formatter: JsonFormatter) -> None:
        super().__init__()
        self.buffer = stream.buffer
        self._stream = stream
        self._formatter = formatter
        self._unfinished = ""

    def write(self, text: str) -> int:
        """See TextIOBase."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            if line.strip():
                content = relayed_line(line.encode("utf-8", "replace"), datetime.now(UTC), self._formatter.process)
                # A full disk costs the line.
                with contextlib.suppress(OSError):
                    self._stream.write(f"{content.decode()}\n")
                    self._stream.flush()
        # Of a progress bar, which never ends its line, what a terminal would show.
        self._unfinished = self._unfinished.rpartition("\r")[2]
        return len(text)

    def fileno(self) -> int:
        """See IOBase."""
        return self._stream.fileno()


class _Handler(logging.StreamHandler[TextIO]):
    """The handler of ``set_up_logging``, told from those of a program that has set up its logging itself."""


def set_up_logging(options: LogOptions) -> None:
    """Log to standard error from now on; a second call, as in a forked process, replaces the first.

    Below ``info`` only this project's own lines are logged. Does nothing where somebody else has set up logging.
    """
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, _Handler)]
    if root.handlers and not ours:
        return
    for former in ours:
        root.removeHandler(former)
    level, stream = logging.getLevelNamesMapping()[options.level.upper()], sys.stderr
    formatter: logging.Formatter = TextFormatter()
    if options.is_json:
        formatter = as_json = JsonFormatter()
        if sys.__stderr__ is not None:
            stream, sys.stderr = sys.__stderr__, LoggedStream(sys.__stderr__, as_json)
    handler = _Handler(stream)
    handler.setFormatter(formatter)
    # Libraries set levels of their own loggers.
    handler.setLevel(level)
    root.addHandler(handler)
    root.setLevel(max(level, logging.INFO))
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
    if options.is_json:
        # What Python itself would print in several lines.
        logging.captureWarnings(capture=True)
        sys.excepthook = _log_crash
        threading.excepthook = _log_thread_crash


@contextlib.contextmanager
def kept_log_levels() -> Iterator[None]:
    """Undo what the block does to the levels of the root logger and its handlers, as some libraries do on import."""
    root = logging.getLogger()
    level, of_handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, its_level in of_handlers:
            handler.setLevel(its_level)


def identify_process(**names: object) -> None:
    """Have each JSON line of this process say its ``stage``, ``replica`` and ``epoch`` from now on. From any thread."""
    formatter = _json_formatter()
    if formatter is not None:
        formatter.process = {**formatter.process, **names}


def identify_server(number: int) -> None:
    """Have each line of this process say which API server it is. Used before there are other threads."""
    identify_process(server=number)
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextFormatter):
            handler.setFormatter(TextFormatter(f"[api server {number}] {_TEXT}"))


def logs_json() -> bool:
    """Whether this process logs JSON, so that nothing else may be printed on standard error."""
    return _json_formatter() is not None


def _json_formatter() -> JsonFormatter | None:
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return next((each for each in formatters if isinstance(each, JsonFormatter)), None)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("process.crashed error=%s", kind.__name__, exc_info=(kind, error, trace))


def _log_thread_crash(crash: threading.ExceptHookArgs) -> None:
    if crash.exc_value is not None:
        _log_crash(crash.exc_type, crash.exc_value, crash.exc_traceback)
