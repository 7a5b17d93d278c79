"""``python -m stage_runtime``: the supervisor of a stage's local replicas, and, as its child, one replica."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omni_discovery.commands.flags import (
    RAY,
    add_backend_options,
    add_data_plane_options,
    check_backend,
    check_data_plane,
    read_labels,
    warn_if_plain,
)
from omni_discovery.commands.main import add_security_options, configure_logging, read_security, user_runtime_dir
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.overrides import check_headless, document_here, parse_overrides
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.etcd.embedded_file import embedded_among
from omni_discovery.processes import die_with_parent, raise_descriptor_limit
from stage_runtime.addresses import find_hosts
from stage_runtime.config import ReplicaConfig, SupervisorConfig
from stage_runtime.status_pipe import LastWords, tell, tell_nobody
from stage_runtime.supervisor.devices import Machine, device_text
from stage_runtime.supervisor.restarts import EXIT_CONFIG, EXIT_FAILED

if TYPE_CHECKING:
    from omni_discovery.clients import OmniCoordClientForStage

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """The flags of the supervisor."""
    parser = argparse.ArgumentParser(prog="stage_runtime", description="Run local replicas of one stage.")
    parser.add_argument("--stage-id", type=int, required=True, help="which stage of the pipeline")
    parser.add_argument("--omni-dp-size-local", type=int, default=1, metavar="K", help="how many replicas (default: 1)")
    parser.add_argument(
        "--etcd-endpoints",
        default=os.environ.get("OMNI_ETCD_ENDPOINTS", ""),
        metavar="HOST:PORT[,...]",
        help="the etcd cluster (default: $OMNI_ETCD_ENDPOINTS)",
    )
    parser.add_argument("--namespace", default="default", help="which deployment on that etcd (default: %(default)s)")
    parser.add_argument(
        "--omni-heartbeat-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="the lease's TTL (default: %(default)s)",
    )
    parser.add_argument(
        "--omni-replica-address",
        "-ora",
        default="",
        metavar="HOST",
        help="the address under which hubs reach the replicas (default: the one that leads to etcd)",
    )
    parser.add_argument(
        "--stall-after",
        type=float,
        default=60.0,
        metavar="S",
        help="an engine that has work and stands still for so long is not renewed (default: %(default)s)",
    )
    parser.add_argument(
        "--stage-overrides",
        default="",
        metavar="JSON",
        help="the stage's 'runtime' on this host, where the pipeline in force says otherwise",
    )
    parser.add_argument("--parent-pid", type=int, default=0, metavar="PID", help="drain when this process is gone")
    add_backend_options(parser)
    add_data_plane_options(parser)
    add_security_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit code: 0 done, 1 failed, 2 used wrongly."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--replica"]:
        os._exit(_run_replica(msgspec.json.decode(sys.stdin.buffer.read(), type=ReplicaConfig)))
    if arguments[:1] == ["--check"]:
        return _check(int(arguments[1]))
    if arguments[:1] == ["--zygote"]:
        return _run_zygote(int(arguments[1]), arguments[2:])
    try:
        return _supervise(build_parser().parse_args(arguments))
    except ConfigError as error:
        sys.stderr.write(f"omni: {error}\n")
        return EXIT_CONFIG
    except OmniError as error:
        sys.stderr.write(f"omni: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _devices_here(base: Mapping[str, str], stage: StageConfig, count: int, machine: Machine) -> tuple[str, ...]:
    """What the replicas would use, said where it is doubtful. Raise ConfigError."""
    from stage_runtime.supervisor.environment import doubtful_devices, stage_devices

    devices = stage_devices(base, stage, count, machine)
    if doubt := doubtful_devices(base, stage, count, machine):
        logger.warning("stage.devices %s", doubt)
    return devices


def _check(count: int) -> int:
    """Whether this machine could run ``count`` replicas of the stage on standard input; says why not."""
    configure_logging()
    try:
        from stage_runtime.engine_loop.payloads import build_edges
        from stage_runtime.engines.base import create_engine
        from stage_runtime.supervisor.devices import find_machine

        stage, deploy = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[StageConfig, DeployConfig])
        engine = create_engine(stage)
        getattr(engine, "check", lambda: None)()
        engine.close()
        for edge in build_edges(deploy, stage.stage_id, "dry-run").values():
            edge.connector.close()
        base, machine = dict(os.environ), find_machine()
        _devices_here(base, stage, count, machine)
    except OmniError as error:
        sys.stderr.write(f"omni: {error}\n")
        return EXIT_CONFIG
    return 0


def _supervise(arguments: argparse.Namespace) -> int:
    configure_logging()
    check_data_plane(arguments)
    check_headless(parse_overrides(arguments.stage_overrides))
    check_backend(arguments)
    # A hub that has started this process has said it already.
    if not arguments.parent_pid:
        warn_if_plain(arguments.zmq_security)
    bind_host, advertise_host = "127.0.0.1", "127.0.0.1"
    if arguments.etcd_endpoints:
        bind_host, advertise_host = find_hosts(arguments.etcd_endpoints, arguments.omni_replica_address)
    replica = ReplicaConfig(
        stage_id=arguments.stage_id,
        endpoints=arguments.etcd_endpoints,
        security=read_security(arguments),
        namespace=arguments.namespace,
        ttl_s=arguments.omni_heartbeat_timeout,
        bind_host=bind_host,
        advertise_host=advertise_host,
        zmq_security=arguments.zmq_security,
        labels=dict(read_labels(arguments.label)),
        drain_timeout_s=arguments.drain_timeout,
        stall_after_s=arguments.stall_after,
        parent_pid=os.getpid(),
    )
    # The replicas have it in their settings; whatever else they load or start need not see it.
    os.environ.pop("OMNI_ETCD_PASSWORD", None)
    _be_brief(replica)
    config = SupervisorConfig(replica=replica, count=arguments.omni_dp_size_local, parent_pid=arguments.parent_pid)

    from omni_discovery.etcd.check import check_ttl
    from omni_discovery.etcd.config import RegistryConfig
    from stage_runtime.engines.base import create_engine
    from stage_runtime.supervisor.pipeline import read_pipeline

    raise_descriptor_limit("a replica")
    deploy = read_pipeline(
        replica.endpoints, replica.namespace, security=replica.security, absent_wait_s=replica.pipeline_wait_s
    )
    deploy = document_here(deploy, arguments.stage_overrides)
    check_ttl(RegistryConfig(replica.endpoints, replica.namespace, replica.security, ttl_s=replica.ttl_s))
    if arguments.worker_backend == RAY:
        return _run_on_ray(config, deploy, arguments.ray_address)
    # Built once here, unloaded, so that what is wrong with it is said once and before any process starts.
    create_engine(deploy.stage(replica.stage_id)).close()
    return _run_supervisor(config, deploy)


def _run_supervisor(config: SupervisorConfig, deploy: DeployConfig) -> int:
    from stage_runtime.engines.base import modules_to_preload
    from stage_runtime.supervisor.device_locks import DeviceLocks, Holder
    from stage_runtime.supervisor.devices import find_machine
    from stage_runtime.supervisor.environment import replica_environment, stage_environment
    from stage_runtime.supervisor.launch import SpawnLauncher, ZygoteLauncher
    from stage_runtime.supervisor.supervisor import Supervisor

    replica, machine, base = config.replica, find_machine(), dict(os.environ)
    stage = deploy.stage(replica.stage_id)
    devices = _devices_here(base, stage, config.count, machine)
    holder = Holder(pid=os.getpid(), namespace=replica.namespace, stage_id=replica.stage_id)
    locks = DeviceLocks(user_runtime_dir(), devices, holder)
    locks.take()
    settings = stage_environment(stage, Path(stage.model).exists(), replica.advertise_host)
    # On the CPU only: a process that has looked at a GPU must not be forked.
    modules = modules_to_preload(stage.engine)
    supervisor = Supervisor(
        config,
        deploy,
        ZygoteLauncher(modules) if modules and not stage.runtime.devices else SpawnLauncher(),
        lambda ordinal: replica_environment(base, stage, settings, config.count, ordinal, machine),
        locks.leave,
    )
    return supervisor.run()


def _run_on_ray(config: SupervisorConfig, deploy: DeployConfig, address: str) -> int:
    from stage_runtime.supervisor.ray_launcher import RayLauncher
    from stage_runtime.supervisor.supervisor import Supervisor

    replica = config.replica
    launcher = RayLauncher(deploy.stage(replica.stage_id), config.count, address, replica.pipeline_wait_s)
    return Supervisor(config, deploy, launcher, lambda ordinal: {}).run()


def _run_zygote(parent_pid: int, modules: list[str]) -> int:
    die_with_parent(parent_pid, signal.SIGKILL)
    configure_logging()

    from stage_runtime.supervisor.zygote import Zygote

    def run_replica(config: ReplicaConfig, environment: dict[str, str]) -> int:
        os.environ.clear()
        os.environ.update(environment)
        return _run_replica(config)

    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as orders:
        Zygote(orders, run_replica).serve(modules)
    return 0


def _be_brief(config: ReplicaConfig) -> None:
    """Of etcd's known bugs hubs speak at length."""
    from omni_discovery.etcd.store import EtcdKV

    embedded = embedded_among(user_runtime_dir(), config.namespace, config.endpoints)
    EtcdKV.version_log.be_brief(embedded=embedded, count_only=True)


def _connect_with_stories(config: ReplicaConfig) -> Callable[..., OmniCoordClientForStage]:
    """Makes the replica's client of the registry, which leaves its lease's story for ``omni doctor``."""
    from omni_discovery.clients import OmniCoordClientForStage
    from omni_discovery.stories import Stories

    def connect(*arguments: Any, **options: Any) -> OmniCoordClientForStage:
        client = OmniCoordClientForStage(*arguments, **options)
        client.keep_stories(Stories(user_runtime_dir(), config.namespace))
        return client

    return connect


def _run_replica(config: ReplicaConfig) -> int:
    """Run one replica to its end. The process has to end with ``os._exit`` of the code.

    Everything of ours is closed by then. The libraries' own shutdown, with their threads, may crash or hang after
    that, and the supervisor would take it for a failure of ours.
    """
    if config.parent_pid:
        die_with_parent(config.parent_pid, signal.SIGKILL)
    configure_logging()
    word = tell if config.parent_pid else tell_nobody
    code = EXIT_FAILED
    try:
        from stage_runtime.replica.replica import Replica
        from stage_runtime.supervisor.pipeline import deploy_for

        _be_brief(config)
        deploy, device = deploy_for(config), device_text(os.environ)
        code = Replica(config, deploy, _connect_with_stories(config), device=device, tell=word).run()
    except OmniError as error:
        code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        word(LastWords(str(error)))
        sys.stderr.write(f"omni: {error}\n")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    return code
