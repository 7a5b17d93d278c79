"""A process that logs as it was told, tried as a process: logging is set up once for all of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
import time
from decimal import Decimal
from typing import Any

import pytest

from omni_discovery.commands.flags import read_log_options
from omni_discovery.logs.setup import JsonFormatter, LogOptions, TextFormatter, set_up_logging
from stage_runtime.cli import build_parser
from tests.support.terminal import HOSTILE, obeyed

HEAD = """
import logging, os, threading, warnings
from omni_discovery.commands.output import configure_logging, say
from omni_discovery.logs.setup import LogOptions, identify_process

def lines():
    for name in ("hub.x", "a.library"):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), level)("a.b from=%s", name)
"""


def printed(program: str) -> list[str]:
    whole = f"{HEAD}\n{textwrap.dedent(program)}"
    ended = subprocess.run([sys.executable, "-c", whole], check=False, capture_output=True, text=True, timeout=60)
    return ended.stderr.splitlines()


def objects(program: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed(program)]


def test_text_has_the_date_and_the_level_that_was_asked_for() -> None:
    assert printed('configure_logging(LogOptions(level="error")); lines()')[0][:5].startswith("20")
    levels = {
        level: len(printed(f'configure_logging(LogOptions(level="{level}")); lines()'))
        for level in ("error", "warning")
    }
    assert levels == {"error": 2, "warning": 4}


def test_debug_is_that_of_this_project_and_not_of_libraries() -> None:
    found = objects('configure_logging(LogOptions(level="debug", format="json")); lines()')
    assert [each["level"] for each in found if each["fields"]["from"] == "hub.x"] == [
        "debug",
        "info",
        "warning",
        "error",
    ]
    assert [each["level"] for each in found if each["fields"]["from"] == "a.library"] == ["info", "warning", "error"]


def test_with_json_nothing_else_is_printed() -> None:
    """1. errors of the command, warnings of Python and tracebacks of crashed threads are objects
    2. so is the exception that ends the process; a line has the names that the process was given
    """
    program = """
        configure_logging(LogOptions(format="json"))
        identify_process(stage=1, replica="1/0")
        say("no such model", error=True)
        warnings.warn("old")
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        raise RuntimeError("the end")
    """
    error, warning, thread, last = objects(program)
    assert (error["event"], error["level"], error["message"]) == ("omni.error", "error", "no such model")
    assert "UserWarning: old" in warning["message"]
    assert (thread["event"], thread["fields"]) == ("process.crashed", {"error": "ZeroDivisionError"})
    assert last["exception"].endswith("RuntimeError: the end")
    assert {(each["stage"], each["replica"]) for each in (error, warning, thread, last)} == {(1, "1/0")}


def test_what_a_library_prints_on_standard_error_is_an_object_too() -> None:
    """1. also through a logging handler of its own, as torch has one; what is written as bytes goes out as it is
    2. the level is that of records: what is printed past them, such as a traceback, is never left out
    """
    program = """
        import sys
        configure_logging(LogOptions(format="json", level="error"))
        logging.getLogger("vllm.x").info("a.thing")
        print("half a", end=" ", file=sys.stderr)
        print("line", file=sys.stderr)
        print("10 %\\r20 %", end="\\r", file=sys.stderr)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("W1122 %(message)s"))
        torch = logging.getLogger("torch")
        torch.setLevel("INFO")
        torch.propagate = False
        torch.addHandler(handler)
        torch.warning("Triton not available")
        sys.stderr.buffer.write(b'{"relayed": 1, "event": "", "message": ""}\\n')
        sys.stderr.buffer.flush()
    """
    found = objects(program)
    assert [each["message"] for each in found] == ["half a line", "W1122 Triton not available", ""]
    assert [each["event"] for each in found[:2]] == ["text", "text"]


def test_a_full_disk_behind_the_log_costs_its_lines_and_nothing_else() -> None:
    program = """
        import sys
        configure_logging(LogOptions(format="json"))
        full = os.open("/dev/full", os.O_WRONLY)
        former = os.dup(2)
        os.dup2(full, 2)
        logging.getLogger("hub.x").info("a.lost")
        print("lost", file=sys.stderr)
        os.dup2(former, 2)
        logging.getLogger("hub.x").info("a.found")
    """
    assert objects(program)[-1]["event"] == "a.found"


def test_a_forked_process_says_its_own_id_once_it_has_set_up_its_logging() -> None:
    program = """
        configure_logging(LogOptions(format="json"))
        if os.fork() == 0:
            configure_logging(LogOptions(format="json"))
            logging.getLogger("hub.x").info("a.child pid=%d", os.getpid())
            os._exit(0)
        os.wait()
        logging.getLogger("hub.x").info("a.parent pid=%d", os.getpid())
    """
    child, parent = objects(program)
    assert (child["event"], parent["event"]) == ("a.child", "a.parent")
    assert child["pid"] == child["fields"]["pid"] != parent["pid"] == parent["fields"]["pid"]


def test_a_program_that_has_set_up_its_logging_keeps_it() -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    assert before
    set_up_logging(LogOptions(format="json", level="error"))
    assert (root.handlers, root.level) == (before, level)
    assert not any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)


def test_the_flags_are_read_by_supervisors_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    flags = ["--stage-id", "0", "--log-level", "debug", "--log-format", "json"]
    assert read_log_options(parser.parse_args(flags)) == LogOptions(level="debug", format="json")
    assert read_log_options(parser.parse_args(["--stage-id", "0"])) == LogOptions()
    with pytest.raises(SystemExit):
        parser.parse_args(["--stage-id", "0", "--log-level", "loud"])
    assert "invalid choice: 'loud'" in capsys.readouterr().err


@pytest.mark.attack("A18")
def test_a_value_of_a_line_and_the_text_of_an_error_are_text_and_pass_for_no_line_of_their_own() -> None:
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        error = sys.exc_info()
    record = logging.LogRecord("hub", logging.ERROR, "f.py", 1, "a.b reason=%s", (HOSTILE,), error)
    text = TextFormatter("%(levelname)s %(message)s").format(record)
    assert obeyed(text) == []
    first, second, *trace = text.splitlines()
    assert first.startswith("ERROR a.b reason=\\x1b]0;owned\\x07")
    assert second.startswith("    2026-01-01 00:00:00 ERROR   forged.line")
    assert trace[0] == "    Traceback (most recent call last):"
    assert obeyed(JsonFormatter().format(record)) == []


def test_a_library_that_silences_the_log_on_import_is_undone() -> None:
    program = """
        from omni_discovery.logs.setup import kept_log_levels
        configure_logging(LogOptions(level="error"))
        configure_logging(LogOptions(level="info"))
        root = logging.getLogger()
        try:
            with kept_log_levels():
                root.setLevel(logging.CRITICAL)
                root.handlers[0].setLevel(logging.CRITICAL)
                lines()
                raise ImportError
        except ImportError:
            lines()
    """
    assert [line.split()[2] for line in printed(program)] == ["INFO", "WARNING", "ERROR"] * 2


#: Megabytes of what has to be looked at character by character.
HUGE = "é" * (4 << 20)


@pytest.mark.attack("Z5")
@pytest.mark.parametrize(
    ("message", "args", "fields"),
    [
        ("Unknown part type: %s, among %d", (HUGE, 7), {}),
        ("request.failed request=%s stage=%d: %s", (HUGE, 1, "why"), {"request": True, "stage": 1}),
        ("a library's own %s", ([HUGE],), {}),
        (f"a library's own {HUGE}", (), {}),
        (f"a library's own {HUGE} 100%", None, {}),
        ("%(what)s", ({"what": HUGE},), {}),
    ],
)
def test_what_a_client_has_sent_makes_no_line_of_megabytes(message: str, args: Any, fields: dict[str, Any]) -> None:
    """Neither as text nor as JSON; what is short in the message is there whole."""
    record = logging.LogRecord("vllm", logging.WARNING, "f.py", 1, message, args, None)
    began_s = time.thread_time()
    text, line = TextFormatter().format(record), JsonFormatter().format(record)
    assert time.thread_time() - began_s < 0.5
    assert max(len(text), len(json.loads(line).get("message", ""))) < 10_000
    assert len(line) < 60_000
    assert "..." in text
    found = json.loads(line)
    assert found.get("stage") == fields.get("stage")
    assert ("request" in found) == ("request" in fields)


@pytest.mark.attack("Z5")
def test_neither_does_an_error_with_such_a_text() -> None:
    try:
        raise ValueError(HUGE)
    except ValueError:
        record = logging.LogRecord("hub", logging.ERROR, "f.py", 1, "a bug", (), sys.exc_info())
    text, line = TextFormatter().format(record), JsonFormatter().format(record)
    assert len(text) < 80_000
    assert len(json.loads(line)["exception"]) < 80_000
    assert text.startswith("20")
    assert "ValueError" in text


@pytest.mark.attack("Z5")
def test_a_message_of_several_long_values_has_no_field_that_a_value_made() -> None:
    values = tuple(f"{'v' * 2600} request=forged stage=9" for _ in range(5))
    template = "request.failed request=%s a=%s b=%s c=%s: %s"
    record = logging.LogRecord("hub", logging.WARNING, "f.py", 1, template, ("mine", *values[1:]), None)
    found = json.loads(JsonFormatter().format(record))
    assert (found["event"], found["request"], found.get("stage")) == ("request.failed", "mine", None)
    whole = logging.LogRecord(
        "hub", logging.WARNING, "f.py", 1, f"request.failed request=x {'v' * 9000} stage=9", None, None
    )
    assert "stage" not in json.loads(JsonFormatter().format(whole))


def test_values_that_are_no_text_stay_what_they_are_in_a_long_message() -> None:
    args = (HUGE, None, Decimal("1.5"), 7, True)
    record = logging.LogRecord(
        "hub", logging.INFO, "f.py", 1, "a.b text=%s none=%s price=%.1f count=%d on=%s", args, None
    )
    fields = json.loads(JsonFormatter().format(record))["fields"]
    assert (fields["none"], fields["price"], fields["count"], fields["on"]) == (None, 1.5, 7, True)
    assert "price=1.5" in TextFormatter().format(record)


def test_arguments_that_do_not_fit_are_one_line_as_ever() -> None:
    record = logging.LogRecord("hub", logging.INFO, "f.py", 1, "a.b x=%d", ("no",), None)
    assert "a.b x=%d" in json.loads(JsonFormatter().format(record))["message"]
