"""``python -m stage_runtime``: the supervisor of a stage's local replicas, and, as its child, one replica."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from omni_discovery.cli import add_security_options, configure_logging, read_security
from omni_discovery.data_plane_flags import add_data_plane_options, check_data_plane, read_labels, warn_if_plain
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.process_tools import die_with_parent
from stage_runtime.addresses import find_hosts
from stage_runtime.config import ReplicaConfig, SupervisorConfig
from stage_runtime.restarts import EXIT_CONFIG, EXIT_FAILED, narrow_devices


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
    parser.add_argument("--parent-pid", type=int, default=0, metavar="PID", help="drain when this process is gone")
    add_data_plane_options(parser)
    add_security_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit code: 0 done, 1 failed, 2 used wrongly."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--replica"]:
        os._exit(_run_replica(msgspec.json.decode(sys.stdin.buffer.read(), type=ReplicaConfig)))
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


def _supervise(arguments: argparse.Namespace) -> int:
    configure_logging()
    check_data_plane(arguments)
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
    config = SupervisorConfig(replica=replica, count=arguments.omni_dp_size_local, parent_pid=arguments.parent_pid)

    from omni_discovery.config import RegistryConfig
    from omni_discovery.registry_check import check_ttl
    from stage_runtime.engines.base import create_engine, modules_to_preload
    from stage_runtime.launch import SpawnLauncher, ZygoteLauncher, replica_environment
    from stage_runtime.pipeline_source import read_pipeline
    from stage_runtime.process_manager import Supervisor, stage_environment

    deploy = read_pipeline(
        replica.endpoints, replica.namespace, security=replica.security, absent_wait_s=replica.pipeline_wait_s
    )
    check_ttl(RegistryConfig(replica.endpoints, replica.namespace, replica.security, ttl_s=replica.ttl_s))
    stage = deploy.stage(replica.stage_id)
    # Built once here, unloaded, so that what is wrong with it is said once and before any process starts.
    create_engine(stage).close()
    narrow_devices(stage.runtime.devices, config.count, 0)
    settings = stage_environment(stage, Path(stage.model).exists(), advertise_host)
    # On the CPU only: a process that has looked at a GPU must not be forked.
    modules = modules_to_preload(stage.engine)
    supervisor = Supervisor(
        config,
        deploy,
        ZygoteLauncher(modules) if modules and not stage.runtime.devices else SpawnLauncher(),
        lambda ordinal: replica_environment(dict(os.environ), stage, settings, config.count, ordinal),
    )
    return supervisor.run()


def _run_zygote(parent_pid: int, modules: list[str]) -> int:
    die_with_parent(parent_pid, signal.SIGKILL)
    configure_logging()

    from stage_runtime.zygote import Zygote

    def run_replica(config: ReplicaConfig, environment: dict[str, str]) -> int:
        os.environ.clear()
        os.environ.update(environment)
        return _run_replica(config)

    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as orders:
        Zygote(orders, run_replica).serve(modules)
    return 0


def _run_replica(config: ReplicaConfig) -> int:
    """Run one replica to its end. The process has to end with ``os._exit`` of the code.

    Everything of ours is closed by then. The libraries' own shutdown, with their threads, may crash or hang after
    that, and the supervisor would take it for a failure of ours.
    """
    if config.parent_pid:
        die_with_parent(config.parent_pid, signal.SIGKILL)
    configure_logging()
    code = EXIT_FAILED
    try:
        from stage_runtime.pipeline_source import deploy_for
        from stage_runtime.replica_process import Replica

        device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        code = Replica(config, deploy_for(config), device=f"cuda:{device}" if device else "cpu").run()
    except ConfigError as error:
        code = EXIT_CONFIG
        sys.stderr.write(f"omni: {error}\n")
    except OmniError as error:
        sys.stderr.write(f"omni: {error}\n")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    return code
