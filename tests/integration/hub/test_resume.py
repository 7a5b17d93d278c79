"""Streams over real sockets whose replica dies: another goes on behind what was shown, with the echo engine's words."""

from __future__ import annotations

import pytest

from hub.api.errors import describe
from omni_discovery import wire
from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ReplicaLostError
from omni_discovery.wire import FailureKind
from stage_runtime.config import NotResumableError
from stage_runtime.engines.base import StageRequest, create_engine
from tests.support.hub_fakes import FakeReplica, collect, running_hub, text_of

PROMPT = "one two three four five"


def speak(replica: FakeReplica, submit: wire.Submit, words: int | None = None) -> None:
    """What the echo engine says to it, or only so many words of that."""
    about = {"epoch": submit.epoch, "request_id": submit.request_id, "attempt": submit.attempt, "queue_length": 1}
    engine = create_engine(StageConfig(stage_id=0, engine="echo"))
    replica.accept(submit)
    try:
        engine.add(StageRequest("k", submit.request_id, inputs=submit.inputs, resume=submit.resume))
    except NotResumableError as error:
        replica.say(wire.StageFailed(kind=FailureKind.NOT_RESUMABLE, reason=str(error), **about))
        return
    seq = 0
    while engine.has_unfinished():
        for output in engine.step():
            if seq == words:
                return
            if output.text:
                likely = tuple((wire.TokenLogprob(token_id, -0.5, 1, ""),) for token_id in output.token_ids)
                shown = {"text": output.text, "token_ids": output.token_ids, "logprobs": likely}
                replica.say(wire.Chunk(seq=seq, modality="text", **shown, **about))
                seq += 1
            if output.finished:
                replica.say(wire.StageDone(seq=seq, finish_reason="stop", usage=dict(output.usage), **about))


def speak_two_then_die(replica: FakeReplica, submit: wire.Submit) -> None:
    speak(replica, submit, words=2)
    replica.kill_soon(after_s=0.05)


async def test_a_stream_survives_two_replicas_and_shows_every_word_once() -> None:
    """1. a says two words and is killed, b says the next two and is killed, c says the last
    2. the client has every word once, with its logprobs, and the usage of the whole answer
    """
    fakes = [
        FakeReplica(speak_two_then_die),
        FakeReplica(speak_two_then_die, replica_id=1),
        FakeReplica(speak_two_then_die, replica_id=2),
    ]
    async with running_hub(*fakes) as omni:
        outputs = await collect(omni.generate({"prompt": PROMPT}))
        assert text_of(outputs) == PROMPT
        said = [token_id for output in outputs for token_id in output.token_ids]
        assert [place[0].token_id for output in outputs for place in output.logprobs] == said
        (end,) = [output for output in outputs if output.finish_reason and not output.is_summary]
        assert end.usage == {"prompt_tokens": 5, "completion_tokens": 5}
        submits = sorted((submit for fake in fakes for submit in fake.of(wire.Submit)), key=lambda each: each.attempt)
        assert ["" if each.resume is None else each.resume.text for each in submits] == [
            "",
            "one two ",
            "one two three four ",
        ]


async def test_what_can_not_be_continued_ends_with_both_reasons() -> None:
    """The second replica's prompt reads otherwise, as if it had another model."""

    def speak_of_something_else(replica: FakeReplica, submit: wire.Submit) -> None:
        if submit.resume is None:
            speak_two_then_die(replica, submit)
        else:
            other = wire.Submit(
                epoch=submit.epoch,
                request_id=submit.request_id,
                attempt=submit.attempt,
                inputs={"prompt": "another"},
                resume=submit.resume,
            )
            speak(replica, other)

    async with running_hub(
        FakeReplica(speak_of_something_else), FakeReplica(speak_of_something_else, replica_id=1)
    ) as omni:
        with pytest.raises(ReplicaLostError, match=r"other words: .*that was needed because of this: stage 0 replica"):
            await collect(omni.generate({"prompt": PROMPT}))


async def test_what_a_prompt_was_like_is_shown_once_though_replicas_die() -> None:
    """1. a tells of one part of the prompt and is killed: b tells of both, and the client gets the second of it
    2. b says a word behind that and is killed: c goes on behind the word, and has nothing to tell of the prompt
    """
    told: list[bool] = []

    def tell(replica: FakeReplica, submit: wire.Submit) -> None:
        about = {"epoch": submit.epoch, "request_id": submit.request_id, "attempt": submit.attempt, "queue_length": 1}
        said = {**about, "modality": "text"}
        parts = [((wire.TokenLogprob(number, -0.5, 1, "p"),),) for number in (1, 2)]
        replica.accept(submit)
        told.append(submit.resume is None)
        if submit.resume is not None:
            replica.say(wire.Chunk(**said, seq=0, text="two", token_ids=(8,)))
            replica.say(wire.StageDone(**about, seq=1, finish_reason="stop"))
            return
        shown = parts[:1] if submit.attempt == 0 else parts
        for seq, part in enumerate(shown):
            replica.say(wire.Chunk(**said, seq=seq, prompt_logprobs=part))
        if submit.attempt:
            replica.say(wire.Chunk(**said, seq=2, text="one ", token_ids=(7,)))
        replica.kill_soon(after_s=0.05)

    async with running_hub(*[FakeReplica(tell, replica_id=number) for number in range(3)]) as omni:
        outputs = await collect(omni.generate({"prompt": PROMPT}))
    assert text_of(outputs) == "one two"
    assert [place[0].token_id for output in outputs for place in output.prompt_logprobs] == [1, 2]
    assert told == [True, True, False]


@pytest.mark.attack("I7")
async def test_a_stream_that_is_too_long_to_go_on_elsewhere_is_no_fault_of_its_client() -> None:
    """1. of a prompt of 3 MB half has come back when the replica dies; 2. another would need more than a message holds
    3. the client is told of the lost replica, by what it may send again, and not that its request is wrong
    """

    def speak_half(replica: FakeReplica, submit: wire.Submit) -> None:
        about = {"epoch": submit.epoch, "request_id": submit.request_id, "attempt": submit.attempt, "queue_length": 1}
        replica.accept(submit)
        replica.say(wire.Chunk(seq=0, modality="text", text="x" * 1_500_000, token_ids=(7,), **about))

    fakes = [FakeReplica(speak_half), FakeReplica(speak_half, replica_id=1)]
    async with running_hub(*fakes) as omni:
        outputs = omni.generate({"prompt": "x" * 3_000_000})
        first = await anext(outputs)
        assert len(first.text) == 1_500_000
        next(fake for fake in fakes if fake.of(wire.Submit)).kill()
        with pytest.raises(
            ReplicaLostError, match="with the answer so far, the request fits into no message"
        ) as raised:
            await collect(outputs)
    status, body = describe(raised.value)
    assert (status, body["error"]["code"]) == (503, "replica_lost")
    assert body["error"]["message"].endswith("try again in 1 s")
