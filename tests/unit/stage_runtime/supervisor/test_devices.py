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
    device_in_use,
    device_text,
    find_machine,
    visible_devices,
    what_shows,
)
from stage_runtime.supervisor.environment import (
    doubtful_devices,
    inherited_text,
    on_cpu_only,
    replica_environment,
    stage_devices,
)

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


@pytest.mark.parametrize(
    ("machine", "base", "shows"),
    [
        (TWO_GPUS, {}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (NOTHING, {"CUDA_VISIBLE_DEVICES": "4,5"}, [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"}]),
        (NOTHING, {}, [{"CUDA_VISIBLE_DEVICES": ""}] * 2),
        (TWO_GPUS, {"CUDA_VISIBLE_DEVICES": ""}, [{"CUDA_VISIBLE_DEVICES": ""}] * 2),
        (UNKNOWN, {}, [{}, {}]),
    ],
)
def test_replicas_of_a_stage_without_devices_share_out_what_there_is(
    machine: Machine, base: dict[str, str], shows: list[dict[str, str]]
) -> None:
    """Where nothing is there, they run on the CPU; where nobody can tell, they inherit what their supervisor sees."""
    made = [replica_environment(base, stage(""), {}, 2, ordinal, machine) for ordinal in (0, 1)]
    assert [shown(each) for each in made] == shows
    assert on_cpu_only(base, stage(""), 2, machine) == (shows[0] == {"CUDA_VISIBLE_DEVICES": ""})
    assert stage_devices(base, stage(""), 2, machine) == ()


def test_a_single_replica_inherits_everything_and_the_log_says_it() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert shown(replica_environment(base, stage(""), {}, 1, 0, TWO_GPUS)) == base
    assert (
        inherited_text(base, stage(""), 1, TWO_GPUS)
        == "CUDA_VISIBLE_DEVICES='4,5' shows what its replicas use: one gets 4,5"
    )
    assert inherited_text({}, stage(""), 1, NOTHING) == inherited_text({}, stage("0"), 1, TWO_GPUS) == ""


def test_a_stage_that_says_cpu_is_shown_none_wherever_it_says_it() -> None:
    """``devices: cpu`` hides them; an engine that is told to use the CPU needs none of its own."""
    base = {"CUDA_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "4"}
    made = replica_environment(base, stage("CPU"), {}, 3, 1, TWO_GPUS)
    assert shown(made) == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert shown(replica_environment(base, stage("", "diffusion", device="cpu"), {}, 3, 1, TWO_GPUS)) == base


def test_a_device_that_is_counted_up_and_is_not_there_is_refused_with_the_way_to_share() -> None:
    with pytest.raises(ConfigError) as refused:
        stage_devices({}, stage("0"), 2, Machine({Platform.CUDA: 1}))
    assert "stage 3: there is no device 1 here: this machine has 1 device, counted from 0" in str(refused.value)
    assert "share on purpose with runtime: {share_devices: true}" in str(refused.value)
    for devices, machine in (("0,1", Machine({Platform.CUDA: 1})), ("0", NOTHING)):
        with pytest.raises(ConfigError) as refused:
            stage_devices({}, stage(devices), 2, machine)
        assert "share" not in str(refused.value)


def test_what_is_visible_is_read_off_the_variables_before_the_machine() -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1, 3,-1,2"}, NOTHING) == ("1", "3")
    assert visible_devices({"ROCR_VISIBLE_DEVICES": "4,5"}, Machine({Platform.ROCM: 8})) == ("0", "1")
    assert visible_devices({}, Machine({Platform.CUDA: 1, Platform.ROCM: 1})) is None
    assert what_shows({"ROCR_VISIBLE_DEVICES": "4"}) == "ROCR_VISIBLE_DEVICES='4' shows"
    assert what_shows({}) == "this machine has"


@pytest.mark.parametrize(
    ("devices", "base", "machine", "said"),
    [
        ("2", {}, TWO_GPUS, "there is no device 2 here: this machine has 2 devices, counted from 0; correct"),
        (
            "0",
            {},
            NOTHING,
            "there is no device 0 here: this machine has none; set runtime.devices to cpu (here alone: --",
        ),
        ("0", {}, NOTHING, """'{"3": {"devices": "cpu"}}'), or leave it out"""),
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
    assert find_machine(tmp_path, lambda: 0) == found


def test_where_the_kernel_shows_too_little_nvidia_smi_is_asked(tmp_path: Path) -> None:
    """As under WSL; not where there is nothing, nor where the kernel has counted them."""
    assert find_machine(tmp_path, lambda: 3) == NOTHING
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert find_machine(tmp_path, lambda: 3) == Machine({Platform.CUDA: 3}, True)
    (tmp_path / "dev/nvidia0").touch()
    assert find_machine(tmp_path, lambda: 3) == Machine({Platform.CUDA: 1}, True)


def test_nvidia_smi_itself_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_machine(tmp_path) == UNKNOWN
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-a)'; echo '  MIG 1g'; echo 'GPU 1: A (UUID: GPU-b)'\n")
    command.chmod(0o755)
    assert find_machine(tmp_path) == Machine({Platform.CUDA: 2}, True)
    command.write_text("#!/bin/sh\necho 'GPU 0: none'; exit 9\n")
    assert find_machine(tmp_path) == UNKNOWN


@pytest.mark.parametrize(("vendor", "found"), [("0x10de", UNKNOWN), ("0x8086", NOTHING), ("what", NOTHING)])
def test_a_card_whose_driver_was_not_used_yet_may_be_there(tmp_path: Path, vendor: str, found: Machine) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text(f"{vendor}\n")
    assert find_machine(tmp_path, lambda: 0) == found


def test_of_amd_s_nodes_the_processors_are_none(tmp_path: Path) -> None:
    for number, gpu_id in enumerate(["0\n", "51234\n", "51235\n"]):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(gpu_id)
    assert find_machine(tmp_path) == Machine({Platform.ROCM: 2})


@pytest.mark.parametrize(
    ("named", "engine", "device", "seen", "in_use"),
    [
        ("0", "vllm", "cuda:0", False, None),
        ("0", "vllm", "cuda:0", True, "cuda:0"),
        ("", "vllm", "cuda:0", False, "cpu"),
        ("", "vllm", "cuda:0", True, "cuda:0"),
        ("", "vllm", "cpu", False, "cpu"),
        ("0", "echo", "cuda:0", False, "cuda:0"),
    ],
)
def test_an_engine_that_fell_back_to_the_cpu_is_not_taken_for_one_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    named: str,
    engine: str,
    device: str,
    seen: bool,
    in_use: str | None,
) -> None:
    """Refused where the document names the device; where it was inherited, the log and the record say it."""
    looks = SimpleNamespace(is_available=lambda: seen)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=looks, cuda=looks, __version__="2.9"))
    if in_use is None:
        with pytest.raises(ConfigError, match=r"torch 2\.9 sees nothing of cuda:0: check the driver"):
            device_in_use(stage(named, engine), device)
    else:
        assert device_in_use(stage(named, engine), device) == in_use
        assert ("replica.on_cpu stage=3: torch 2.9 sees nothing" in caplog.text) == (device != in_use)


def test_an_engine_that_is_told_to_use_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=looks, cuda=looks, __version__="2.9"))
    assert device_in_use(stage("", "diffusion", device="cpu"), "cuda:0,1") == "cpu"
