"""The environment of a replica process: its devices, its ports, and the variables that its engine reads."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.topology import KV_PORTS, devices_of
from omni_discovery.errors import ConfigError
from stage_runtime.supervisor.devices import UNKNOWN, Machine, environment_of, resolve


def replica_environment(
    base: dict[str, str],
    stage: StageConfig,
    settings: dict[str, str],
    count: int,
    ordinal: int,
    machine: Machine = UNKNOWN,
) -> dict[str, str]:
    """The environment of one replica. ``base``, the operator's, wins over ``settings`` but not over the devices."""
    narrowed = environment_of(replica_devices(base, stage, count, ordinal, machine), base, machine)
    return placed_environment(base, stage, settings, ordinal) | narrowed


def placed_environment(
    base: Mapping[str, str], stage: StageConfig, settings: Mapping[str, str], ordinal: int
) -> dict[str, str]:
    """The environment of one replica with the devices that ``base`` gives it."""
    return {
        **settings,
        **base,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **_kv_ports(base, stage, ordinal),
    }


def replica_devices(
    base: Mapping[str, str], stage: StageConfig, count: int, ordinal: int, machine: Machine
) -> tuple[str, ...]:
    """The devices of one replica by the machine's names for them. Raise ConfigError if one is not there."""
    names = devices_of(stage, count, ordinal)
    # The echo engine uses no device; its record shows the devices that another engine would get.
    return names if stage.engine == "echo" else resolve(stage.stage_id, names, base, machine)


def stage_devices(base: Mapping[str, str], stage: StageConfig, count: int, machine: Machine) -> tuple[str, ...]:
    """All devices that ``count`` local replicas will use. Raise ConfigError as ``replica_devices`` does."""
    devices = [replica_devices(base, stage, count, ordinal, machine) for ordinal in range(count)]
    return () if stage.engine == "echo" else tuple(dict.fromkeys(name for names in devices for name in names))


def doubtful_devices(base: Mapping[str, str], stage: StageConfig, count: int, machine: Machine) -> str:
    """Of a stage of the echo engine, the error that another engine's devices would be; empty otherwise."""
    if stage.engine != "echo":
        return ""
    try:
        for ordinal in range(count):
            resolve(stage.stage_id, devices_of(stage, count, ordinal), base, machine)
    except ConfigError as error:
        return f"{error}; not held against echo, which uses none"
    return ""


def stage_environment(stage: StageConfig, model_is_local: bool, advertise_host: str = "") -> dict[str, str]:
    """The variables that an engine and its libraries read when they are imported."""
    if stage.engine == "echo":
        return {}
    environment = {"OMP_NUM_THREADS": "1"}
    if model_is_local and stage.engine in ("vllm", "diffusion"):
        environment["HF_HUB_OFFLINE"] = "1"
    if stage.engine == "vllm":
        # On the CPU, threads bound to cores spin against each other as soon as there is a second replica.
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore::FutureWarning",
        }
        if advertise_host and stage.engine_args.get("kv_transfer_config"):
            # vLLM itself would say "localhost", which finds nothing from another machine.
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = advertise_host
    return environment


def _kv_ports(base: Mapping[str, str], stage: StageConfig, ordinal: int) -> dict[str, str]:
    """Ports on which other replicas fetch its KV cache: counted up from the operator's variable, else free ports."""
    if not stage.engine_args.get("kv_transfer_config"):
        return {}
    return {name: str(int(base[name]) + ordinal if base.get(name) else _free_port()) for name in KV_PORTS}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
