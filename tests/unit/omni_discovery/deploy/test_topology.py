"""What is planned before anything starts: which devices each replica gets."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from omni_discovery.deploy.document import RuntimeConfig, StageConfig, parse_deploy
from omni_discovery.deploy.topology import EdgePlan, devices_of, inherited_devices, plan
from omni_discovery.errors import ConfigError


def stage(devices: str, shares: bool = False, **engine_args: object) -> StageConfig:
    runtime = RuntimeConfig(devices=devices, share_devices=shares or UNSET)
    return StageConfig(stage_id=3, engine="vllm", engine_args=engine_args, runtime=runtime)


@pytest.mark.parametrize(
    ("devices", "engine_args", "count", "shares"),
    [
        ("", {}, 2, ["", ""]),
        ("", {"tensor_parallel_size": 2}, 1, [""]),
        ("0", {}, 1, ["0"]),
        ("0,1", {}, 2, ["0", "1"]),
        ("0, 1, 2, 3", {}, 2, ["0,1", "2,3"]),
        ("0", {}, 2, ["0", "1"]),
        ("2", {}, 3, ["2", "3", "4"]),
        ("0,1", {"tensor_parallel_size": 2}, 2, ["0,1", "2,3"]),
        ("1,0", {"tensor_parallel_size": 2}, 2, ["1,0", "3,2"]),
        ("cpu", {"tensor_parallel_size": 2}, 2, ["", ""]),
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
    ("devices", "engine_args", "count", "shares"),
    [
        ("0", {}, 3, ["0", "0", "0"]),
        ("0,1", {}, 4, ["0", "1", "0", "1"]),
        ("0,1", {}, 2, ["0", "1"]),
        ("GPU-a", {}, 2, ["GPU-a", "GPU-a"]),
        ("0,1", {"tensor_parallel_size": 2}, 2, ["0,1", "0,1"]),
        ("0,1,2,3", {"tensor_parallel_size": 2}, 3, ["0,1", "2,3", "0,1"]),
    ],
)
def test_replicas_share_devices_where_the_document_says_so(
    devices: str, engine_args: dict[str, object], count: int, shares: list[str]
) -> None:
    sharing = stage(devices, shares=True, **engine_args)
    assert [",".join(devices_of(sharing, count, ordinal)) for ordinal in range(count)] == shares


@pytest.mark.parametrize(
    ("visible", "size", "count", "shares"),
    [
        ("4,5", 1, 1, ["4,5"]),
        ("4,5", 1, 2, ["4", "5"]),
        ("0,1,2,3,4", 1, 2, ["0,1", "2,3"]),
        ("0,1,2,3", 2, 2, ["0,1", "2,3"]),
        ("", 1, 3, ["", "", ""]),
        ("", 2, 1, [""]),
    ],
)
def test_what_is_visible_is_shared_out_where_the_document_names_no_devices(
    visible: str, size: int, count: int, shares: list[str]
) -> None:
    names = tuple(visible.split(",")) if visible else ()
    unnamed = stage("", tensor_parallel_size=size)
    given = [inherited_devices(unnamed, names, count, ordinal, "it shows") for ordinal in range(count)]
    assert [",".join(share) for share in given] == shares


def test_too_few_visible_devices_are_refused_with_a_way_out_unless_they_are_shared_on_purpose() -> None:
    with pytest.raises(ConfigError) as refused:
        inherited_devices(stage(""), ("4",), 2, 0, "CUDA_VISIBLE_DEVICES='4' shows")
    assert "stage 3: 2 replicas of 1 device need 2, and CUDA_VISIBLE_DEVICES='4' shows 1:" in str(refused.value)
    assert "runtime: {share_devices: true}" in str(refused.value)
    with pytest.raises(
        ConfigError, match="1 replica of 2 devices needs 2, and it has 1: run fewer replicas here or use"
    ):
        inherited_devices(stage("", tensor_parallel_size=2), ("4",), 1, 0, "it has")
    shared = [inherited_devices(stage("", shares=True), ("4", "5"), 3, ordinal, "it has") for ordinal in range(3)]
    assert shared == [("4",), ("5",), ("4",)]


@pytest.mark.parametrize(
    ("devices", "engine_args", "count", "reason"),
    [
        ("0,1", {}, 4, r"2 devices \(0,1\) can't be shared out evenly to 4 .*right would be 4, .*share_devices: true"),
        ("GPU-a", {}, 2, "GPU-a can't be counted up for 2 replicas of 1 device: name all 2 in runtime.devices, or"),
        ("0,2", {"tensor_parallel_size": 2}, 2, "0,2 can't be counted up for 2 replicas of 2 devices: name all 4"),
        ("0", {"data_parallel_size": 2}, 1, "data_parallel_size is 2; .*leave it out and run 2 replicas"),
        ("0,1,2", {}, 2, r"stage 3: 3 devices \(0,1,2\) can't be shared out evenly to 2 replicas"),
        ("0", {"tensor_parallel_size": 2}, 2, r"2 replicas of 2 devices each .* need 4 devices; .* has 1 \(0\)"),
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
    told = plan(deploy, [(deploy.stage(0), 2), (deploy.stage(1), 1)]).warnings
    assert told == ("device 3 is shared by stage 0 and stage 1: its memory must do for all of them",)
    twice = plan(deploy, [(deploy.stage(0), 2), (stage("3,3"), 2)]).warnings
    assert twice == ("device 3 is shared by stage 0 and 2 replicas of stage 3: its memory must do for all of them",)
    assert plan(deploy, [(stage("3", shares=True), 2)]).warnings == ()


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
