"""A pipeline with three final stages on real sockets: a thinker whose answer is drawn and spoken at the same time."""

from __future__ import annotations

import asyncio

from hub.async_omni import AsyncOmni
from hub.request.outputs import OmniOutput
from hub.request.state import OrchestratorRequestState
from omni_discovery import wire
from tests.support.hub_fakes import FakeReplica, accept_only, collect, running_hub, text_of, until

BRANCHES = """
stages:
  - {stage_id: 0, engine: echo, final_output: text, default_sampling_params: {temperature: 0.0, max_tokens: 8}}
  - {stage_id: 1, engine: echo, input_from: [0], final_output: image, default_sampling_params: {steps: 20}}
  - {stage_id: 2, engine: echo, input_from: [0], final_output: audio}
"""


def state_of(omni: AsyncOmni) -> OrchestratorRequestState:
    """Of the only request under way."""
    orchestrator = omni._orchestrator
    assert orchestrator is not None
    (state,) = orchestrator.request_states.values()
    return state


def speak(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.chunk(submit, 0, text="a ")
    replica.chunk(submit, 1, text="cat")
    replica.done(submit, 2)


class Scene:
    """The three replicas; the painter and the speaker do only what the test has them do."""

    def __init__(self) -> None:
        self.thinker = FakeReplica(speak)
        self.painter = FakeReplica(accept_only, stage_id=1)
        self.speaker = FakeReplica(accept_only, stage_id=2)

    async def both_at_work(self) -> tuple[wire.Submit, wire.Submit]:
        await until(lambda: bool(self.painter.of(wire.Submit) and self.speaker.of(wire.Submit)))
        (painting,), (speaking,) = self.painter.of(wire.Submit), self.speaker.of(wire.Submit)
        return painting, speaking

    def paint(self, submit: wire.Submit, seq: int) -> None:
        self.painter.chunk(submit, seq, modality="image", mime="image/png", attachments=[b"PNG%d" % seq])

    def sing(self, submit: wire.Submit, seq: int) -> None:
        self.speaker.chunk(submit, seq, modality="audio", mime="audio/wav", attachments=[b"WAV%d" % seq])


async def test_outputs_of_two_branches_reach_the_client_as_they_appear() -> None:
    """1. the text comes, then picture, sound, picture, sound: each is read before the next is made
    2. the stages that are final, and those of them that have ended, are to be seen in the request's state
    """
    scene = Scene()
    async with running_hub(scene.thinker, scene.painter, scene.speaker, deploy=BRANCHES) as omni:
        outputs = omni.generate({"prompt": "x"})
        text = [await anext(outputs) for _ in range(3)]
        assert (text_of(text), text[-1].finish_reason) == ("a cat", "stop")
        painting, speaking = await scene.both_at_work()
        state = state_of(omni)
        assert (state.final_stage_id, state.final_output_stage_ids) == (2, {0, 1, 2})
        assert state.finished_final_output_stage_ids == {0}
        seen: list[OmniOutput] = []
        for seq in range(2):
            scene.paint(painting, seq)
            seen.append(await anext(outputs))
            scene.sing(speaking, seq)
            seen.append(await anext(outputs))
        assert [(output.modality, output.data) for output in seen] == [
            ("image", b"PNG0"),
            ("audio", b"WAV0"),
            ("image", b"PNG1"),
            ("audio", b"WAV1"),
        ]
        scene.speaker.done(speaking, 2)
        assert (await anext(outputs)).modality == "audio"
        assert state.finished_final_output_stage_ids == {0, 2}
        scene.painter.done(painting, 2)
        assert [output.modality for output in await collect(outputs)] == ["image", "summary"]
        assert state.finished_final_output_stage_ids == {0, 1, 2}


async def test_each_stage_gets_its_own_parameters_and_the_documents_where_none_are_given() -> None:
    scene = Scene()
    async with running_hub(scene.thinker, scene.painter, scene.speaker, deploy=BRANCHES) as omni:
        params = {0: {"temperature": 0.5}, 2: {"voice": "low"}}
        reading = asyncio.ensure_future(collect(omni.generate({"prompt": "x"}, params=params)))
        painting, speaking = await scene.both_at_work()
        (thinking,) = scene.thinker.of(wire.Submit)
        wanted = [{"temperature": 0.5, "max_tokens": 8}, {"steps": 20}, {"voice": "low"}]
        assert [each.params for each in (thinking, painting, speaking)] == wanted
        assert state_of(omni).sampling_params_list == wanted
        scene.painter.done(painting, 0)
        scene.speaker.done(speaking, 0)
        await reading


async def test_a_branch_that_nobody_asked_for_does_not_run() -> None:
    """Text and sound are wanted: what is final and what runs follow from that."""
    scene = Scene()
    async with running_hub(scene.thinker, scene.painter, scene.speaker, deploy=BRANCHES) as omni:
        outputs = omni.generate({"prompt": "x"}, modalities=["text", "audio"])
        await anext(outputs)
        await until(lambda: bool(scene.speaker.of(wire.Submit)))
        state = state_of(omni)
        assert (state.final_output_stage_ids, len(state.sampling_params_list)) == ({0, 2}, 2)
        scene.speaker.done(scene.speaker.of(wire.Submit)[0], 0)
        rest = await collect(outputs)
        assert [output.stage_id for output in rest if output.finish_reason] == [0, 2, -1]
        assert scene.painter.of(wire.Submit) == []
