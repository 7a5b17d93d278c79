"""A registered replica in a process of its own that sends its hub far more than anybody can keep or read."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from omni_discovery import wire
from omni_discovery.clients import OmniCoordClientForStage
from tests.support.hub_fakes import FakeReplica

#: So many heads of 4 MB, each of so many chunks that nobody asked for.
HEADS, CHUNKS = 120, 1000
#: So many pictures, of so many bytes each.
PICTURES, PICTURE_BYTES = 25, 60 << 20


def flood(replica: FakeReplica, submit: wire.Submit) -> None:
    """Pictures for whoever says ``flood``, sixty thousand timings for ``timings``; all others are echoed."""
    if "timings" in str(submit.inputs):
        timings_s = {f"{number:032}": 1.0 for number in range(60_000)}
        replica.accept(submit)
        about = replica._about(submit)
        replica.say(wire.StageDone(**about, seq=0, finish_reason="stop", timings_s=timings_s))
        return
    if "flood" not in str(submit.inputs):
        replica.accept(submit)
        replica.chunk(submit, 0, text="fine")
        replica.done(submit, 1)
        return
    replica.accept(submit)
    data = bytes(PICTURE_BYTES)
    for seq in range(PICTURES):
        replica.chunk(submit, seq, modality="image", mime="image/png", attachments=[data])
    replica.done(submit, PICTURES)


def flood_heads(replica: FakeReplica) -> None:
    """As many heads as ``HEADS`` says, all at once: the longest that a hub reads, about a request of nobody."""
    epoch, tokens = replica.info.epoch, (1,) * 4000
    chunk = wire.Chunk(
        epoch=epoch, request_id="nobody", queue_length=0, seq=0, modality="text", prompt_token_ids=tokens
    )
    head = wire.encode([chunk] * CHUNKS)
    assert 3 << 20 < len(head) <= wire.MAX_HEAD_BYTES, len(head)
    for _ in range(HEADS):
        replica.send_head(head)


def flood_maps(replica: FakeReplica) -> None:
    """Heads of 4 MB, each the result of a call of nobody: four million empty maps."""
    result = wire.ControlResult(epoch=replica.info.epoch, call_id="nobody", ok=True, queue_length=0, result=0)
    head, count = wire.encode(result), 4_000_000
    maps = b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count
    named = msgspec.msgpack.encode("result")
    assert head.count(named + b"\x00") == 1
    head = head.replace(named + b"\x00", named + maps)
    assert len(head) <= wire.MAX_HEAD_BYTES
    for _ in range(16):
        replica.send_head(head)


async def main(endpoint: str, namespace: str, weight: str = "1") -> None:
    """Serve until the standard input is closed; a line of it begins a flood of heads, ``maps`` of empty maps."""
    replica = FakeReplica(flood, cuts=True)
    info = replica.info
    fields = {
        "curve_public_key": info.curve_public_key,
        "capacity": 8,
        "weight": float(weight),
        "wire_version": info.wire_version,
    }
    with OmniCoordClientForStage(
        endpoint,
        info.input_addr,
        info.output_addr,
        0,
        namespace=namespace,
        fields=fields,
        on_registered=lambda _replica_id, epoch: object.__setattr__(info, "epoch", epoch),
    ):
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip() == "maps":
                flood_maps(replica)
            else:
                flood_heads(replica)
    replica.kill()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
