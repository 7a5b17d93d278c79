"""A registered replica that has turned hostile talks to a real hub, which counts, drops, and serves everybody else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from hub.async_omni import AsyncOmni
from hub.orchestrator.collective import ReplicaResult
from omni_discovery import wire
from omni_discovery.errors import RequestError
from tests.support.fuzz import bent, garbage, nested, number, odd_batch, oversized, resident_bytes, rounds
from tests.support.hub_fakes import QUICK, FakeReplica, collect, echo, echo_on, running_hub, show, text_of, until
from tests.support.tcp_listener import Serve, listening

ROUNDS = rounds(1500)
KINDS = {"malformed", "misplaced", "epoch", "session", "stale", "gap", "late"}
#: The connection may be cut for a frame that is too long; it is back soon. A busy machine may hold this process, and
#: with it the honest replica, for a second: only what the hostile one keeps may run out of time.
CONFIG = replace(QUICK, request_timeout_s=6.0, silence_grace_s=1.5, accept_limit_s=2.0)
#: More than the requests that the hostile replica leaves without an end.
AT_ONCE = 64


class HostileReplica(FakeReplica):
    """Has a record and a key, and says whatever comes to its mind on both sockets."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        super().__init__(self._answer, replica_id=1)
        #: The last session number that the hub has named.
        self.session = 0
        self.submits: list[wire.Submit] = []
        self.controls: list[wire.Control] = []

    def _hear(self, name: str, message: wire.ToReplica) -> None:
        if isinstance(message, wire.Hello):
            self.session = message.session
            number_ = self.rng.choice((0, message.session, message.session, number(self.rng, message.session)))
            welcome = wire.Welcome(epoch=message.epoch, capacity=4, queue_length=0, session=number_)
            self.say(welcome, self._input if name == "input" else self._output)
            if name == "output":
                self.say(wire.Grant(epoch=message.epoch, session=message.session, credits=4, queue_length=0))
            return
        if isinstance(message, wire.Control):
            self.controls.append(message)
        super()._hear(name, message)

    def _answer(self, _replica: FakeReplica, submit: wire.Submit) -> None:
        self.submits.append(submit)
        if self.rng.random() < 0.5:
            echo(self, submit)
            self.say(wire.Grant(epoch=submit.epoch, session=self.session, credits=1, queue_length=0))
        elif self.rng.random() < 0.5:
            for _ in range(self.rng.randrange(6)):
                self.talk()
        else:
            self._lie(submit)

    def _lie(self, submit: wire.Submit) -> None:
        """Right frames about a request that runs, in an order that can't be."""
        steps = [
            lambda: self.accept(submit),
            lambda: self.chunk(submit, 0, text="lie "),
            lambda: self.chunk(submit, 0, text="again "),
            lambda: self.chunk(submit, 2, text="gap "),
            lambda: self.chunk(submit, 1, text="", modality="text", attachments=[b"PNG"]),
            lambda: self.done(submit, 1),
            lambda: self.done(submit, 1),
            lambda: self.segment_done(submit, 1, 0),
            lambda: self.segment_done(submit, 2, 7),
            lambda: self.reject(submit),
            lambda: self.fail(submit),
            lambda: self.say(wire.Accepted(**self._about(submit)), self._output),
        ]
        for step in self.rng.choices(steps, k=self.rng.randrange(1, 9)):
            step()

    def talk(self) -> None:
        """Send one multipart that the hub did not ask for."""
        if not self._hub:
            return
        target = self.rng.choice((self._input, self._output))
        with suppress(RequestError):
            target.send([self._hub, *self._frames()])

    def _frames(self) -> list[bytes]:
        rng = self.rng
        head = wire.encode(self._message())
        roll = rng.random()
        if roll < 0.45:
            return [head, *[rng.randbytes(10)] * rng.choice((0, 0, 0, 0, 1, 2, 17, 40))]
        if roll < 0.65:
            return [bent(rng, head)]
        if roll < 0.75:
            return [wire.encode([self._message() for _ in range(rng.randrange(1, 9))])]
        if roll < 0.85:
            return [odd_batch(rng, [self._message() for _ in range(3)])]
        if roll < 0.87:
            # What only a hub says.
            return [wire.encode(wire.Pause(epoch=self.info.epoch, request_id="q1~1", attempt=0, paused=True))]
        if roll < 0.995:
            return [rng.choice((garbage, nested))(rng), *[b""] * rng.randrange(3)]
        return [oversized(rng, self._message())]

    def _message(self) -> wire.FromReplica:
        rng = self.rng
        known = self.submits[-20:]
        submit = rng.choice(known) if known else wire.Submit(epoch=self.info.epoch, request_id="nobody~0")
        request_id = rng.choice((submit.request_id, submit.request_id, f"q{rng.randrange(300)}~{rng.randrange(300)}"))
        load: dict[str, Any] = {
            "epoch": number(rng, submit.epoch),
            "queue_length": number(rng, 1),
        }
        about = {**load, "request_id": request_id, "attempt": number(rng, submit.attempt)}
        session = {**load, "session": number(rng, self.session), "credits": number(rng, 1)}
        kind, reason = rng.choice(list(wire.FailureKind)), rng.choice(("", "no", "%s %n {0}\r\n\0", "x" * 10_000))
        refs = tuple(
            wire.PayloadRef(
                from_stage=rng.randrange(3), to_stage=rng.randrange(3), key="k", connector="c", size_bytes=1
            )
            for _ in range(rng.randrange(3))
        )
        control = rng.choice(self.controls[-5:] or [wire.Control(epoch=1, call_id="nothing", method="m")])
        said = wire.ControlResult(
            **load, call_id=rng.choice((control.call_id, control.call_id, "c~1")), ok=rng.random() < 0.5,
            result=rng.choice((None, {"a": [b"\0"]}, "x" * 10_000)), error=reason[: wire.MAX_REASON],
        )  # fmt: skip
        likely = ((), ((wire.TokenLogprob(1, rng.choice((float("nan"), -1e308)), 0, "\0"),),) * 2)
        chunk = wire.Chunk(
            **about, seq=number(rng, 0), modality=rng.choice(("text", "image", "noise")), text="lie ",
            token_ids=rng.choice(((), (1,), (-1, 1 << 62))), mime=rng.choice(("", "image/png", "\r\n")),
            logprobs=rng.choice(likely), prompt_logprobs=rng.choice(likely),
            prompt_token_ids=rng.choice(((), (0,), (-1, 1 << 62))),
        )  # fmt: skip
        return rng.choice(
            (
                wire.Welcome(epoch=load["epoch"], queue_length=3, capacity=number(rng, 4), session=session["session"]),
                wire.Accepted(**about),
                wire.Rejected(**about, kind=kind, reason=reason),
                wire.Aborted(**about, running=rng.random() < 0.5),
                wire.Grant(**session),
                wire.Recall(**session),
                chunk,
                chunk,
                said,
                wire.HandOffPiece(**about, number=number(rng, 0), payloads=refs),
                wire.PieceTaken(**about, from_stage=rng.randrange(3), number=number(rng, 0)),
                wire.StageDone(
                    **about, seq=number(rng, 0), finish_reason=rng.choice(("stop", "abort", "", "?" * 1000)),
                    payloads=refs, usage={"tokens": -(1 << 62)}, pieces=rng.choice((0, 0, 0, 1)),
                    timings_s={"\r\nX: 1": rng.choice((float("nan"), float("inf"), -1.0))},
                    stop_reason=rng.choice((7, 1 << 60, "\r\n", "x" * 300)),
                ),
                wire.SegmentDone(
                    **about, seq=number(rng, 0), segment=number(rng, 0), finish_reason=rng.choice(("stop", "abort")),
                    payloads=refs, usage={"prompt_tokens": -(1 << 62)},
                ),
                wire.StageFailed(**about, kind=kind, reason=reason),
            )
        )  # fmt: skip


def dropped(omni: AsyncOmni) -> dict[str, float]:
    """Frames by the reason for which they were dropped."""
    samples = next(metric for metric in omni.metrics.collect() if metric.name == "omni_hub_dropped_frames").samples
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total")}


async def in_words(text: str) -> AsyncIterator[dict[str, Any]]:
    for word in text.split():
        yield {"prompt": word}


async def ask(omni: AsyncOmni, name: str) -> str | RequestError:
    try:
        # Some come in segments.
        whole = {"prompt": f"{name} is fine"}
        inputs = whole if sum(map(ord, name)) % 3 else in_words(whole["prompt"])
        return text_of(await collect(omni.generate(inputs, request_id=name)))
    except RequestError as error:
        return error


@pytest.mark.attack("C9")
@pytest.mark.parametrize("seed", range(3))
async def test_a_hostile_replica_harms_only_the_requests_that_it_was_given(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """1. a hub with an honest replica and a hostile one: garbage, other epochs, other sessions, wrong sockets, gaps,
       ends that come twice, answers to what it was never given, attachments where none belong
    2. every request that the hostile one never had is answered rightly, and every other one ends
    3. all kinds of nonsense were counted; no bug, no error was logged; nothing is left over
    """
    honest, hostile = FakeReplica(), HostileReplica(seed)
    honest.info = replace(honest.info, capacity=2 * AT_ONCE)
    hostile.on_update = echo_on
    before, gate = resident_bytes(), asyncio.Semaphore(AT_ONCE)
    with caplog.at_level(logging.WARNING):
        async with running_hub(honest, hostile, config=CONFIG, wait=False) as omni:
            await until(lambda: bool(hostile.submits or hostile.session) and omni.stage_status()[0].pickable > 0)
            asking: list[asyncio.Task[tuple[str, str | RequestError]]] = []
            calls: list[asyncio.Task[list[ReplicaResult]]] = []
            for count in range(20 * ROUNDS):
                # What it happens to say, and when, is chance: a little longer where a kind has not come yet.
                if count >= ROUNDS and dropped(omni).keys() >= KINDS:
                    break
                hostile.talk()
                if count % 50 == 0:
                    calls.append(asyncio.create_task(omni.list_loras(timeout=0.1)))
                if count % 10 == 0:
                    # So few at a time that the hub has no reason to refuse any.
                    await gate.acquire()
                    asking.append(asyncio.create_task(_named(omni, f"q{count // 10}", gate)))
                    await asyncio.sleep(0.002)
            answers = dict(await asyncio.gather(*asking))
            for results in await asyncio.gather(*calls):
                assert [(result.stage_id, result.replica_id) for result in results] == [(0, 0), (0, 1)]
                # The honest one answers no calls; the first of them may come before it is connected.
                assert results[0].error.startswith(("DeadlineExceededError", "NotConnectedError"))
            assert hostile.controls
            seen = {submit.request_id.partition("~")[0] for submit in hostile.submits}
            assert {name: answers[name] for name in answers.keys() - seen} == {
                name: f"{name} is fine " for name in answers.keys() - seen
            }
            assert len(answers.keys() - seen) > len(answers) / 4
            assert seen, "the hostile one was never asked for anything"
            _is_counted(omni)
            await _serves_on(omni, honest, hostile)
            assert not omni._queues
            assert not omni._inner_ids
            assert omni._orchestrator is not None
            assert not omni._orchestrator.request_states
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    # It may go twice with the same request, which then looks like one that ends replicas.
    assert [error for error in errors if not error.startswith("request.poisonous ")] == []
    assert resident_bytes() - before < 300 << 20


async def _named(omni: AsyncOmni, name: str, gate: asyncio.Semaphore) -> tuple[str, str | RequestError]:
    try:
        return name, await ask(omni, name)
    finally:
        gate.release()


def _is_counted(omni: AsyncOmni) -> None:
    counted = dropped(omni)
    assert counted.keys() >= KINDS, counted
    assert counted["malformed"] > ROUNDS / 10


async def _serves_on(omni: AsyncOmni, honest: FakeReplica, hostile: HostileReplica) -> None:
    """The hostile one mends its ways: the hub takes it in again without a restart of anything."""
    hostile.script = echo
    hostile.kill()
    for number_ in range(20):
        assert await ask(omni, f"after{number_}") == f"after{number_} is fine "
    assert len(honest.of(wire.Submit)) >= 20


@pytest.mark.attack("C2")
async def test_ports_that_speak_no_zmq_at_all_cost_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    """A record leads to an HTTP server, one to a socket that says nothing, one to noise: nobody notices."""
    rng = Random(7)
    talks = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\xff" + rng.randbytes(63) * 50, bytes(100_000)]
    honest = FakeReplica()
    async with AsyncExitStack() as stack:
        stack.enter_context(caplog.at_level(logging.ERROR))
        ports = [await stack.enter_async_context(listening(_answering(talk))) for talk in talks]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        strangers = [
            replace(honest.info, replica_id=5 + index, epoch=100 + index, input_addr=addr, output_addr=addr)
            for index, addr in enumerate(addresses)
        ]
        async with running_hub(honest) as omni:
            show(omni, honest.info, *strangers)
            for count in range(30):
                assert await ask(omni, f"q{count}") == f"q{count} is fine "
                await asyncio.sleep(0.02)
            assert omni.stage_status()[0].pickable == 1
            assert omni.stage_status()[0].registered == 1 + len(strangers)
    assert caplog.records == []


def _answering(talk: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(talk)
            await reader.read(100)
            await asyncio.sleep(0.05)

    return serve
