"""Embeddings on their way through a hub: shown once, and made again where a replica dies with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hub.request.outputs import OmniOutput
from omni_discovery import wire
from omni_discovery.errors import EngineFailedError
from stage_runtime.engines.files import npy_of
from tests.support.hub_fakes import FakeReplica, collect, running_hub

DEPLOY = "stages: [{stage_id: 0, engine: vllm, model: m, final_output: embedding}]"
NUMBERS = torch.tensor([[0.5, 1.0], [2.0, -1.0]])


def show_numbers(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.chunk(submit, 0, modality="embedding", mime="application/x-npy", attachments=[npy_of(NUMBERS)])


def pool(replica: FakeReplica, submit: wire.Submit) -> None:
    show_numbers(replica, submit)
    replica.done(submit, 1)


def die(replica: FakeReplica, submit: wire.Submit) -> None:
    replica.accept(submit)
    replica.kill_soon()


def show_and_die(replica: FakeReplica, submit: wire.Submit) -> None:
    show_numbers(replica, submit)
    replica.kill_soon(0.1)


def check(outputs: list[OmniOutput]) -> None:
    """One array, one end, one summary."""
    shown, end, summary = outputs
    assert shown.embedding is not None
    np.testing.assert_array_equal(shown.embedding, NUMBERS.numpy())
    assert (end.modality, end.finish_reason, end.embedding) == ("embedding", "stop", None)
    assert summary.is_summary


async def test_an_embedding_whose_replica_dies_is_made_by_another_and_shown_once() -> None:
    """1. the replica dies before it has said anything; 2. another dies behind the numbers, before their end"""
    for script in (die, show_and_die):
        a, b = FakeReplica(script), FakeReplica(pool, replica_id=1)
        async with running_hub(a, b, deploy=DEPLOY) as omni:
            for _ in range(2):
                check(await collect(omni.generate({"prompt": "x"}, params={0: {"dimensions": 2}})))
        submits = [submit for each in (a, b) for submit in each.of(wire.Submit)]
        assert len(submits) == 3
        assert all(submit.params == {"dimensions": 2} and submit.resume is None for submit in submits)


async def test_what_is_no_array_harms_only_who_reads_it() -> None:
    def lie(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.chunk(submit, 0, modality="embedding", mime="application/x-npy", attachments=[b"\x80\x04."])
        replica.done(submit, 1)

    async with running_hub(FakeReplica(lie), deploy=DEPLOY) as omni:
        shown, *_ = await collect(omni.generate({"prompt": "x"}))
    with pytest.raises(EngineFailedError, match="npy"):
        _ = shown.embedding
