"""What makes a version of a stage, and what does not."""

from __future__ import annotations

import pytest

from omni_discovery.deploy.document import encode_deploy, parse_deploy
from omni_discovery.deploy.fingerprint import document_fingerprint, stage_fingerprint, stage_fingerprints

PAIR = """
stages:
  - {stage_id: 0, engine: vllm, model: /m/a, engine_args: {max_model_len: 2048}, final_output: text}
  - {stage_id: 1, engine: diffusion, model: /m/b, final_output: image}
"""
EDGE = """
edges: [{from: 0, to: 1, connector: c, window_size: 4}]
connectors: {c: {name: TcpConnector}}
"""


def of(text: str) -> dict[int, str]:
    return stage_fingerprints(parse_deploy(text, "test"))


def test_a_fingerprint_stays_what_it_is_from_release_to_release() -> None:
    """Replicas of an older release would be refused otherwise, all at once."""
    assert of(PAIR) == {0: "0caa50081aea6991", 1: "106865ab62292976"}
    assert of(PAIR + EDGE) == {0: "7a52610e581b56df", 1: "752a1432246b4abf"}


@pytest.mark.parametrize(
    "other",
    [
        PAIR.replace("2048", "4096"),
        PAIR.replace("/m/a", "/m/a2"),
        PAIR.replace("/m/a", "/m/a, deterministic: true"),
        PAIR.replace("final_output: text", "final_output: text, default_sampling_params: {max_tokens: 3}"),
    ],
)
def test_what_is_said_of_a_stage_makes_its_version_and_no_others(other: str) -> None:
    assert of(other)[0] != of(PAIR)[0]
    assert of(other)[1] == of(PAIR)[1]


def test_where_replicas_run_and_what_is_said_as_it_would_be_anyway_makes_no_version() -> None:
    said = PAIR.replace("model: /m/b", "model: /m/b, input_from: [0], engine_args: {}, runtime: {num_replicas: 4}")
    assert of(said) == of(PAIR) == of("model: shown\n" + PAIR)


def test_an_edge_belongs_to_the_stages_at_both_its_ends() -> None:
    plain, joined, other = of(PAIR), of(PAIR + EDGE), of(PAIR + EDGE.replace("Tcp", "SharedMemory"))
    assert all(len({plain[stage_id], joined[stage_id], other[stage_id]}) == 3 for stage_id in (0, 1))


def test_documents_are_told_apart_by_their_bytes() -> None:
    deploy = parse_deploy(PAIR, "test")
    assert document_fingerprint(encode_deploy(deploy)) == document_fingerprint(encode_deploy(deploy))
    assert document_fingerprint(encode_deploy(deploy)) != document_fingerprint(b"{}")
    assert len(stage_fingerprint(deploy, 0)) == 16
