"""A failed request leaves a line, and a thousand of them leave some lines and their sum."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from omni_discovery.failure_log import Failure, FailureLog, trace_id
from omni_discovery.logs.lines import parse_message

FAILURE = Failure("r1~7", "0", "0/1", 2, "EngineFailedError", "it broke")


class Bench:
    """A FailureLog whose clock stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.written: list[tuple[int, str]] = []
        self.log = FailureLog(
            lambda level, text, *values: self.written.append((level, text % values)),
            lambda: self.now_s,
            most_lines=3,
            window_s=10.0,
        )

    def take_lines(self) -> list[str]:
        lines = [line for _, line in self.written]
        self.written.clear()
        return lines


def line_of(failure: Failure) -> str:
    template, arguments = failure.message()
    return template % arguments


def test_a_cause_can_not_say_that_another_replica_failed() -> None:
    """The fields of a JSON line are those of the failure, whatever the engine's error or the client's id holds."""
    forged = replace(FAILURE, request_id="r 1 replica=9/9", cause="no replica=9/9 kind=X 100% sure")
    event, fields, text = parse_message(*forged.message())
    assert (event, text) == ("request.failed", "")
    assert (fields["request"], fields["replica"], fields["kind"]) == ("r_1_replica=9/9", "0/1", "EngineFailedError")
    assert fields["cause"] == forged.cause


def test_a_failure_is_one_line_with_all_that_leads_to_its_cause() -> None:
    bench = Bench()
    bench.log.add(FAILURE)
    assert bench.written == [
        (
            logging.WARNING,
            "request.failed request=r1~7 stage=0 replica=0/1 attempt=2 kind=EngineFailedError cause=it broke",
        )
    ]
    assert bench.log.write_due() is None


def test_a_client_with_a_key_is_named_by_the_keys_name() -> None:
    event, fields, _ = parse_message(*replace(FAILURE, label="mine", key="alice").message())
    assert (event, fields["x_request_id"], fields["key"], fields["stage"]) == ("request.failed", "mine", "alice", "0")
    assert " key=" not in line_of(FAILURE)


def test_the_life_of_a_replica_and_the_trace_are_named_where_there_are_any() -> None:
    line = line_of(replace(FAILURE, epoch=9, trace="0af7651916cd43dd8448eb211c80319c"))
    assert "request=r1~7 trace=0af7651916cd43dd8448eb211c80319c stage=0 replica=0/1 epoch=9 attempt=2 " in line
    assert "epoch" not in line_of(FAILURE)
    assert "trace" not in line_of(FAILURE)


@pytest.mark.parametrize(
    ("traceparent", "named"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "0af7651916cd43dd8448eb211c80319c"),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", ""),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", ""),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", ""),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01 replica=9/9", ""),
        ("", ""),
    ],
)
def test_the_trace_of_a_header_is_its_id_or_none(traceparent: str, named: str) -> None:
    assert trace_id(traceparent) == named


def test_what_is_not_known_is_a_dash_and_a_companion_names_its_parent() -> None:
    line = line_of(Failure("r1~7%cfg%1", "", "", None, "StageUnavailableError", "", parent="r1~7"))
    assert line == (
        "request.failed request=r1~7%cfg%1 parent=r1~7 stage=- replica=- attempt=- kind=StageUnavailableError cause=-"
    )


def test_names_and_causes_of_any_kind_stay_on_one_bounded_line() -> None:
    cause = "it broke\n  at\x1b[31m line 3\r\n" + "x" * 10_000 + "; no attempts are left"
    line = line_of(replace(FAILURE, request_id="a b\nrequest.failed request=c", cause=cause))
    assert line.isprintable()
    assert "request=a_b_request.failed_request=c stage=0" in line
    assert "cause=it broke at_[31m line 3 xxx" in line
    assert line.endswith("...", 0, len(line) - 200)
    assert line.endswith("; no attempts are left")
    assert len(line) < 600


def test_a_storm_is_a_few_lines_and_then_a_sum_each_ten_seconds() -> None:
    """1. five failures within a second: three lines; 2. ten seconds after the first, a line for the other two
    3. the storm goes on, and has three lines again
    """
    bench = Bench()
    for number in range(5):
        bench.log.add(replace(FAILURE, stage=str(number % 2), kind="DeadlineExceededError" if number == 3 else "E"))
        bench.now_s += 0.2
    assert len(bench.take_lines()) == 3
    assert bench.log.write_due() == 110.0
    assert bench.take_lines() == []
    bench.now_s = 110.0
    assert bench.log.write_due() is None
    assert bench.take_lines() == [
        "requests.failed count=2 kinds={DeadlineExceededError:1,E:1} stages={1:1,0:1} in_s=10.0"
    ]
    for _ in range(4):
        bench.log.add(FAILURE)
    assert len(bench.take_lines()) == 3


def test_the_next_failure_after_a_storm_writes_the_sum_first() -> None:
    bench = Bench()
    for _ in range(4):
        bench.log.add(FAILURE)
    bench.take_lines()
    bench.now_s += 60.0
    bench.log.add(FAILURE)
    assert [line.split()[:2] for line in bench.take_lines()] == [
        ["requests.failed", "count=1"],
        ["request.failed", "request=r1~7"],
    ]


def test_the_last_ones_of_a_storm_are_written_at_the_end() -> None:
    bench = Bench()
    for _ in range(1003):
        bench.log.add(FAILURE)
    bench.take_lines()
    bench.log.close()
    bench.log.close()
    assert bench.take_lines() == ["requests.failed count=1000 kinds={EngineFailedError:1000} stages={0:1000} in_s=0.0"]


def test_clients_mistakes_hide_no_failure() -> None:
    """Each level has lines and a sum of its own."""
    bench = Bench()
    for _ in range(50):
        bench.log.add(FAILURE, logging.INFO)
    bench.log.add(FAILURE)
    assert [level for level, _ in bench.written] == [logging.INFO] * 3 + [logging.WARNING]


def test_a_sum_lists_a_bounded_number_of_kinds() -> None:
    bench = Bench()
    for number in range(103):
        bench.log.add(replace(FAILURE, kind=f"Kind{number}"))
    bench.take_lines()
    bench.log.close()
    (line,) = bench.take_lines()
    assert "count=100 " in line
    assert ",others:80} stages={0:100}" in line
