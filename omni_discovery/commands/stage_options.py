"""The settings of one stage's local replicas: one definition for a hub, for a supervisor and for each replica.

A process that starts another one hands them over as one JSON document in memory, whose file descriptor stands in the
child's arguments: no setting is turned back into flags, and no secret is in an argument list or an environment, which
other users of the machine can read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from omni_discovery.commands.flags import CURVE, METRICS_HOST, PROCESSES, read_labels, read_log_options
from omni_discovery.commands.registry import read_bounds, read_password, read_security
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.overrides import of_this_host, parse_overrides
from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import RegistrySecurity
from omni_discovery.logs.setup import LogOptions

T = TypeVar("T")

_CHECK_S: Final = 120.0


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a supervisor and its replicas share. Not checked here: ReplicaConfig checks them."""

    stage_id: int
    #: The etcd cluster, as ``parse_endpoints`` reads it; empty while the hub's embedded etcd has not started.
    endpoints: str = ""
    namespace: str = "default"
    security: RegistrySecurity = RegistrySecurity()
    #: TTL of the replica's lease.
    ttl_s: float = 10.0
    #: ``curve``, or ``none`` for sockets in plain text.
    zmq_security: str = CURVE
    #: The replica's labels, such as its zone; hubs prefer replicas that share theirs.
    labels: dict[str, str] = {}
    #: How long a drain waits for the requests in flight.
    drain_timeout_s: float = 60.0
    #: How long the engine may make no progress on its requests before the replica is replaced.
    stall_after_s: float = 60.0
    #: How long the engine may take to load before the process ends; None: three times what its lease allows.
    init_timeout_s: float | None = None
    #: What the supervisor and its replicas log, and in which format.
    log: LogOptions = LogOptions()
    #: What this host allows to a deploy document that comes from etcd.
    bounds: Bounds = Bounds()


class StageOptions(ReplicaOptions, frozen=True, kw_only=True):
    """The settings of one supervisor: ``count`` replicas of one stage."""

    count: int = 1
    #: The address that the replicas publish; empty for the one from which this machine reaches etcd.
    replica_address: str = ""
    #: Keys of the stage's ``runtime`` that differ on this host from the deploy document.
    runtime: dict[str, Any] = {}
    #: The Python of this host with vLLM-Omni in it, which runs its stages; empty: the supervisor's.
    omni_python: str = ""
    #: Processes of this machine, or actors of the Ray cluster at ``ray_address`` (empty for the one of this machine).
    worker_backend: str = PROCESSES
    ray_address: str = ""
    #: Where the supervisor serves metrics over HTTP; None: nowhere.
    metrics_host: str = METRICS_HOST
    metrics_port: int | None = None
    #: The file with the token that it asks for there; empty: it asks for none.
    metrics_token_file: str = ""
    #: The socket on which it sends its samples to the hub that has started it; None: no hub wants any.
    metrics_fd: int | None = None


class StageCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this machine could run ``count`` replicas of ``stage``: what ``--dry-run`` asks a process of its own."""

    stage: StageConfig
    deploy: DeployConfig
    count: int
    bounds: Bounds = Bounds()


class StageDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The last line that the process of a StageCheck prints: each replica's devices by the machine's names for them.

    None for a replica that gets whatever there is, which nobody can name.
    """

    of_replicas: list[tuple[str, ...] | None]


def read_stage_options(
    arguments: argparse.Namespace, stage_id: int, count: int, runtime: Mapping[str, Any]
) -> StageOptions:
    """The settings in the flags that ``omni serve`` and ``python -m stage_runtime`` share. Raise ConfigError."""
    return StageOptions(
        stage_id=stage_id,
        count=count,
        runtime=dict(runtime),
        omni_python=getattr(arguments, "omni_python", ""),
        endpoints=arguments.etcd_endpoints or "",
        namespace=arguments.namespace,
        security=read_security(arguments),
        ttl_s=arguments.omni_heartbeat_timeout,
        replica_address=arguments.omni_replica_address or "",
        zmq_security=arguments.zmq_security,
        labels=dict(read_labels(arguments.label)),
        drain_timeout_s=arguments.drain_timeout,
        stall_after_s=arguments.stall_after,
        init_timeout_s=arguments.stage_init_timeout,
        worker_backend=arguments.worker_backend,
        ray_address=arguments.ray_address,
        log=read_log_options(arguments),
        bounds=read_bounds(arguments),
        metrics_host=arguments.metrics_host or METRICS_HOST,
        metrics_port=arguments.metrics_port,
        metrics_token_file=str(Path(file).absolute()) if (file := arguments.metrics_token_file) else "",
    )


def runtime_here(arguments: argparse.Namespace, stage_id: int) -> Mapping[str, Any]:
    """The stage's ``runtime`` in ``--stage-overrides``; empty without any. Raise ConfigError."""
    return of_this_host(parse_overrides(arguments.stage_overrides)).get(stage_id, {})


def stage_command(config_fd: int, stage_id: int, *flags: str, python: str = "", namespace: str = "") -> list[str]:
    """The command of a process of ``stage_runtime`` with its settings in ``config_fd``.

    ``flags`` come first and choose the kind of process, ``python`` its interpreter, this one by default. The stage id
    and the ``namespace`` are only there to be read in the process list; the process takes them from its settings. With
    ``-P``, nothing is imported from the folder that it is started in.
    """
    words = ["-u", "-P", "-m", "stage_runtime", *flags, "--stage-id", str(stage_id), "--config-fd", str(config_fd)]
    return [python or sys.executable, *words, *(("--namespace", namespace) if namespace else ())]


def check_stage(check: StageCheck, environment: Mapping[str, str]) -> StageDevices | None:
    """Check engine, model, devices and connectors of a stage in a process of its own, in the stage's own Python.

    Return what it tells of the devices, None if it can't be read. Raise ConfigError. Warnings are printed.
    """
    stage, python = check.stage, check.stage.runtime.own_python
    try:
        ended = run_with_config(
            lambda config_fd: stage_command(config_fd, stage.stage_id, "--check", python=python),
            check,
            environment,
            _CHECK_S,
        )
    except OSError as error:
        raise ConfigError(f"stage {stage.stage_id}: runtime.python {python} can't be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"stage {stage.stage_id}: its engine can't be imported within {_CHECK_S:g} s") from error
    said = ended.stderr.decode("utf-8", "replace")
    if not ended.returncode:
        sys.stderr.write(said)
        try:
            # Before its last line stands what the engine's libraries print.
            return msgspec.json.decode(ended.stdout.strip().splitlines()[-1], type=StageDevices)
        except (msgspec.DecodeError, IndexError):
            return None
    last = (said.strip().splitlines() or [f"exit code {ended.returncode}"])[-1].removeprefix("omni: ")
    if "No module named" in last and python:
        last = (
            f"stage {stage.stage_id}: runtime.python {python} lacks what a replica needs: {last}; install it there:"
            f" {python} -m pip install 'omni-discovery[stage]', and what the engine needs"
        )
    raise ConfigError(last)


def open_config(config: msgspec.Struct) -> int:
    """Encode ``config`` as JSON into anonymous memory; return its file descriptor, for the caller to close.

    The descriptor is not inheritable by itself: give it to ``pass_fds`` of subprocess.
    """
    config_fd = os.memfd_create("omni-config", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(config_fd), "wb") as file:
        file.write(msgspec.json.encode(config))
    os.lseek(config_fd, 0, os.SEEK_SET)
    return config_fd


def run_with_config(
    command: Callable[[int], Sequence[str]], config: msgspec.Struct, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a process that reads ``config`` by ``read_config``, to its end. ``command`` gives its line for a descriptor.

    Raise OSError if it can't be run, subprocess.TimeoutExpired after ``timeout_s``.
    """
    config_fd = open_config(config)
    try:
        return subprocess.run(
            command(config_fd),
            stdin=subprocess.DEVNULL,
            pass_fds=(config_fd,),
            env=dict(environment),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    finally:
        os.close(config_fd)


def read_config(config_fd: int, kind: type[T]) -> T:
    """Read the document of ``open_config`` and close the descriptor. Raise ConfigError if it is no ``kind``.

    A password that came from a file is read from there again: it may have been changed since the parent started.
    """
    try:
        with os.fdopen(config_fd, "rb") as file:
            config = msgspec.json.decode(file.read(), type=kind)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config-fd {config_fd} holds no settings that this version can read: {error}") from error
    security = getattr(config, "security", None)
    if isinstance(config, msgspec.Struct) and isinstance(security, RegistrySecurity) and security.password_file:
        password = read_password(security.password_file)
        return msgspec.structs.replace(config, security=replace(security, password=password))
    return config
