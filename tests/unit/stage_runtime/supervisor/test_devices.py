"""Which devices a replica is shown, and what is said of those that are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_discovery.deploy.document import RuntimeConfig, StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.supervisor.devices import (
    UNKNOWN,
    Machine,
    Platform,
    check_devices_are_seen,
    device_text,
    find_machine,
)
from stage_runtime.supervisor.environment import doubtful_devices, replica_environment, stage_devices

TWO_GPUS = Machine({Platform.CUDA: 2})
NOTHING = Machine({})
NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def stage(devices: str, engine: str = "vllm", **engine_args: object) -> StageConfig:
    return StageConfig(stage_id=3, engine=engine, engine_args=engine_args, runtime=RuntimeConfig(devices=devices))


def shown(made: dict[str, str]) -> dict[str, str]:
    return {name: made[name] for name in NAMES if name in made}


@pytest.mark.parametrize(
    ("machine", "base", "shows"),
    [
        (TWO_GPUS, {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        (Machine({Platform.ROCM: 2}), {}, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
        (Machine({Platform.ASCEND: 2}), {}, {"CUDA_VISIBLE_DEVICES": "1", "ASCEND_RT_VISIBLE_DEVICES": "1"}),
        (TWO_GPUS, {"CUDA_VISIBLE_DEVICES": "6,7"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        (TWO_GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        (UNKNOWN, {"HIP_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": "5"}),
        (UNKNOWN, {"ROCR_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "4,5"}),
    ],
)
def test_a_replica_is_shown_its_share_under_each_name_of_its_platform(
    machine: Machine, base: dict[str, str], shows: dict[str, str]
) -> None:
    """Indices count what the supervisor was shown; what HIP counts within is left as it is."""
    assert shown(replica_environment(base, stage("0,1"), {}, 2, 1, machine)) == shows


def test_a_tensor_parallel_replica_is_shown_its_whole_group() -> None:
    four = stage("0,1,2,3", tensor_parallel_size=2)
    made = [replica_environment({}, four, {}, 2, ordinal, Machine({Platform.CUDA: 4})) for ordinal in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in made] == ["0,1", "2,3"]
    assert made[0]["MASTER_PORT"] != made[1]["MASTER_PORT"]


def test_a_stage_without_devices_is_shown_none() -> None:
    made = replica_environment({"HIP_VISIBLE_DEVICES": "0"}, stage(""), {}, 1, 0, TWO_GPUS)
    assert shown(made) == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("devices", "base", "machine", "said"),
    [
        ("2", {}, TWO_GPUS, "there is no device 2 here: this machine has 2 devices, counted from 0; correct"),
        ("0", {}, NOTHING, "there is no device 0 here: this machine has none; leave runtime.devices empty for the CPU"),
        ("1", {"CUDA_VISIBLE_DEVICES": "5"}, UNKNOWN, "CUDA_VISIBLE_DEVICES='5' shows 1 device, counted from 0"),
        ("0", {"CUDA_VISIBLE_DEVICES": "-1"}, TWO_GPUS, "CUDA_VISIBLE_DEVICES='-1' shows none"),
        ("0,1,2", {}, Machine({Platform.ROCM: 2}), "no device 2 here"),
    ],
)
def test_an_index_that_is_not_there_is_refused_with_what_there_is(
    devices: str, base: dict[str, str], machine: Machine, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        stage_devices(base, stage(devices), 1, machine)
    assert said in str(refused.value)
    assert str(refused.value).startswith("stage 3: ")


def test_where_nobody_can_know_nothing_is_refused() -> None:
    """An index on a machine with something else in it; a UUID; the echo engine, which uses none."""
    assert stage_devices({}, stage("0,1"), 2, UNKNOWN) == ("0", "1")
    assert stage_devices({}, stage("GPU-8932f937"), 1, TWO_GPUS) == ("GPU-8932f937",)
    assert stage_devices({}, stage("7", "echo"), 1, NOTHING) == ()
    assert "no device 7 here: this machine has none" in doubtful_devices({}, stage("7", "echo"), 1, NOTHING)
    assert doubtful_devices({}, stage("1", "echo"), 1, TWO_GPUS) == ""


def test_the_record_names_devices_as_torch_does() -> None:
    assert device_text({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"}) == "cuda:0,1"
    assert device_text({"CUDA_VISIBLE_DEVICES": "2", "ASCEND_RT_VISIBLE_DEVICES": "2"}) == "npu:2"
    assert device_text({"CUDA_VISIBLE_DEVICES": ""}) == "cpu"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], NOTHING),
        (["dev/nvidia0", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm"], Machine({Platform.CUDA: 2}, True)),
        (["dev/davinci0", "dev/davinci_manager"], Machine({Platform.ASCEND: 1})),
        (["dev/dxg"], UNKNOWN),
        (["dev/dri/renderD128", "dev/dri/card0"], UNKNOWN),
    ],
)
def test_accelerators_are_counted_by_what_the_kernel_shows(tmp_path: Path, files: list[str], found: Machine) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_machine(tmp_path) == found


@pytest.mark.parametrize(("vendor", "found"), [("0x10de", UNKNOWN), ("0x8086", NOTHING), ("what", NOTHING)])
def test_a_card_whose_driver_was_not_used_yet_may_be_there(tmp_path: Path, vendor: str, found: Machine) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text(f"{vendor}\n")
    assert find_machine(tmp_path) == found


def test_of_amd_s_nodes_the_processors_are_none(tmp_path: Path) -> None:
    for number, gpu_id in enumerate(["0\n", "51234\n", "51235\n"]):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(gpu_id)
    assert find_machine(tmp_path) == Machine({Platform.ROCM: 2})


@pytest.mark.parametrize(
    ("engine", "device", "seen", "is_refused"),
    [
        ("vllm", "cuda:0", False, True),
        ("vllm", "cuda:0", True, False),
        ("vllm", "cpu", False, False),
        ("echo", "cuda:0", False, False),
    ],
)
def test_an_engine_that_fell_back_to_the_cpu_is_not_taken_for_one_on_its_device(
    monkeypatch: pytest.MonkeyPatch, engine: str, device: str, seen: bool, is_refused: bool
) -> None:
    looks = SimpleNamespace(is_available=lambda: seen)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=looks, cuda=looks, __version__="2.9"))
    if is_refused:
        with pytest.raises(ConfigError, match=r"torch 2\.9 sees nothing of cuda:0: check the driver"):
            check_devices_are_seen(stage("", engine), device)
    else:
        check_devices_are_seen(stage("", engine), device)
