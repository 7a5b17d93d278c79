"""A registered hub that has turned hostile talks to a real replica, which counts, drops, and serves everybody else."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import zmq

from omni_discovery import wire
from omni_discovery.curve import KeyPair
from tests.support.fuzz import bent, garbage, nested, number, odd_batch, oversized, resident_bytes, rounds
from tests.support.local_replica import LocalReplica
from tests.support.replica_hub import RawHub, eventually

ROUNDS = rounds(4000)
GOOD, BAD = KeyPair.generate(), KeyPair.generate()


class HostileHub:
    """Has a record and a key, and says whatever comes to its mind on both sockets."""

    def __init__(self, replica: LocalReplica, seed: int) -> None:
        self.rng = Random(seed)
        self.epoch = replica.info.epoch
        names = ["", "hub-2", "hub-1", "hub-1/" + "f" * 16, "", ""]
        self.hubs = [replica.raw_hub("hub-2", BAD, name) for name in names]
        #: Which of them talks now, and what each has sent: a request is one connection's, and so are its ids.
        self.talker = 0
        self.sent: list[list[bytes]] = [[] for _ in names]
        self.requests = 0

    def talk(self) -> None:
        """Send one multipart, and sometimes read what came."""
        self.talker = self.rng.randrange(len(self.hubs))
        hub = self.hubs[self.talker]
        target = hub.input if self.rng.random() < 0.8 else hub.output
        frames = self._frames()
        for _ in range(200):
            try:
                target.send_multipart(frames, zmq.NOBLOCK)
                break
            except zmq.Again:
                # Not connected yet, or never let in.
                if hub is not self.hubs[0]:
                    break
                time.sleep(0.001)
        if self.rng.random() < 0.1:
            self._read(self.rng.choice(self.hubs))

    def close(self) -> None:
        for hub in self.hubs:
            hub.close()

    def _read(self, hub: RawHub) -> None:
        for each in (hub.input, hub.output):
            with suppress(zmq.Again):
                while True:
                    each.recv_multipart(zmq.NOBLOCK)

    def _frames(self) -> list[bytes]:
        rng = self.rng
        head = wire.encode(self._message())
        roll = rng.random()
        if roll < 0.5:
            self.sent[self.talker].append(head)
            return [head]
        if roll < 0.6:
            # Again, and not in the order in which it was said first.
            return [rng.choice(self.sent[self.talker][-200:] or [head])]
        if roll < 0.65:
            return [head, *[rng.randbytes(20)] * rng.choice((1, 2, 17, 300))]
        if roll < 0.8:
            return [bent(rng, head)]
        if roll < 0.85:
            return [wire.encode([self._message() for _ in range(rng.randrange(1, 5))])]
        if roll < 0.9:
            return [odd_batch(rng, [wire.Hello(hub_id="hub-2", epoch=self.epoch)])]
        if roll < 0.93:
            return [wire.encode(self._misplaced())]
        if roll < 0.998:
            return [rng.choice((garbage, nested))(rng), *[b""] * rng.randrange(3)]
        return [oversized(rng, wire.Hello(hub_id="hub-2", epoch=self.epoch))]

    def _misplaced(self) -> wire.FromReplica:
        """What only a replica says."""
        about: dict[str, Any] = {"epoch": self.epoch, "request_id": "g1", "queue_length": 0}
        rng = self.rng
        return rng.choice(
            (
                wire.Chunk(**about, seq=0, modality="text", text="lie"),
                wire.Chunk(**about, seq=0, modality="text", logprobs=((wire.TokenLogprob(1, -0.5, 1, "lie"),),)),
                wire.Chunk(**about, seq=0, modality="text", prompt_logprobs=((wire.TokenLogprob(1, -0.5, 1, ""),),)),
                wire.Chunk(**about, seq=0, modality="text", text="lie", prompt_token_ids=(1, 2)),
                wire.StageDone(**about, seq=0, finish_reason="stop", stop_reason=rng.choice((1, "."))),
                wire.SegmentDone(**about, attempt=0, seq=0, segment=0, finish_reason="stop"),
                wire.HandOffPiece(**about, attempt=0, number=0, payloads=()),
                wire.PieceTaken(**about, attempt=0, from_stage=0, number=0),
                wire.Welcome(epoch=self.epoch, capacity=1, queue_length=0),
                wire.Grant(epoch=self.epoch, session=1, credits=5, queue_length=0),
            )
        )

    def _message(self) -> wire.ToReplica:
        rng = self.rng
        epoch = number(rng, self.epoch)
        kind = self._prefix
        if not self.talker and rng.random() < 0.3:
            # The names of the good hub's requests.
            kind = "g"
        request_id = f"{kind}{rng.randrange(40) if rng.random() < 0.5 else self._next()}"
        attempt = number(rng, 0)
        session = number(rng, 1)
        match rng.randrange(11):
            case 0:
                return wire.Hello(hub_id=rng.choice(("hub-2", "hub-2", "hub-1")), epoch=epoch, session=session)
            case 1:
                return wire.Abort(epoch=epoch, request_id=request_id, attempt=attempt)
            case 2:
                return wire.ReleasePayloads(epoch=epoch, request_id=request_id)
            case 3:
                wait_s = rng.choice((0.0, 1.0, 1e9))
                return wire.WantCredits(epoch=epoch, session=session, waiting=number(rng, 2), oldest_wait_s=wait_s)
            case 4:
                return wire.ReturnCredits(epoch=epoch, session=session, credits=number(rng, 1))
            case 5:
                return self._control(epoch)
            case 6:
                return self._update(epoch, request_id, attempt)
            case 7:
                return rng.choice((self._of_pieces, self._pause))(epoch, request_id, attempt)
            case _:
                return self._submit(epoch, request_id, attempt)

    def _of_pieces(self, epoch: int, request_id: str, attempt: int) -> wire.ToReplica:
        """Pieces of nobody for nothing, room for what was never made; or a request that waits for pieces."""
        rng = self.rng
        about: dict[str, Any] = {"epoch": epoch, "request_id": request_id, "attempt": attempt}
        stage_id = rng.randrange(3)
        if rng.random() < 0.3:
            return wire.PieceRoom(**about, to_stage=stage_id, number=number(rng, 1), again=rng.random() < 0.5)
        if rng.random() < 0.5:
            # Not for ever: it holds a place while it waits.
            left_s = rng.choice((0.0, 0.001, 0.3))
            return wire.Submit(**about, inputs={}, stream_from=(stage_id,), stream_to=(1, 2), remaining_s=left_s)
        ref = wire.PayloadRef(from_stage=stage_id, to_stage=0, key="/../x", connector="shm", size_bytes=1 << 50)
        return wire.Feed(
            **about,
            from_stage=rng.choice((stage_id, stage_id, 5)),
            number=number(rng, 0),
            payload=rng.choice((None, ref, ref)),
            is_last=rng.random() < 0.3,
        )

    def _pause(self, epoch: int, request_id: str, attempt: int) -> wire.ToReplica:
        """A pause of what runs, or of what was never there; what may be paused has not long, for it holds a place."""
        rng = self.rng
        short = f"{self._prefix}p{self.requests // 20}"
        if rng.random() < 0.4:
            return wire.Submit(epoch=epoch, request_id=short, inputs={"prompt": "bad words"}, remaining_s=0.2)
        is_paused = rng.random() < 0.6
        target = short if is_paused else rng.choice((short, request_id))
        return wire.Pause(epoch=epoch, request_id=target, attempt=attempt, paused=is_paused)

    def _control(self, epoch: int) -> wire.Control:
        """Anything but sleep, which a hub may ask for in earnest."""
        rng = self.rng
        return wire.Control(
            epoch=epoch,
            call_id=f"c{rng.randrange(300)}",
            method=rng.choice(
                ("list_loras", "add_lora", "remove_lora", "collective_rpc", "wake_up", "fly", "\0" * 256)
            ),
            args=rng.choice(((), (), ("x", 1, "/x"), (-1,), ([[]] * 100,), ("x" * 100_000,))),
            kwargs=rng.choice(({}, {}, {"": None}, {"name": "x", "lora_id": "y", "path": 1})),
            remaining_s=rng.choice((0.0, 5.0, 1e9)),
        )

    def _update(self, epoch: int, request_id: str, attempt: int) -> wire.ToReplica:
        """A segment for what was, or was not, begun as one of several; or the beginning of such a request."""
        rng = self.rng
        about: dict[str, Any] = {"epoch": epoch, "request_id": request_id, "attempt": attempt}
        inputs = rng.choice(({"prompt": "bad"}, {"prompt": "bad words"}, {}, {"prompt": 7}))
        if rng.random() < 0.5:
            # Not for ever: it holds a place while it waits for its next segment, as any request does.
            return wire.Submit(**about, inputs=inputs, segmented=True, remaining_s=rng.choice((0.0, 0.001, 0.3)))
        ref = wire.PayloadRef(from_stage=0, to_stage=0, key="/../x", connector="shm", size_bytes=1 << 50)
        return wire.Update(
            **about,
            segment=number(rng, 1),
            inputs=inputs,
            payloads=rng.choice(((), (), (ref,))),
            is_last=rng.random() < 0.2,
            kept_from=number(rng, 0),
        )

    def _submit(self, epoch: int, request_id: str, attempt: int) -> wire.Submit:
        rng = self.rng
        if rng.random() < 0.5:
            return wire.Submit(epoch=epoch, request_id=request_id, attempt=attempt, inputs={"prompt": "plain bad"})
        ref = wire.PayloadRef(from_stage=rng.randrange(3), to_stage=0, key="/../x", connector="shm", size_bytes=1 << 50)
        return wire.Submit(
            epoch=epoch,
            request_id=request_id,
            attempt=attempt,
            inputs=rng.choice(({"prompt": "bad"}, {"prompt": "bad words"}, {}, {"prompt": 7}, {"messages": [None]})),
            params=rng.choice(({}, {}, {"max_tokens": -1}, {"max_tokens": "x"}, {"seed": [[]]})),
            payloads=rng.choice(((), (), (ref,), (ref,) * 20)),
            next_stages=rng.choice(((), (1,), tuple(range(100)))),
            remaining_s=rng.choice((0.0, 0.001, 5.0, 1e9)),
            resume=rng.choice((None, None, wire.Resume(token_ids=(-1, 1 << 63), text="?"))),
            credit=rng.random() < 0.5,
            priority=rng.choice((0, -wire.MAX_PRIORITY, wire.MAX_PRIORITY)),
        )

    @property
    def _prefix(self) -> str:
        # No bent frame turns one connection's into another's.
        return f"b{str(self.talker) * 3}."

    def _next(self) -> int:
        self.requests += 1
        return self.requests


class GoodHub:
    """Asks one question after the other, in a thread of its own."""

    def __init__(self, replica: LocalReplica) -> None:
        self._replica = replica
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: dict[str, str] = {}
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._enough.set()
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        hub = self._replica.raw_hub("hub-1", GOOD)
        try:
            hub.hello()
            while not self._enough.is_set():
                self._ask(hub, f"g{len(self.answers)}")
        except BaseException as error:  # noqa: BLE001
            self.error = error
        finally:
            hub.close()

    def _ask(self, hub: RawHub, request_id: str) -> None:
        while True:
            hub.submit(request_id, f"{request_id} is fine")
            answer = hub.acknowledged()
            assert answer.request_id == request_id
            if isinstance(answer, wire.Accepted):
                break
            # The hostile one asks for much; it may fill the queue, and then the good one comes again.
            assert answer.kind is wire.FailureKind.OVERLOADED
            time.sleep(0.01)
        chunks, done, _ = hub.collect(request_id)
        assert isinstance(done, wire.StageDone), done
        assert done.finish_reason == "stop"
        self.answers[request_id] = "".join(chunk.text for chunk in chunks)


@pytest.fixture
def replica() -> Iterator[LocalReplica]:
    with LocalReplica({GOOD.public: "hub-1", BAD.public: "hub-2"}) as replica:
        yield replica


@pytest.mark.attack("C7")
@pytest.mark.parametrize("seed", range(3))
def test_a_hostile_hub_harms_nobody_and_nothing_runs_twice(
    seed: int, replica: LocalReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """1. a registered hub sends garbage, cut, bent, huge, repeated and misplaced frames, for other lives and sessions,
       in another hub's name, with parts that nobody expects
    2. another hub asks one question after the other: every answer is right
    3. each kind was counted, nothing was begun twice, nothing is left over, and no error was logged
    """
    before = resident_bytes()
    good, bad = GoodHub(replica), HostileHub(replica, seed)
    with caplog.at_level(logging.ERROR):
        good.start()
        for _ in range(ROUNDS):
            bad.talk()
        good.stop()
        bad.close()
        assert eventually(lambda: replica.server.queue_length == 0 and not replica.engine.has_unfinished(), 15.0)
    assert good.error is None, repr(good.error)
    assert good.answers == {f"g{index}": f"g{index} is fine" for index in range(len(good.answers))}
    counters = replica.server.counters
    assert counters["internal_errors"] == 0
    for kind in (
        "bad_frames",
        "wrong_epoch",
        "misplaced",
        "foreign_identity",
        "replayed",
        "old_session",
        "replayed_calls",
    ):
        assert counters[kind] > 0, (kind, counters)
    twice = {key: count for key, count in Counter(replica.engine.begun).items() if count > 1}
    assert twice == {}
    assert any(key.startswith("hub-2/") for key in replica.engine.begun)
    assert [record.getMessage() for record in caplog.records] == []
    assert resident_bytes() - before < 300 << 20


@pytest.mark.attack("C7")
def test_frames_that_come_again_in_any_order_run_nothing_again(replica: LocalReplica) -> None:
    """1. ten requests are run to their ends, and one is aborted before it comes
    2. all frames come again, forwards and backwards: the engine sees none of them
    """
    hub = replica.raw_hub("hub-1", GOOD)
    hub.hello()
    frames = [
        wire.encode(wire.Submit(epoch=hub.epoch, request_id=f"r{index}", inputs={"prompt": "once"}))
        for index in range(10)
    ]
    for index, frame in enumerate(frames):
        hub.input.send(frame)
        hub.acknowledged()
        hub.collect(f"r{index}")
    hub.send(wire.Abort(epoch=hub.epoch, request_id="late", attempt=0))
    hub.receive(hub.input, wire.Aborted)
    late = wire.encode(wire.Submit(epoch=hub.epoch, request_id="late", inputs={"prompt": "too late"}))
    for frame in [*frames, *reversed(frames), late]:
        hub.input.send(frame)
    assert eventually(lambda: replica.server.counters["replayed"] == 21)
    assert sorted(replica.engine.begun) == [f"hub-1/r{index}/0" for index in range(10)]
    hub.submit("r3", "another attempt", attempt=1)
    hub.acknowledged()
    assert hub.collect("r3")[1].finish_reason == "stop"
    hub.close()


@pytest.mark.attack("C2")
def test_connections_that_speak_no_zmq_at_all_cost_nobody_anything(
    replica: LocalReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """HTTP, TLS, noise, half a greeting and silence on both ports, two hundred times: a hub is served meanwhile."""
    rng = Random(7)
    talks = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        rng.randbytes(5000),
        b"\xff\0\0\0\0\0\0\0\x01\x7f",
        b"",
    ]
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    talks += [greeting, greeting + b"\x04\xff" + rng.randbytes(300), greeting.replace(b"CURVE", b"NULL\0")]
    hub = replica.raw_hub("hub-1", GOOD)
    hub.hello()
    open_ones = []
    with caplog.at_level(logging.ERROR):
        for index in range(200):
            port = sorted(replica.ports)[index % 2]
            stranger = socket.create_connection(("127.0.0.1", port), 5.0)
            stranger.sendall(talks[index % len(talks)])
            open_ones.append(stranger)
            if index % 10 == 0:
                hub.submit(f"r{index}", "still here")
                hub.acknowledged()
                assert hub.collect(f"r{index}")[1].finish_reason == "stop"
        for stranger in open_ones:
            stranger.close()
    hub.submit("last", "still here")
    hub.acknowledged()
    assert hub.collect("last")[1].finish_reason == "stop"
    assert {key.partition("/")[0] for key in replica.engine.begun} == {"hub-1"}
    assert replica.server.counters["internal_errors"] == 0
    assert caplog.records == []
    hub.close()
