"""The environment of a replica process: its devices, its ports, and the variables that its engine reads."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from omni_discovery.deploy.document import StageConfig
from omni_discovery.deploy.engine_args import bootstrap_port
from omni_discovery.deploy.topology import (
    KV_PORTS,
    MOONCAKE_PORT,
    counts_up,
    devices_of,
    inherited_devices,
    names_cpu,
)
from omni_discovery.errors import ConfigError
from omni_discovery.processes import reads_own_files
from stage_runtime.supervisor.devices import (
    UNKNOWN,
    Machine,
    NoSuchDeviceError,
    environment_of,
    resolve,
    runs_on_cpu,
    visible_devices,
    what_shows,
)


def replica_environment(
    base: dict[str, str],
    stage: StageConfig,
    settings: dict[str, str],
    count: int,
    ordinal: int,
    machine: Machine = UNKNOWN,
) -> dict[str, str]:
    """The environment of one replica. ``base``, the operator's, wins over ``settings`` but not over the devices."""
    devices = replica_devices(base, stage, count, ordinal, machine)
    placed = placed_environment(base, stage, settings, ordinal)
    return placed if devices is None else placed | environment_of(devices, base, machine)


def placed_environment(
    base: Mapping[str, str], stage: StageConfig, settings: Mapping[str, str], ordinal: int
) -> dict[str, str]:
    """The environment of one replica with the devices that ``base`` gives it."""
    return {
        **settings,
        **base,
        # Engines start programs of their own, which load nothing from the current folder either.
        **reads_own_files(base),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **_kv_ports(base, stage, ordinal),
    }


def replica_devices(
    base: Mapping[str, str], stage: StageConfig, count: int, ordinal: int, machine: Machine
) -> tuple[str, ...] | None:
    """The devices of one replica by the machine's names for them; None for whatever the supervisor is shown.

    Raise ConfigError if one is not there, or if there are too few.
    """
    names = devices_of(stage, count, ordinal)
    if stage.engine == "echo" or names_cpu(stage):
        # The echo engine uses no device; its record shows the devices that another engine would get.
        return names
    if names:
        return _resolved(base, stage, count, names, machine)
    visible = visible_devices(base, machine)
    if visible is None or runs_on_cpu(stage):
        return None
    return inherited_devices(stage, visible, count, ordinal, what_shows(base))


def _resolved(
    base: Mapping[str, str], stage: StageConfig, count: int, names: tuple[str, ...], machine: Machine
) -> tuple[str, ...]:
    try:
        return resolve(stage.stage_id, names, base, machine)
    except NoSuchDeviceError as error:
        if not counts_up(stage, count):
            raise
        # Where not even the first replica's devices are there, sharing them would not help.
        resolve(stage.stage_id, devices_of(stage, count, 0), base, machine)
        raise ConfigError(
            f"{error}; {count} replicas take the devices from {stage.runtime.devices!r} on, one after the other: run"
            " fewer here, or let them share on purpose with runtime: {share_devices: true}"
        ) from error


def stage_devices(base: Mapping[str, str], stage: StageConfig, count: int, machine: Machine) -> tuple[str, ...]:
    """The devices that the document gives to ``count`` local replicas. Raise ConfigError as ``replica_devices``."""
    devices = [replica_devices(base, stage, count, ordinal, machine) or () for ordinal in range(count)]
    if stage.engine == "echo" or not stage.runtime.devices:
        return ()
    return tuple(dict.fromkeys(name for names in devices for name in names))


def inherited_text(base: Mapping[str, str], stage: StageConfig, count: int, machine: Machine) -> str:
    """What local replicas of a stage that names no devices get, for people; empty if they get none like that."""
    if stage.engine == "echo" or stage.runtime.devices:
        return ""
    shares = [replica_devices(base, stage, count, ordinal, machine) for ordinal in range(count)]
    given = [f"one gets {','.join(share)}" for share in shares if share]
    return f"{what_shows(base)} what its replicas use: {', '.join(given)}" if given else ""


def on_cpu_only(base: Mapping[str, str], stage: StageConfig, count: int, machine: Machine) -> bool:
    """Whether no local replica is shown any device. Raise ConfigError as ``replica_devices`` does."""
    return all(replica_devices(base, stage, count, ordinal, machine) == () for ordinal in range(count))


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
    if model_is_local and stage.engine in ("vllm", "vllm-omni", "diffusion"):
        environment["HF_HUB_OFFLINE"] = "1"
    if stage.engine == "vllm-omni":
        environment |= {
            # No bound: a request that waits for a hand-off is ended by its deadline.
            "VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": "0",
            # Some of its models read weights that are no safetensors; torch unpickles nothing but tensors then.
            "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        }
    if stage.engine in ("vllm", "vllm-omni"):
        # On the CPU, threads bound to cores spin against each other as soon as there is a second replica.
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            # It says the same of a model's config a dozen times.
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore::FutureWarning",
        }
        if _is_on_one_host(stage.engine_args):
            # The ports between the ranks of a stage: without this, on the address that the host's name has.
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        if advertise_host and (transfer := stage.engine_args.get("kv_transfer_config")):
            # vLLM itself would say "localhost", which finds nothing from another machine.
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = advertise_host
            if isinstance(transfer, dict) and transfer.get("kv_connector") == "MooncakeConnector":
                # It has no variable of its own; vLLM would look for an address, and say 0.0.0.0 where it finds none.
                environment["VLLM_HOST_IP"] = advertise_host
    return environment


def _is_on_one_host(engine_args: Mapping[str, Any]) -> bool:
    """Whether no argument lets vLLM put ranks of one replica on other hosts."""
    backends = (engine_args.get("distributed_executor_backend"), engine_args.get("data_parallel_backend"))
    return "ray" not in backends and engine_args.get("nnodes", 1) == 1 and not engine_args.get("data_parallel_address")


def _kv_ports(base: Mapping[str, str], stage: StageConfig, ordinal: int) -> dict[str, str]:
    """Ports on which other replicas fetch its KV cache, counted up per replica; free ports where none is said.

    The operator's variable wins over the port in ``kv_transfer_config``.
    """
    if not stage.engine_args.get("kv_transfer_config"):
        return {}
    first = {name: int(base[name]) for name in KV_PORTS if base.get(name)}
    if (port := bootstrap_port(stage)) is not None:
        first.setdefault(MOONCAKE_PORT, port)
    return {name: str(first[name] + ordinal if name in first else _free_port()) for name in KV_PORTS}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
