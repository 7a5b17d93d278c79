"""What ``async_chunk`` of an edge does with the engines on both its ends."""

from __future__ import annotations

import pytest

from omni_discovery.deploy.document import DeployConfig, parse_deploy
from omni_discovery.deploy.pieces import late_edges, why_late


def pair(first: str, second: str, more: str = "async_chunk: true") -> DeployConfig:
    stages = f"stages: [{{stage_id: 0, {first}}}, {{stage_id: 1, {second}, final_output: text}}]"
    return parse_deploy(f"{stages}\n{more}", "test")


SPEAKS = "engine: vllm-omni, model: /m"
WHOLE = "engine: vllm-omni, model: /m, engine_args: {async_chunk: false}"


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("engine: vllm, model: /m", "engine: vllm, model: /m", "'vllm' of stage 1 reads the pieces ahead"),
        # Its function may read them as they come.
        ("engine: echo", "engine: torch", ""),
        ("engine: vllm, model: /m", "engine: diffusion, model: /m", "'diffusion' of stage 1 begins once all"),
        ("engine: diffusion, model: /m", "engine: echo", "'diffusion' of stage 0 makes no pieces"),
        (WHOLE, SPEAKS, "stage 0 has engine_args.async_chunk: false"),
        (SPEAKS, WHOLE, "stage 1 has engine_args.async_chunk: false"),
        (SPEAKS, SPEAKS, ""),
        ("engine: echo", "engine: echo", ""),
        ("engine: theirs", "engine: theirs", ""),
    ],
)
def test_an_edge_whose_next_stage_waits_for_the_end_is_named_with_the_reason(first: str, second: str, why: str) -> None:
    deploy = pair(first, second)
    found = late_edges(deploy)
    assert len(found) == bool(why)
    assert why in why_late(deploy, 0, 1)
    assert all(why in text and "edge 0 to 1" in text for text in found)


def test_edges_without_pieces_are_not_named() -> None:
    stage = "engine: vllm, model: /m"
    assert late_edges(pair(stage, stage, "async_chunk: false")) == []
    assert late_edges(pair(stage, stage, "async_chunk: true\nedges: [{from: 0, to: 1, async_chunk: false}]")) == []
    assert len(late_edges(pair(stage, stage, "edges: [{from: 0, to: 1, async_chunk: true}]"))) == 1
