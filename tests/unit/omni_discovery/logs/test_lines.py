"""Log records as JSON objects."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from omni_discovery.logs.lines import FOREIGN_EVENT, json_line, parse_message, relayed_line, text_line

NOON = datetime(2026, 11, 22, 12, 0, 0, 250_000, UTC)


def line(template: str, *args: object, error: str = "", process: dict[str, Any] | None = None, **extra: Any) -> Any:
    record = logging.LogRecord("hub.x", logging.WARNING, "x.py", 1, template, args, None)
    record.created = NOON.timestamp()
    vars(record).update(extra)
    text = json_line(record, process or {"pid": 7}, error)
    assert "\n" not in text
    return json.loads(text)


def test_a_line_has_its_date_level_logger_event_fields_and_pid() -> None:
    assert line("replica.removed replica=%s epoch=%d after_s=%.1f: it is gone", "0/1", 9, 1.26) == {
        "time": "2026-11-22T12:00:00.250Z",
        "level": "warning",
        "logger": "hub.x",
        "event": "replica.removed",
        "pid": 7,
        "stage": 0,
        "replica": "0/1",
        "epoch": 9,
        "fields": {"after_s": 1.3},
        "message": "it is gone",
    }


def test_a_process_that_knows_its_replica_names_it_in_each_line() -> None:
    """What the line itself says is nearer: a hub's line about a replica names that one."""
    process = {"pid": 7, "stage": 1, "replica": "1/0", "epoch": 5}
    own = line("lease.held lease=%x", 255, process=process)
    assert (own["replica"], own["epoch"]) == ("1/0", 5)
    assert line("lease.held lease=%x", 255, process=process)["fields"] == {"lease": "ff"}
    about = line("hub.saw replica=%s", "0/3", process=process)
    assert (about["stage"], about["replica"], about["pid"]) == (0, "0/3", 7)
    assert "epoch" not in about, "5 is not that of the other replica"


def test_a_request_is_named_with_its_trace_and_what_is_not_known_is_left_out() -> None:
    found = line("request.failed request=%s trace=%s replica=%s epoch=%d", "r", "0af7", "0/1", 9)
    assert {name: found[name] for name in ("request", "trace", "stage", "replica", "epoch")} == {
        "request": "r",
        "trace": "0af7",
        "stage": 0,
        "replica": "0/1",
        "epoch": 9,
    }
    assert "trace" not in line("http.request request=%s trace=%s", "r", "-")


@pytest.mark.attack("C21")
def test_no_value_passes_for_another_field() -> None:
    """1. a reason that holds ``replica=9/9`` and a line break is text, and so is one in a value
    2. fields that a call gives as such are taken as they are, the request among them
    """
    forged = line("replica.out_of_reach reason=%s", "no\nreplica=9/9 level=x")
    assert forged["fields"] == {"reason": "no\nreplica=9/9 level=x"}
    assert "replica" not in forged
    given = line("request.failed request=r 1 replica=9/9", fields={"request": "r 1 replica=9/9", "kind": "X"})
    assert (given["request"], given["fields"], "message" in given) == ("r 1 replica=9/9", {"kind": "X"}, True)


@pytest.mark.parametrize(
    ("template", "args", "parsed"),
    [
        ("hub.stopping", (), ("hub.stopping", {}, "")),
        ("server.%s reason=%s (others)", ("bad", "x"), ("server.bad", {"reason": "x"}, "(others)")),
        ("a.b url=%s/admin/: 100 %% of %s", ("u", "it"), ("a.b", {"url": "u/admin/"}, "100 % of it")),
        ("a.b edge=%d-%d on=%s off=%s", (0, 1, True, None), ("a.b", {"edge": "0-1", "on": True, "off": None}, "")),
        ("a.b big=%g", (float("inf"),), ("a.b", {"big": float("inf")}, "")),
        ("flag.ignored --replica-id: ids=%s", ("x",), ("flag.ignored", {}, "--replica-id: ids=x")),
        ("Started server process [%d]", (3,), (FOREIGN_EVENT, {}, "Started server process [3]")),
        ("100% sure", (), (FOREIGN_EVENT, {}, "100% sure")),
        ("a.b x=%d", ("no number",), (FOREIGN_EVENT, {}, "a.b x=%d ('no number',)")),
        ("a.b stage=%d puts=3", (0,), ("a.b", {"stage": 0, "puts": 3}, "")),
        ("a.b x=%s", (), ("a.b", {"x": "%s"}, "")),
        ("a.b %s", (), ("a.b", {}, "%s")),
    ],
)
def test_a_message_is_an_event_its_fields_and_text(template: str, args: Any, parsed: Any) -> None:
    assert parse_message(template, args) == parsed


def test_named_arguments_of_a_library_and_numbers_that_json_lacks_are_no_error() -> None:
    record = logging.makeLogRecord({"msg": "at %(place)s", "args": {"place": "x"}, "levelname": "INFO"})
    assert json.loads(json_line(record, {}))["message"] == "at x"
    assert line("a.b big=%g", float("nan"))["fields"] == {"big": "nan"}
    assert line("a.b", fields={"odd": {1: object}})["fields"]["odd"] == {"1": str(object)}


def test_a_traceback_is_in_the_line() -> None:
    assert line("x.bug", error="Traceback\n  boom")["exception"] == "Traceback\n  boom"


@pytest.mark.attack("C21")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hub.refused name='ä 音 \U0001f600'", "hub.refused name='ä 音 \U0001f600'"),
        ("name='x'\n2026-11-22 12:00:00 ERROR   hub.forged", "name='x'\n    2026-11-22 12:00:00 ERROR   hub.forged"),
        ("\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
        ("a\rb\x9b31m\u2028c\u202ed\0", r"a\rb\x9b31m\u2028c\u202ed\x00"),
        ("a\tb", "a\tb"),
        ("x.bug\nTraceback\n  boom", "x.bug\n    Traceback\n      boom"),
    ],
)
def test_no_value_passes_for_another_line_or_commands_a_terminal(text: str, shown: str) -> None:
    assert text_line(text) == shown


def test_a_childs_own_line_is_passed_on_and_other_output_is_wrapped() -> None:
    """1. a JSON line of a child's logger is passed on byte for byte: nothing is wrapped twice
    2. what a library prints becomes the message of an object that says whose it is, JSON of another kind too
    """
    own = json_line(logging.makeLogRecord({"msg": "a.b x=1", "levelname": "INFO"}), {"pid": 3}).encode()
    assert relayed_line(own, NOON, {"pid": 1}) is own
    for printed in (b'{"loss": 1}', b"W1122 Triton \xff", b"{not json", b'["time"]'):
        wrapped = json.loads(relayed_line(printed, NOON, {"pid": 3, "stage": 0}))
        assert wrapped == {
            "time": "2026-11-22T12:00:00.250Z",
            "level": "info",
            "logger": "output",
            "event": FOREIGN_EVENT,
            "pid": 3,
            "stage": 0,
            "message": printed.decode("utf-8", "replace"),
        }
