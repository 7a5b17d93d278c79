"""What a document alone tells of vLLM's arguments: the devices of a replica, and pairs of prefill and decode."""

from __future__ import annotations

import re
from typing import Any

import pytest

from omni_discovery.deploy.document import StageConfig, decode_deploy, parse_deploy
from omni_discovery.deploy.engine_args import EngineProblem, bootstrap_port, group_size, pair_problems
from omni_discovery.errors import ConfigError


def stage(stage_id: int = 0, engine: str = "vllm", **engine_args: Any) -> StageConfig:
    return StageConfig(stage_id=stage_id, engine=engine, engine_args=engine_args)


def side(stage_id: int, role: str, connector: str = "NixlConnector", tensor: int = 1, **transfer: Any) -> StageConfig:
    more = {"kv_connector": connector, **transfer}
    return stage(stage_id, pd=role, tensor_parallel_size=tensor, kv_transfer_config=more)


def told(*stages: StageConfig) -> list[EngineProblem]:
    """What is wrong with stages that each take input from the one before."""
    return list(pair_problems(stages, {each.stage_id: (each.stage_id - 1,) for each in stages}))


def test_a_group_is_the_product_of_the_parallel_sizes() -> None:
    assert group_size(stage(tensor_parallel_size=2, pipeline_parallel_size=3)) == 6
    assert group_size(stage(data_parallel_size=1)) == 1


def test_data_parallel_copies_are_replicas_here() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_size is 4; .* run 4 replicas, by runtime: {num_replicas: 4}"):
        group_size(stage(data_parallel_size=4))
    assert group_size(stage(engine="mine", data_parallel_size=4)) == 1


def test_a_pair_that_fits_is_accepted_whatever_only_one_of_them_says() -> None:
    assert told(side(0, "prefill", kv_buffer_device="cuda"), side(1, "decode")) == []
    assert told(side(0, "prefill", tensor=2), side(1, "decode", tensor=2), stage(2)) == []


@pytest.mark.parametrize(
    ("prefill", "decode", "name", "values"),
    [
        ({}, {"connector": "MooncakeConnector"}, "kv_transfer_config.kv_connector", "'NixlConnector' .*'MooncakeConn"),
        (
            {"kv_buffer_device": "cuda"},
            {"kv_buffer_device": "cpu"},
            "kv_transfer_config.kv_buffer_device",
            "'cuda'.*'cpu'",
        ),
        ({"tensor": 2}, {"tensor": 4}, "tensor_parallel_size", "2 in stage 0 and 4 in stage 1"),
        ({"tensor": 2}, {}, "tensor_parallel_size", "2 in stage 0 and 1 in stage 1"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_both_values(
    prefill: dict[str, Any], decode: dict[str, Any], name: str, values: str
) -> None:
    ((stage_id, place, text, other),) = told(side(0, "prefill", **prefill), side(1, "decode", **decode))
    assert (stage_id, place, other) == (1, name, 0)
    assert re.search(f"stages 0 and 1 prefill and decode .*engine_args.{name} is .*{values}", text)


def test_one_half_of_a_pair_is_refused() -> None:
    assert "stage 1 decodes (engine_args.pd), and no stage" in told(stage(0), side(1, "decode"))[0][2]
    assert "no stage with pd: decode takes input from it" in told(side(0, "prefill"), stage(1))[0][2]


def test_the_bootstrap_port_is_read_and_checked() -> None:
    def with_port(port: Any) -> StageConfig:
        return stage(kv_transfer_config={"kv_connector_extra_config": {"mooncake_bootstrap_port": port}})

    assert bootstrap_port(with_port(25201)) == 25201
    assert bootstrap_port(stage()) is None
    for wrong in (0, 65536, "25201", True):
        with pytest.raises(ConfigError, match=r"mooncake_bootstrap_port is .*right would be a port"):
            bootstrap_port(with_port(wrong))


PAIR = """\
stages:
  - stage_id: 0
    engine: vllm
    is_prefill_only: true
    engine_args:
      kv_transfer_config: {kv_connector: NixlConnector}
  - stage_id: 1
    engine: vllm
    is_decode_only: true
    is_prefill_only: false
    engine_args:
      tensor_parallel_size: 1
      kv_transfer_config: {kv_connector: NixlConnector}
    final_output: text
"""


def test_a_file_of_vllm_omni_says_the_roles_in_its_own_way() -> None:
    assert [each.engine_args["pd"] for each in parse_deploy(PAIR, "p").stages] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("size: 1", "size: 2", "is 1 in stage 0 and 2 in stage 1; right would be the same (stage 0: line 5)"),
        (
            "size: 1\n      kv_transfer_config: {kv_connector: Nixl",
            "size: 1\n      kv_transfer_config: {kv_connector: Mooncake",
            "in stage 0 and 'MooncakeConnector' in stage 1; right would be the same (stage 0: line 6)",
        ),
        (
            "is_prefill_only: false",
            "is_prefill_only: true",
            "p:10: stage 1.is_prefill_only stands beside is_decode_only; a stage has one role: write engine_args.pd",
        ),
        ("is_decode_only: true", "is_decode_only: 7", "p:9: stage 1.is_decode_only is 7; right would be true or false"),
        (
            "size: 1",
            "size: 1\n      pd: prefill",
            "p:9: stage 1.is_decode_only stands beside engine_args.pd: prefill; ",
        ),
        ("size: 1", "size: 1\n      data_parallel_size: 2", "p:11: stage 1: engine_args.data_parallel_size is 2"),
        (
            "size: 1",
            "size: 1\n      parallel_config: {}",
            "stage 1.engine_args.parallel_config is not known: write tensor",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_line(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_deploy(PAIR.replace(old, new), "p")
    assert said in str(refused.value)


def test_a_document_in_force_is_read_as_it_stands() -> None:
    """A release before may have put it; its stages say themselves what is wrong."""
    value = b'{"stages":[{"stage_id":0,"engine":"vllm","engine_args":{"data_parallel_size":2},"final_output":"text"}]}'
    assert decode_deploy(value, "etcd").stages[0].engine_args == {"data_parallel_size": 2}
