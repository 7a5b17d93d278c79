"""Log records as one JSON object per line, with the values of the message as fields.

A message of ours is an event, then ``key=%s`` for each value, then text, as in ``"replica.removed replica=%s: why"``.
The fields are read from the template and its arguments, so that no value can pass for another field. Pure.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from numbers import Number
from typing import Any, Final

from omni_discovery.text import replace_hidden, shortened

#: The event of a line that is not one of ours: a library's log record, and what a child process prints.
FOREIGN_EVENT: Final = "text"

_EVENT: Final = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_.%]+(?=[\s:]|$)")
_PAIR: Final = re.compile(r"\s+([A-Za-z_]\w*)=(\S*)")
_CONVERSION: Final = re.compile(r"%[-#0 +]*+\d*+(?:\.\d++)?+[a-zA-Z%]")
#: Keys of the object itself; a field of the same name stands in ``fields``.
_LIFTED: Final = ("stage", "replica", "epoch", "request", "trace")
#: The longest message, in characters: what a client has sent may be megabytes, and a library may log it whole. And the
#: longest traceback.
_MOST_MESSAGE: Final = 8192
_MOST_TRACEBACK: Final = 64 << 10
#: What a replica is called in logs, tables and errors.
_REPLICA: Final = re.compile(r"\d+/\d+")


def bounded(record: logging.LogRecord) -> logging.LogRecord:
    """The record, or one like it whose message is no longer than a line may be."""
    try:
        message = record.getMessage()
    except (TypeError, ValueError, LookupError):
        # Its arguments don't fit, which is told by who formats it.
        return record
    if len(message) <= _MOST_MESSAGE:
        return record
    short = logging.makeLogRecord(record.__dict__)
    if isinstance(record.args, tuple) and record.args:
        most = _MOST_MESSAGE // (len(record.args) + 1)
        short.args = tuple(_short(each, most) for each in record.args)
        try:
            if len(short.getMessage()) <= _MOST_MESSAGE:
                return short
        except (TypeError, ValueError, LookupError):
            # A value of a kind of its own, of which the message says how it is written.
            pass
    # One value: nothing in it is taken for an event or a field.
    short.msg, short.args = "%s", (shortened(message, _MOST_MESSAGE),)
    return short


def _short(value: object, most: int) -> object:
    if value is None or isinstance(value, Number):
        return value
    text = str(value)
    return value if len(text) <= most else shortened(text, most)


def bounded_traceback(text: str) -> str:
    """A formatted traceback, cut in its middle where it is longer than any that is read."""
    return shortened(text, _MOST_TRACEBACK)


def json_line(record: logging.LogRecord, process: Mapping[str, Any], error: str = "") -> str:
    """One record as a JSON object without line breaks.

    ``process`` holds what the writing process knows of itself: ``pid``, and ``stage``, ``replica`` and ``epoch`` where
    it has one. ``error`` is the formatted traceback. ``extra={"fields": {...}}`` of a log call adds fields.
    """
    event, fields, text = parse_message(str(record.msg), record.args)
    given = getattr(record, "fields", None)
    if isinstance(given, Mapping):
        fields.update(given)
    lifted = _lifted(fields)
    if lifted.get("replica", process.get("replica")) != process.get("replica"):
        # The line is about another replica, of whose life this process knows what the line says.
        process = {name: value for name, value in process.items() if name != "epoch"}
    return line_of(
        datetime.fromtimestamp(record.created, UTC),
        record.levelname.lower(),
        record.name,
        event,
        {**process, **lifted},
        {name: value for name, value in fields.items() if name not in _LIFTED},
        message=text,
        exception=error,
    )


def line_of(
    time: datetime,
    level: str,
    logger: str,
    event: str,
    where: Mapping[str, Any],
    fields: Mapping[str, Any],
    **texts: str,
) -> str:
    """The object: ``where`` (pid, stage, replica, epoch, request, trace) beside time and event; no empty texts."""
    head = {"time": _rfc3339(time), "level": level, "logger": logger, "event": event, **where}
    if fields:
        head["fields"] = fields
    return json.dumps(_plain({**head, **{name: text for name, text in texts.items() if text}}), default=str)


def text_line(text: str) -> str:
    """The text of one record for a file or a terminal.

    What follows its first line is indented, so that no value can pass for a record of its own, and what a terminal
    might obey is shown by its code.
    """
    lines = text.split("\n")
    return "\n    ".join(replace_hidden(line, _code, "\t") for line in lines)


def _code(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def relayed_line(line: bytes, time: datetime, where: Mapping[str, Any]) -> bytes:
    """A line that a child process has printed as a JSON object: as it is if it is one, else wrapped."""
    if line.startswith(b"{") and _is_ours(line):
        return line
    text = line.decode("utf-8", "replace").rstrip("\r")
    return line_of(time, "info", "output", FOREIGN_EVENT, where, {}, message=text).encode()


def parse_message(template: str, args: object) -> tuple[str, dict[str, Any], str]:
    """The event, the fields and the text behind them of a log call. A message of another form is all text."""
    values = args if isinstance(args, tuple) else () if args is None or args == {} else None
    event = _EVENT.match(template)
    try:
        if values is None or event is None:
            return FOREIGN_EVENT, {}, template % args if args else template
        return _parse_event(template, event.end(), values)
    except (TypeError, ValueError, IndexError):
        return FOREIGN_EVENT, {}, f"{template} {args!r}"


def _parse_event(template: str, end: int, values: tuple[object, ...]) -> tuple[str, dict[str, Any], str]:
    taken = len(_conversions(template[:end]))
    event = _render(template[:end], values[:taken])
    fields: dict[str, Any] = {}
    while pair := _PAIR.match(template, end):
        word, is_last = pair[2], pair[2].endswith(":")
        word = word.removesuffix(":") if is_last else word
        count = len(_conversions(word))
        fields[pair[1]] = _value(word, values[taken : taken + count])
        taken += count
        end = pair.end() - is_last
        if is_last:
            break
    return event, fields, _render(template[end:], values[taken:]).lstrip(": ")


def _value(word: str, args: tuple[Any, ...]) -> Any:
    """One value: a number or truth value as it is, all else as it would stand in the text."""
    rendered = _render(word, args)
    if not args and rendered.isdecimal() and rendered.isascii():
        return int(rendered)
    if len(args) != 1 or not _CONVERSION.fullmatch(word):
        return rendered
    (arg,), kind = args, word[-1]
    if kind in "feEgG":
        return float(rendered)
    return arg if kind in "dsi" and isinstance(arg, bool | int | float | None) else rendered


def _render(template: str, args: tuple[object, ...]) -> str:
    # Without arguments, logging leaves a "%" as it is.
    return template % args if args else template


def _conversions(template: str) -> list[str]:
    return [found for found in _CONVERSION.findall(template) if found != "%%"]


def _lifted(fields: Mapping[str, Any]) -> dict[str, Any]:
    lifted = {name: fields[name] for name in _LIFTED if fields.get(name) not in (None, "", "-")}
    replica, stage = str(lifted.get("replica", "")), str(lifted.get("stage", ""))
    if stage.isdecimal():
        lifted["stage"] = int(stage)
    if "stage" not in lifted and _REPLICA.fullmatch(replica):
        lifted["stage"] = int(replica.partition("/")[0])
    return lifted


def _plain(value: Any) -> Any:
    """The value without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value


def _rfc3339(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_ours(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and all(isinstance(found.get(name), str) for name in ("time", "level", "event"))
