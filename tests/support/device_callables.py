"""What the torch engine is told to call on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from omni_discovery.deploy.document import StageConfig


def torch_stage(name: str, device: str) -> StageConfig:
    """A stage that calls one of these."""
    args = {"target": f"tests.support.device_callables:{name}", "capacity": 4, "device": device}
    return StageConfig(stage_id=0, engine="torch", final_output="text", engine_args=args)


class Numbers(msgspec.Struct):
    numbers: torch.Tensor
    times: int = 1
    #: How many numbers to have beside these.
    room: int = 0


class Adder(torch.nn.Module):
    """Adds the numbers up, weighted, so many times: says where, and hands over the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, given: Numbers) -> Iterator[Any]:
        if given.room:
            given.numbers.new_zeros(given.room)
        sums = []
        for number in range(1, given.times + 1):
            sums.append((given.numbers * self.weight * number).sum())
            yield f"{given.numbers.device.type} {sums[-1].item()} "
        yield {"sums": torch.stack(sums)}


def break_device(given: Numbers) -> str:
    """Looks beyond the end of a tensor, which the device notices in the middle of its work."""
    beyond = torch.full((1,), 10**6, device=given.numbers.device)
    return str(given.numbers[beyond].sum().item())
