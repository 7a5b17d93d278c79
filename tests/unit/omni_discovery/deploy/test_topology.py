"""What is planned before anything starts: which devices each replica gets."""

from __future__ import annotations

import pytest

from omni_discovery.deploy.document import RuntimeConfig, StageConfig, parse_deploy
from omni_discovery.deploy.topology import EdgePlan, devices_of, group_size, plan
from omni_discovery.errors import ConfigError


def stage(devices: str, **engine_args: object) -> StageConfig:
    return StageConfig(stage_id=3, engine="vllm", engine_args=engine_args, runtime=RuntimeConfig(devices=devices))


@pytest.mark.parametrize(
    ("devices", "engine_args", "count", "shares"),
    [
        ("", {}, 2, ["", ""]),
        ("", {"tensor_parallel_size": 2}, 1, [""]),
        ("0", {}, 1, ["0"]),
        ("0,1", {}, 2, ["0", "1"]),
        ("0, 1, 2, 3", {}, 2, ["0,1", "2,3"]),
        ("0,1", {}, 4, ["0", "1", "0", "1"]),
        ("GPU-a,MIG-b", {}, 2, ["GPU-a", "MIG-b"]),
        ("0,1,2,3", {"tensor_parallel_size": 2}, 2, ["0,1", "2,3"]),
        ("3,2,1,0", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1, ["3,2,1,0"]),
        ("0,0", {}, 2, ["0", "0"]),
    ],
)
def test_devices_are_shared_out_evenly(
    devices: str, engine_args: dict[str, object], count: int, shares: list[str]
) -> None:
    given = [devices_of(stage(devices, **engine_args), count, ordinal) for ordinal in range(count)]
    assert [",".join(share) for share in given] == shares


@pytest.mark.parametrize(
    ("devices", "engine_args", "count", "reason"),
    [
        ("0,1,2", {}, 2, r"stage 3: 3 devices \(0,1,2\) can't be shared out evenly to 2 replicas"),
        ("0,1", {"tensor_parallel_size": 2}, 2, r"2 replicas of 2 devices each .* need 4 devices; .* has 2 \(0,1\)"),
        ("0,1,2", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1, "need 4 devices; .* has 3"),
        ("0,0", {"tensor_parallel_size": 2}, 1, "a device twice: 0,0"),
        ("cuda:0", {}, 1, "'cuda:0', which is no device"),
        ("0", {"tensor_parallel_size": 0}, 1, "engine_args.tensor_parallel_size is 0"),
        ("0", {"tensor_parallel_size": "2"}, 1, "engine_args.tensor_parallel_size is '2'"),
    ],
)
def test_devices_that_do_not_go_round_are_refused_with_the_numbers(
    devices: str, engine_args: dict[str, object], count: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        devices_of(stage(devices, **engine_args), count, 0)


def test_a_group_is_the_product_of_the_parallel_sizes() -> None:
    assert group_size(stage("", tensor_parallel_size=2, pipeline_parallel_size=3)) == 6
    assert group_size(stage("")) == 1


PIPELINE = """
stages:
  - {stage_id: 0, engine: vllm, model: m, engine_args: {tensor_parallel_size: 2}, runtime: {devices: "0,1,2,3"}}
  - {stage_id: 1, engine: diffusion, model: m, runtime: {devices: "3"}}
  - {stage_id: 2, engine: echo, final_output: audio, input_from: [0, 1]}
edges:
  - {from: 0, to: 1, connector: small, window_size: 4, async_chunk: true}
  - {from: 0, to: 2, max_inflight: 8}
connectors:
  small: {name: SharedMemoryConnector, extra: {shm_threshold_bytes: 0}}
"""


def test_the_plan_has_every_replica_with_its_devices_and_ports_and_every_edge_with_its_connector() -> None:
    deploy = parse_deploy(PIPELINE, "p")
    topology = plan(deploy, [(deploy.stage(0), 2), (deploy.stage(2), 1)])
    assert [(each.stage_id, each.ordinal, each.devices) for each in topology.replicas] == [
        (0, 0, ("0", "1")),
        (0, 1, ("2", "3")),
        (2, 0, ()),
    ]
    assert [each.ports for each in topology.replicas] == [
        *[("input", "output", "MASTER_PORT")] * 2,
        ("input", "output"),
    ]
    assert topology.edges == (
        EdgePlan(0, 1, "SharedMemoryConnector", {"shm_threshold_bytes": 0}, in_pieces=True),
        EdgePlan(0, 2, "AutoConnector", {"max_inflight": 8}, in_pieces=False),
        EdgePlan(1, 2, "AutoConnector", {}, in_pieces=False),
    )
    assert topology.warnings == ()


def test_a_replica_that_hands_over_kv_has_ports_for_that() -> None:
    prefill = StageConfig(stage_id=0, engine="vllm", engine_args={"kv_transfer_config": {"kv_role": "kv_both"}})
    (replica,) = plan(parse_deploy(PIPELINE, "p"), [(prefill, 1)]).replicas
    assert replica.ports[-2:] == ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")


def test_stages_and_replicas_that_share_a_device_are_told() -> None:
    deploy = parse_deploy(PIPELINE, "p")
    told = plan(deploy, [(deploy.stage(0), 2), (deploy.stage(1), 2)]).warnings
    assert told == ("device 3 is shared by stage 0 and 2 replicas of stage 1: its memory must do for all of them",)


def test_devices_that_nobody_would_use_are_told() -> None:
    deploy = parse_deploy(PIPELINE, "p")
    (told,) = plan(deploy, [(deploy.stage(0), 1)]).warnings
    assert "stage 0: a replica gets 4 devices, and its parallel sizes in engine_args use 2" in told
    assert plan(deploy, [(stage("0,1"), 1)]).warnings != ()
    assert plan(deploy, [(stage("0"), 1)]).warnings == ()


def test_a_plan_that_is_not_possible_is_refused() -> None:
    deploy = parse_deploy(PIPELINE, "p")
    with pytest.raises(ConfigError, match=r"3 replicas of 2 devices each .* need 6 devices; .* has 4"):
        plan(deploy, [(deploy.stage(0), 3)])
