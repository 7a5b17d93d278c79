"""Control calls in a replica: what the engine's thread makes of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from omni_discovery import wire
from omni_discovery.deploy.document import StageConfig
from omni_discovery.log_once import LogOnce
from omni_discovery.wire.containers import MAX_CONTAINERS
from stage_runtime.engine_loop import control
from stage_runtime.engine_loop.control import Controls, fail
from stage_runtime.engine_loop.jobs import Call, Called
from stage_runtime.engines.base import CONTROL_METHODS
from stage_runtime.engines.capabilities import Capabilities, capabilities_of
from stage_runtime.engines.echo.engine import EchoEngine
from stage_runtime.engines.vllm.control import Adapters, vllm_controls
from tests.support.replica_engine import ScriptedEngine


def echo(**engine_args: Any) -> EchoEngine:
    return EchoEngine(StageConfig(stage_id=0, engine="echo", engine_args=engine_args))


def call(method: str, *args: Any, key: str = "#1", deadline_s: float = 100.0, **kwargs: Any) -> Call:
    return Call(key, method, args, kwargs, deadline_s)


def perform(capabilities: Capabilities, called: Call) -> Called:
    return control.perform(capabilities, called, LogOnce())


def value(called: Called) -> Any:
    assert called.ok, called.error
    return msgspec.msgpack.decode(called.result)


def test_what_a_method_gives_back_is_said_as_msgpack_has_it() -> None:
    engine = echo(allow_rpc=["say"])
    assert value(perform(capabilities_of(engine), call("add_lora", "mine", 3, path="/l"))) is True
    assert value(perform(capabilities_of(engine), call("list_loras"))) == [3]
    said = perform(capabilities_of(engine), call("collective_rpc", "say", [1, b"\0"], {"a": None}))
    assert value(said) == [[1, b"\0"], {"a": None}]
    frame = wire.encode(wire.ControlResult(epoch=1, call_id="c", ok=True, queue_length=0, result=said.result))
    (read,), _ = wire.decode_from_replica([frame])
    assert isinstance(read, wire.ControlResult)
    assert read.result == [[1, b"\0"], {"a": None}]


def test_an_unknown_method_is_answered_with_those_that_there_are() -> None:
    assert perform(capabilities_of(echo()), call("fly")).error == (
        "ControlRefusedError: this engine has no control method 'fly'; there are: start_profile, stop_profile, sleep, "
        "wake_up, is_sleeping, add_lora, remove_lora, list_loras, collective_rpc"
    )
    assert perform(capabilities_of(ScriptedEngine()), call("sleep")).error.endswith("'sleep'; there are: none")
    assert set(echo().controls) <= set(CONTROL_METHODS)


def test_only_what_the_operator_has_named_can_be_called() -> None:
    assert perform(capabilities_of(echo()), call("collective_rpc", "pid")).error == (
        "ControlRefusedError: engine_args.allow_rpc of this stage does not name 'pid', but nothing"
    )
    called = perform(capabilities_of(echo(allow_rpc=["say", "fail"])), call("collective_rpc", "pid"))
    assert called.error.endswith("does not name 'pid', but say, fail")


@pytest.mark.parametrize(
    ("method", "args", "error"),
    [
        ("add_lora", ("mine",), "TypeError: "),
        ("sleep", (9,), "ValueError: the level of sleep"),
        ("collective_rpc", ("fail", ["\ud800"]), "RuntimeError: ?"),
        ("collective_rpc", ("fail", ["x" * 100_000]), "RuntimeError: xxx"),
        ("collective_rpc", ("say", ["x" * (1 << 20)]), "ControlRefusedError: a result of"),
        ("collective_rpc", ("say", [1 << 70]), "OverflowError: "),
    ],
)
def test_whatever_a_method_raises_or_returns_is_that_calls_error(
    method: str, args: tuple[Any, ...], error: str
) -> None:
    called = perform(capabilities_of(echo(allow_rpc=["say", "fail"])), call(method, *args))
    assert not called.ok
    assert called.error.startswith(error)
    wire.encode(wire.ControlResult(epoch=1, call_id="c", ok=False, queue_length=0, error=called.error))
    assert len(called.error) <= wire.MAX_REASON


def test_sleep_and_waking_say_what_the_engine_is_now_and_other_calls_say_nothing() -> None:
    engine = echo()
    assert perform(capabilities_of(engine), call("list_loras")).is_asleep is None
    assert perform(capabilities_of(engine), call("sleep", 9)).is_asleep is False
    assert perform(capabilities_of(engine), call("sleep")).is_asleep is True
    assert perform(capabilities_of(engine), call("wake_up", "badly")).is_asleep is True
    assert perform(capabilities_of(engine), call("wake_up")).is_asleep is False


def test_a_vllm_stage_that_was_not_made_for_it_says_which_argument_is_missing() -> None:
    settings = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(enable_sleep_mode=False))
    llm = MagicMock(vllm_config=settings)
    engine: Any = SimpleNamespace(controls=vllm_controls(llm, (), Adapters(llm)))
    for method, args in (
        ("add_lora", ("mine", 1, "/l")),
        ("list_loras", ()),
        ("remove_lora", (1,)),
        ("pin_lora", (1,)),
    ):
        assert perform(capabilities_of(engine), call(method, *args)).error == (
            "ControlRefusedError: adapters are only taken where engine_args.enable_lora is true"
        )
    assert "engine_args.enable_sleep_mode" in perform(capabilities_of(engine), call("sleep")).error
    llm.sleep.assert_not_called()


class Turns:
    """Controls with an engine that is as busy, and a clock that is as late, as the test says."""

    def __init__(self) -> None:
        self.idle, self.now_s = False, 0.0
        self.engine = echo()
        self.granted: list[float] = []
        self.controls = Controls(
            capabilities_of(self.engine), lambda: self.idle, lambda: self.now_s, self.granted.append
        )

    def keys(self, said: list[Called]) -> list[str]:
        return [called.key for called in said]


def test_sleep_waits_until_the_engine_is_idle_and_what_came_behind_it_waits_with_it() -> None:
    turns = Turns()
    assert turns.keys(turns.controls.accept_call(call("list_loras", key="#1"))) == ["#1"]
    assert turns.controls.accept_call(call("sleep", key="#2")) == []
    assert turns.controls.accept_call(call("is_sleeping", key="#3")) == []
    assert turns.controls.run_due() == []
    turns.idle = True
    slept, asked = turns.controls.run_due()
    assert (slept.key, slept.is_asleep, asked.key, value(asked)) == ("#2", True, "#3", True)


def test_a_call_whose_time_is_over_does_not_begin() -> None:
    turns = Turns()
    turns.controls.accept_call(call("sleep", key="#1", deadline_s=5.0))
    turns.controls.accept_call(call("is_sleeping", key="#2", deadline_s=50.0))
    turns.now_s = 5.0
    late, asked = turns.controls.run_due()
    assert late.error == "DeadlineExceededError: the deadline passed before 'sleep' could begin"
    assert value(asked) is False
    (late,) = turns.controls.accept_call(call("sleep", key="#3", deadline_s=4.0))
    assert not late.ok


def test_a_call_may_stand_still_until_its_deadline_but_not_for_ever() -> None:
    turns = Turns()
    turns.now_s = 10.0
    turns.controls.accept_call(call("list_loras", deadline_s=70.0))
    turns.controls.accept_call(call("list_loras", deadline_s=1e9))
    turns.controls.accept_call(call("list_loras", deadline_s=9.0))
    assert turns.granted == [70.0, 1810.0]


def test_a_call_that_is_cancelled_while_it_waits_lets_the_others_pass() -> None:
    turns = Turns()
    turns.controls.accept_call(call("sleep", key="#1"))
    turns.controls.accept_call(call("is_sleeping", key="#2"))
    (cancelled,) = turns.controls.cancel_call("#1")
    (asked,) = turns.controls.run_due()
    assert (cancelled.key, cancelled.ok, value(asked)) == ("#1", False, False)
    assert turns.controls.cancel_call("#2") == []


def test_a_call_behind_the_first_is_cancelled_alone_and_a_stranger_cancels_none() -> None:
    turns = Turns()
    for number in (1, 2, 3):
        turns.controls.accept_call(call("sleep", key=f"#{number}"))
    assert turns.controls.cancel_call("#9") == []
    (cancelled,) = turns.controls.cancel_call("#2")
    assert (cancelled.key, cancelled.error) == ("#2", "ControlRefusedError: nobody waits for it any more")
    turns.idle = True
    assert turns.keys(turns.controls.run_due()) == ["#1", "#3"]


def test_an_engine_that_dies_answers_what_waits() -> None:
    turns = Turns()
    turns.controls.accept_call(call("sleep", key="#1"))
    (failed,) = turns.controls.fail_all("it died")
    assert failed.error == "EngineDeadError: it died"
    assert turns.controls.run_due() == []
    assert turns.keys(fail([call("sleep", key="#2")], "x")) == ["#2"]


@pytest.mark.parametrize("method", ["start_profile", "stop_profile"])
def test_the_echo_engine_takes_as_long_as_it_is_told(method: str) -> None:
    engine = echo(control_delay_s=0.05)
    controls: dict[str, Callable[..., Any]] = dict(engine.controls)
    controls["start_profile"]()
    before_s = time.monotonic()
    perform(capabilities_of(engine), call(method))
    assert time.monotonic() - before_s >= 0.05


def test_an_engine_that_can_not_sleep_is_not_asked_whether_it_does(caplog: pytest.LogCaptureFixture) -> None:
    assert perform(capabilities_of(ScriptedEngine()), call("sleep")).is_asleep is None
    assert caplog.records == []


def test_a_result_of_too_many_parts_is_refused_and_one_of_many_is_not() -> None:
    engine = capabilities_of(echo(allow_rpc=["say"]))
    # Beside the list itself there are the one around it, and the mapping of what was named.
    assert value(perform(engine, call("collective_rpc", "say", [[]] * (MAX_CONTAINERS - 3)))) is not None
    called = perform(engine, call("collective_rpc", "say", [[]] * MAX_CONTAINERS))
    assert called.error.startswith("ControlRefusedError: a result of more than")


def test_calls_without_end_are_a_line_a_second_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """1. of a thousand calls that succeed, and as many that fail, within a second each has one line
    2. a second later each has another
    """
    clock = [0.0]
    engine = echo(allow_rpc=["say", "fail"])
    controls = Controls(capabilities_of(engine), lambda: True, lambda: clock[0], lambda _until_s: None)
    with caplog.at_level(logging.INFO, logger=control.__name__):
        for clock[0] in (0.0, 1.0):
            for _ in range(1000):
                assert controls.accept_call(call("collective_rpc", "say"))[0].ok
                assert not controls.accept_call(call("collective_rpc", "fail"))[0].ok
    lines = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert lines == ["engine.control", "engine.control_failed"] * 2
