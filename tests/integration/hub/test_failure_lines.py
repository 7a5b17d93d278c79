"""A request that fails leaves a line in the hub's log and one in the replica's, by the same request id."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hub.api.routes import ready_response
from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from omni_discovery import wire
from omni_discovery.curve import KeyPair
from omni_discovery.errors import DeadlineExceededError, EngineFailedError, InvalidRequestError, OmniError
from tests.support.hub import Hub
from tests.support.hub_fakes import ONE_STAGE, QUICK, FakeReplica, collect, deploy_of, running_hub, started_hub, until
from tests.support.local_replica import LocalReplica
from tests.support.processes import wait_for

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
HUB, REPLICA = "hub.orchestrator.failures", "stage_runtime.server.sessions"
FIELDS = re.compile(
    r"request\.failed request=(?P<request>\S+) (?:trace=(?P<trace>\S+) )?stage=(?P<stage>\S+) "
    r"replica=(?P<replica>\S+) (?:epoch=(?P<epoch>\d+) )?attempt=(?P<attempt>\S+) "
    r"kind=(?P<kind>\S+) cause=(?P<cause>.*)"
)


def lines(caplog: pytest.LogCaptureFixture, logger: str, event: str = "request.failed") -> list[str]:
    found = [(record.name, record.getMessage()) for record in caplog.records]
    return [text for name, text in found if name == logger and text.startswith(event)]


def fields(text: str) -> dict[str, str]:
    match = FIELDS.search(text)
    assert match is not None, text
    return match.groupdict()


def name_of(found: dict[str, str]) -> tuple[str, str, str]:
    return found["request"], found["replica"], found["attempt"]


def total(caplog: pytest.LogCaptureFixture, logger: str) -> int:
    """How many failures a log tells of, by lines of their own and by sums."""
    sums = [re.search(r"count=(\d+)", text) for text in lines(caplog, logger, "requests.failed")]
    return len(lines(caplog, logger)) + sum(int(match[1]) for match in sums if match)


@asynccontextmanager
async def serving(config: HubConfig = QUICK, **engine_args: Any) -> AsyncIterator[AsyncOmni]:
    """A hub and two real replicas of one stage in this process."""
    keys = KeyPair.generate()
    omni = AsyncOmni(deploy_of(ONE_STAGE), "hub-1", keys, config, "round-robin")
    with ExitStack() as stack:
        made = [
            LocalReplica({keys.public: "hub-1"}, replica_id=number, epoch=70 + number, **engine_args)
            for number in range(2)
        ]
        for replica in made:
            stack.enter_context(replica)
        async with started_hub(omni, *(replica.info for replica in made)):
            yield omni


async def fail(omni: AsyncOmni, error: type[Exception], prompt: str, **options: Any) -> None:
    with pytest.raises(error):
        await collect(omni.generate({"prompt": prompt}, **options))


async def test_twelve_requests_that_the_engine_fails_leave_twelve_lines_in_the_hubs_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each names request, stage, replica, attempt, kind and cause; each attempt has its line in the replica's log."""
    async with serving(fail_on="FAIL") as omni:
        for number in range(12):
            await fail(omni, EngineFailedError, "my secret FAIL", request_id=f"r{number}")
        here = [fields(text) for text in lines(caplog, HUB)]
    there = [fields(text) for text in lines(caplog, REPLICA)]
    assert [each["request"].partition("~")[0] for each in here] == [f"r{number}" for number in range(12)]
    assert {(each["stage"], each["kind"]) for each in here} == {("0", "EngineFailedError")}
    assert {each["replica"] for each in here} <= {"0/0", "0/1"}
    assert all("told to fail on 'FAIL'" in each["cause"] for each in here + there)
    assert {each["kind"] for each in there} == {"engine"}
    assert {name_of(each) for each in here} <= {name_of(each) for each in there}
    assert (total(caplog, HUB), total(caplog, REPLICA)) == (12, 24)
    assert "secret" not in caplog.text


async def test_a_failed_request_names_the_life_of_its_replica_and_its_clients_trace_in_both_logs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The hub does not trace: the trace is the client's. What names none is left out, and goes to no replica."""
    async with serving(fail_on="FAIL") as omni:
        for traceparent in (f"00-{TRACE_ID}-b7ad6b7169203331-01", f"00-{TRACE_ID}-b7ad6b7169203331-01 x", "00-0-0-01"):
            headers = {"traceparent": traceparent}
            await fail(omni, EngineFailedError, "FAIL", trace_headers=headers)
        here, there = ([fields(text) for text in lines(caplog, log)] for log in (HUB, REPLICA))
    assert [each["trace"] for each in here] == [TRACE_ID, None, None]
    assert [each["trace"] for each in there] == [TRACE_ID, TRACE_ID, None, None, None, None]
    for each in here + there:
        assert each["epoch"] == str(70 + int(each["replica"].removeprefix("0/"))), "LocalReplica's epochs, see serving"


async def test_a_storm_of_late_requests_is_summed_up_in_both_logs_and_none_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1. 130 requests are not done by their deadline; 2. twenty lines in each log; 3. the sums count the others"""
    async with serving(delay_s=60.0, capacity=200) as omni:
        late = [fail(omni, DeadlineExceededError, "too slow", timeout_s=2.0) for _ in range(130)]
        await asyncio.gather(*late)
        assert len(lines(caplog, HUB)) == 20
        await until(lambda: len(lines(caplog, REPLICA)) == 40, 10.0)
    assert total(caplog, HUB) == 130
    assert total(caplog, REPLICA) == 130
    assert {fields(text)["kind"] for text in lines(caplog, HUB)} == {"DeadlineExceededError"}
    assert {fields(text)["kind"] for text in lines(caplog, REPLICA)} == {"deadline"}
    (text,) = lines(caplog, HUB, "requests.failed")
    assert text.startswith("requests.failed count=110 kinds={DeadlineExceededError:110} stages={0:110} in_s=")


async def test_a_client_that_leaves_is_no_failure_and_one_that_is_wrong_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(delay_s=0.05) as omni:
        outputs = omni.generate({"prompt": "a b c d e f"})
        await anext(outputs)
        await outputs.aclose()
        await until(lambda: not omni._running_orchestrator().request_states)

    def refuse(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.fail(submit, wire.FailureKind.INVALID)

    assert total(caplog, HUB) == total(caplog, REPLICA) == 0
    async with running_hub(FakeReplica(refuse)) as omni:
        await fail(omni, InvalidRequestError, "x", request_id="mine")
    (record,) = [record for record in caplog.records if record.name == HUB]
    assert record.levelno == logging.INFO
    assert fields(record.getMessage())["request"].startswith("mine~")


@pytest.mark.attack("I4")
async def test_answers_that_are_longer_than_their_time_do_not_make_a_hub_unready() -> None:
    """1. six answers would take a minute, and stream until --request-timeout, 8 s
    2. each ends with a 504, and the stage, which worked all the time, does not count as failing
    """

    async def stream(omni: AsyncOmni) -> tuple[int, OmniError | None]:
        came = 0
        try:
            async for output in omni.generate({"prompt": "word " * 6000}):
                came += len(output.text)
        except DeadlineExceededError as error:
            return came, error
        return came, None

    config = replace(QUICK, request_timeout_s=8.0)
    async with serving(config, capacity=6, delay_s=0.01) as omni:
        for came, error in await asyncio.gather(*(stream(omni) for _ in range(6))):
            assert came > 0
            assert isinstance(error, DeadlineExceededError)
        assert omni.stage_status()[0].failures.count == 0
        assert ready_response(omni).status_code == 200


def test_the_lines_are_in_the_log_of_omni_serve_and_of_its_replicas(tmp_path: Path) -> None:
    """As an operator has them: two replicas, FAIL twelve times, and each replica under its own name.

    /ready turns, with the reason, though nobody is ejected for what fails everywhere; after an answer it is as before.
    """
    text = (
        "stages: [{stage_id: 0, engine: echo, engine_args: {fail_on: FAIL}, "
        "runtime: {num_replicas: 2}, final_output: text}]"
    )
    hub = Hub.of_yaml(tmp_path, text)
    try:
        hub.wait_ready()
        wait_for("both replicas", lambda: json.loads(hub.get("/ready")[1])["stages"]["0"]["pickable"] == 2)
        assert [hub.ask("FAIL")[0] for _ in range(12)] == [500] * 12
        status, text = hub.get("/ready")
        # A replica that has just come up begins a new count.
        assert re.search(r"requests keep failing; stage 0: its last \d+ requests failed \(EngineFailedError\)", text)
        assert status == 503
        assert "ejected" not in json.loads(text)["stages"]["0"]
        assert hub.ask("hello")[0] == 200
        assert hub.get("/ready")[0] == 200
    finally:
        hub.stop()
    found = [each.groupdict() for each in FIELDS.finditer(hub.text)]
    here = [each for each in found if each["kind"] == "EngineFailedError"]
    there = [each for each in found if each["kind"] == "engine"]
    assert len(here) == 12
    assert {each["request"] for each in here} == {each["request"] for each in there}
    # The first requests may come before the second replica is up.
    assert {each["replica"] for each in here + there} <= {"0/0", "0/1"}
