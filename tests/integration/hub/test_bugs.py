"""Whatever raises in the life of a request: its place and its slots are given back, and its client is answered."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from hub.api.exchange import Exchanges
from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from hub.request import events as ev
from hub.request.machine import RequestMachine
from omni_discovery import wire
from omni_discovery.errors import InvalidRequestError, RequestError
from tests.support.hub_fakes import (
    ONE_STAGE,
    PAIR,
    FakeReplica,
    ask,
    collect,
    deploy_of,
    echo,
    picture,
    running_hub,
    until,
)

_HUB = Path(sys.modules["hub.async_omni"].__file__ or "").parent
#: Where a bug may be: what decides about a request, and what carries that out.
_STEPS = tuple(
    str(_HUB / name)
    for name in (
        "request",
        "pool",
        "orchestrator/requests.py",
        "orchestrator/dispatcher.py",
        "orchestrator/replica_events.py",
        "orchestrator/retry_budget.py",
        "orchestrator/failures.py",
        "orchestrator/active.py",
        "orchestrator/trials.py",
        "orchestrator/aborts.py",
        "metrics.py",
    )
)
#: A step: the place of the call, and what is called.
Step = tuple[str, int, str]


class InjectedError(Exception):
    """A bug that a test has put in."""


def step_of(frame: FrameType) -> Step | None:
    """The step that a call begins; None for calls elsewhere, and for those that no code of the hub makes."""
    code, caller = frame.f_code, frame.f_back
    if caller is None or not code.co_filename.startswith(_STEPS) or code.co_name in {"__repr__", "<genexpr>"}:
        return None
    if not caller.f_code.co_filename.startswith(str(_HUB)) or caller.f_code.co_name in {"_take_turn", "<lambda>"}:
        return None
    return caller.f_code.co_filename[len(str(_HUB)) + 1 :], caller.f_lineno, code.co_qualname


@contextmanager
def watching(on_step: Callable[[Step], None]) -> Iterator[None]:
    """Call ``on_step`` at the beginning of each step; what it raises, the step raises."""

    def trace(frame: FrameType, event: str, _arg: Any) -> None:
        step = step_of(frame) if event == "call" else None
        if step is not None:
            on_step(step)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def bug_at(wanted: Step) -> Iterator[list[Step]]:
    """The first call of that step raises; gives the list of the steps that raised."""
    raised: list[Step] = []

    def raise_there(step: Step) -> None:
        if step == wanted and not raised:
            raised.append(step)
            raise InjectedError(f"a bug in {step[2]}")

    with watching(raise_there):
        yield raised


async def whole(omni: AsyncOmni) -> None:
    await collect(omni.generate({"prompt": "one two"}))


async def in_segments(omni: AsyncOmni) -> None:
    async def segments() -> AsyncIterator[dict[str, Any]]:
        yield {"prompt": "one"}
        yield {"prompt": "two"}

    await collect(omni.generate(segments(), modalities=["text"]))


async def with_companion(omni: AsyncOmni) -> None:
    await collect(omni.generate({"prompt": "one"}, companions={"negative": {"prompt": "two"}}))


async def broken_off(omni: AsyncOmni) -> None:
    """The client leaves after the first word."""
    outputs = omni.generate({"prompt": "one two"})
    await anext(outputs)
    await outputs.aclose()


async def two_at_once(omni: AsyncOmni) -> None:
    """The second waits for the slot that the first has."""
    ends = await asyncio.gather(outcome(whole(omni)), outcome(whole(omni)))
    for end in ends:
        if end is not None:
            raise end


async def retried(omni: AsyncOmni) -> None:
    """The first replica that gets it refuses it."""
    await collect(omni.generate({"prompt": "refuse me"}))


def refuse_once(replica: FakeReplica, submit: wire.Submit) -> None:
    if submit.attempt == 0 and "refuse" in str(submit.inputs.get("prompt")):
        replica.reject(submit)
    else:
        echo(replica, submit)


async def outcome(life: Coroutine[Any, Any, None]) -> Exception | None:
    """The error that ends the request, if any; TimeoutError, or one of its kind, if nothing else does."""
    try:
        async with asyncio.timeout(9):
            await life
    except (RequestError, InjectedError, TimeoutError) as error:
        return error
    return None


def books_are_closed(omni: AsyncOmni) -> bool:
    """Whether nothing is left of any request."""
    orchestrator = omni._orchestrator
    assert orchestrator is not None
    pools = list(omni.releases.every)
    return not (
        len(omni._admission.backlog)
        or omni._queues
        or omni._inner_ids
        or orchestrator._requests.active
        or orchestrator.request_states
        or any(entry.in_flight for pool in pools for entry in pool.core.members)
        or any(pool.core.queue.waiters.count for pool in pools)
    )


@pytest.mark.parametrize(
    "life", [whole, in_segments, with_companion, broken_off, two_at_once, retried], ids=lambda life: life.__name__
)
async def test_a_bug_at_any_step_of_a_request_ends_that_request_and_takes_nothing_for_ever(
    life: Callable[[AsyncOmni], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """1. a request runs once, and every call that it makes in the hub is noted
    2. it runs again for each of these calls, which raises
    3. each time it ends, not by its deadline; nothing of it is left in the hub, which logs the bug once
    4. all requests after it are served
    """
    caplog.set_level(logging.CRITICAL, "hub")
    first = FakeReplica(refuse_once if life is retried else echo)
    others = [FakeReplica(refuse_once, replica_id=1)] if life is retried else []
    async with running_hub(first, *others, FakeReplica(picture, 1), deploy=PAIR) as omni:
        await life(omni)
        steps: dict[Step, None] = {}
        with watching(lambda step: steps.update({step: None})):
            await life(omni)
        assert len(steps) > 30
        unused = []
        for step in steps:
            caplog.clear()
            caplog.set_level(logging.ERROR, "hub")
            with bug_at(step) as raised:
                assert not isinstance(await outcome(life(omni)), TimeoutError), step
                try:
                    await until(lambda: books_are_closed(omni), 9)
                except TimeoutError:
                    pytest.fail(f"something was left after a bug at {step}")
            if not raised:
                unused.append(step)
            bugs = [record for record in caplog.records if record.exc_info and "InjectedError" in str(record.exc_info)]
            assert len(bugs) <= 1, step
            assert omni.is_running, step
        assert len(unused) < len(steps) // 4
        await life(omni)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.attack("A5")
async def test_whatever_is_nested_deep_is_refused_and_takes_no_place() -> None:
    """Also at the depths where one encoder gives up and another does not, and in a later segment."""
    async with running_hub(FakeReplica()) as omni:

        async def segments(later: Any) -> AsyncIterator[dict[str, Any]]:
            yield {"prompt": "one"}
            yield {"messages": later}

        for depth in (64, 200, *range(960, 1000), 100_000):
            deep = {"messages": nested(depth)}
            for outputs in (
                omni.generate(deep),
                omni.generate(deep, segmented=True),
                omni.generate({"prompt": "x"}, params={0: deep}),
                omni.generate({"prompt": "x"}, companions={"negative": deep}),
                omni.generate(segments(nested(depth))),
            ):
                with pytest.raises(InvalidRequestError, match="nested more than 64 deep"):
                    await collect(outputs)
            with pytest.raises(InvalidRequestError, match="nested more than 64 deep"):
                await omni.collective("method", (nested(65 if depth == 64 else depth),))
        await until(lambda: books_are_closed(omni))
        assert await ask(omni, "still there") == "still there "


async def test_a_request_that_finds_the_hubs_queue_full_of_segments_leaves_no_place_taken() -> None:
    async with running_hub(FakeReplica()) as omni:
        orchestrator = omni._orchestrator
        assert orchestrator is not None
        orchestrator.request_async_queue = asyncio.Queue(1)
        orchestrator.request_async_queue.put_nowait(None)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="too many requests and segments wait") as raised:
            await ask(omni)
        assert raised.value.retry_after_s
        assert books_are_closed(omni)


async def test_the_client_of_a_request_that_a_bug_ends_gets_a_500_and_the_id_that_the_log_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def handle(*_args: Any) -> list[ev.Action]:
        raise InjectedError("a bug")

    caplog.set_level(logging.ERROR, "hub")
    body = {"messages": [{"role": "user", "content": "hello"}]}
    async with running_hub(FakeReplica(), deploy=ONE_STAGE) as omni:
        transport = httpx.ASGITransport(Exchanges(build_app(omni, deploy_of(ONE_STAGE), 0)))
        async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RequestMachine, "handle", handle)
                answer = await client.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            request_id = answer.headers["x-omni-request-id"]
            bugs = [each.getMessage() for each in caplog.records if "orchestrator.bug" in each.getMessage()]
            assert bugs == [f"orchestrator.bug event=Submitted request={request_id}"]
            deep: Any = "hello"
            for _ in range(100):
                deep = [deep]
            answer = await client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {"x": deep}})
            assert answer.status_code == 400
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
