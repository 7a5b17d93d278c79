"""What a replica's engine has made in one step comes in one frame, for several requests at once."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

import pytest

from hub.request.machine import RequestMachine
from omni_discovery import wire
from omni_discovery.errors import RequestError
from tests.support.hub_fakes import FakeReplica, collect, running_hub, text_of
from tests.support.speaking import served

_ECHO = "stages: [{stage_id: 0, engine: echo, final_output: text}]"


class _Stepping(FakeReplica):
    """Two requests get their pieces in frames of both; ``stray`` are messages among them."""

    def __init__(self, *stray: wire.FromReplica) -> None:
        super().__init__(lambda _replica, submit: self._submitted(submit))
        self.submits: list[wire.Submit] = []
        self.stray = stray

    def _submitted(self, submit: wire.Submit) -> None:
        self.accept(submit)
        self.submits.append(submit)
        if len(self.submits) == 2:
            for seq in range(3):
                self._send([self._piece(each, seq) for each in self.submits], *self.stray)
            ends = [self._end(each) for each in self.submits]
            # The last pieces and the ends are in one frame, too: all of it keeps its order.
            self._send([self._piece(each, 3) for each in self.submits], *ends)

    def _send(self, pieces: list[wire.Chunk], *others: wire.FromReplica) -> None:
        self.send_head(wire.encode([*pieces, *others]))

    def _piece(self, submit: wire.Submit, seq: int) -> wire.Chunk:
        text = f"{submit.inputs['prompt']}{seq} "
        return wire.Chunk(**self._about(submit), seq=seq, modality="text", text=text, token_ids=(seq,))

    def _end(self, submit: wire.Submit) -> wire.StageDone:
        return wire.StageDone(**self._about(submit), seq=4, finish_reason="stop")


async def test_each_client_gets_its_own_of_them_and_strangers_are_dropped() -> None:
    """1. frames hold a piece of each of two requests, one of a request that nobody knows, and one of another epoch
    2. each client has its pieces in their order; the strangers are counted, and cost nobody anything
    """
    nobody = wire.Chunk(epoch=0, request_id="nobody", seq=1, modality="text", queue_length=0, text="no")
    replica = _Stepping()
    known = wire.Chunk(epoch=replica.info.epoch, request_id="nobody", seq=1, modality="text", queue_length=7, text="no")
    replica.stray = (nobody, known)
    async with running_hub(replica) as omni:
        answers = await asyncio.gather(*(collect(omni.generate({"prompt": name})) for name in ("a", "b")))
        assert [text_of(outputs) for outputs in answers] == ["a0 a1 a2 a3 ", "b0 b1 b2 b3 "]
        assert [output.token_ids for output in answers[0] if output.text] == [(0,), (1,), (2,), (3,)]
        for reason in ("epoch", "stale"):
            assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": reason}) == 3


async def test_a_bug_with_one_of_them_costs_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    take = RequestMachine.take_piece

    def take_with_a_bug(machine: RequestMachine, *given: object) -> object:
        if machine.state.inputs["prompt"] == "a":
            raise RuntimeError("a bug")
        return take(machine, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestMachine, "take_piece", take_with_a_bug)
    async with running_hub(_Stepping()) as omni:
        bad, good = (asyncio.create_task(collect(omni.generate({"prompt": name}))) for name in ("a", "b"))
        with pytest.raises(RequestError, match="a bug in the hub"):
            await bad
        assert text_of(await good) == "b0 b1 b2 b3 "


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_is_framed_as_its_version_of_http_has_it(version: str) -> None:
    """Also behind the first piece, which ASGI sends, and the second, for which h11 is asked."""
    body = b'{"stream": true, "messages": [{"role": "user", "content": "one two three four five"}]}'
    async with served(_ECHO) as hub:
        parts = urlsplit(hub.address)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(reader.read(), 20.0)
        writer.close()
    head_came, _, rest = answer.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head_came.lower()) is (version == "1.1")
    events = b""
    while version == "1.1" and rest:
        size, _, rest = rest.partition(b"\r\n")
        events, rest = events + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = events or rest
    assert re.findall(rb'"content":"([^"]*)"', events) == [b"one ", b"two ", b"three ", b"four ", b"five"]
    assert events.endswith(b"data: [DONE]\n\n")
    assert events.count(b"data: ") == events.count(b"\n\n")
