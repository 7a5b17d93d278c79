"""``python -m stage_runtime``: the supervisor of a stage's local replicas, and its child processes.

``--replica`` is one replica, ``--zygote`` the process that forks replicas, ``--check`` the process in which a dry run
tries a stage, ``--resolve`` the one that asks vLLM-Omni for a pipeline. All but the zygote, which has its orders from a
socket, read their settings from ``--config-fd``.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from omni_discovery.commands.flags import (
    RAY,
    add_backend_options,
    add_data_plane_options,
    add_loading_options,
    add_log_options,
    add_metrics_options,
    check_backend,
    check_data_plane,
    check_metrics,
    check_metrics_token,
    check_timeout,
    read_log_options,
    warn_if_plain,
)
from omni_discovery.commands.output import configure_logging, say
from omni_discovery.commands.registry import (
    add_security_options,
    add_trust_options,
    default_namespace,
    take_secrets,
    user_runtime_dir,
)
from omni_discovery.commands.stage_options import (
    StageCheck,
    StageDevices,
    StageOptions,
    check_stage,
    read_config,
    read_stage_options,
    runtime_here,
)
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.deploy.load import locate_model
from omni_discovery.deploy.overrides import check_headless, document_here, parse_overrides, with_omni_python
from omni_discovery.deploy.resolution import ResolveRequest
from omni_discovery.deploy.trust.judge import check_document
from omni_discovery.deploy.trust.model_code import guard_model_code, may_run_model_code
from omni_discovery.errors import ConfigError, OmniError
from omni_discovery.etcd.embedded_file import embedded_among
from omni_discovery.logs.setup import LogOptions, identify_process
from omni_discovery.metrics.samples import Sample, SupervisorSample
from omni_discovery.plugins import check_packages, vllm_plugins
from omni_discovery.processes import die_with_parent, raise_descriptor_limit, trust_folders
from omni_discovery.records.waits import WaitKind
from omni_discovery.stories import Waits
from stage_runtime.addresses import find_hosts
from stage_runtime.config import ReplicaConfig, SupervisorConfig, replica_config
from stage_runtime.private_folders import private_folders, remove_left_folders
from stage_runtime.status_pipe import Exiting, Registered, StatusMessage, no_status, write_status
from stage_runtime.supervisor.devices import Machine, device_text
from stage_runtime.supervisor.restarts import EXIT_CONFIG, EXIT_FAILED

if TYPE_CHECKING:
    from omni_discovery.clients import OmniCoordClientForStage
    from stage_runtime.supervisor.exporter import MetricsExporter

logger = logging.getLogger(__name__)

T = TypeVar("T")
_OMNI: Final = "vllm-omni"


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
    parser.add_argument(
        "--namespace",
        default=default_namespace(),
        help="which deployment on that etcd (default: $OMNI_NAMESPACE, else default)",
    )
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
        "--stage-overrides",
        default="",
        metavar="JSON",
        help="the stage's 'runtime' on this host, where the pipeline in force says otherwise",
    )
    parser.add_argument("--parent-pid", type=int, default=0, metavar="PID", help="drain when this process is gone")
    # In place of the other flags, in a supervisor that a hub or omni serve --headless has started.
    parser.add_argument("--config-fd", type=int, help=argparse.SUPPRESS)
    add_loading_options(parser)
    add_backend_options(parser)
    add_data_plane_options(parser)
    add_trust_options(parser)
    add_log_options(parser)
    add_security_options(parser)
    add_metrics_options(parser.add_argument_group("metrics"))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run; return the exit code: 0 done, 1 failed, 2 used wrongly."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        trust_folders(os.environ.get("OMNI_TRUSTED_FOLDERS", ""))
        # Before anything is imported that loads models; opened where a stage is known that may run their code.
        guard_model_code()
        if arguments[:1] == ["--replica"]:
            os._exit(_run_replica(_read_document(arguments, ReplicaConfig)))
        if arguments[:1] == ["--check"]:
            check = _read_document(arguments, StageCheck)
            with private_folders(os.environ):
                return _check(check)
        if arguments[:1] == ["--resolve"]:
            request = _read_document(arguments, ResolveRequest)
            with private_folders(os.environ):
                return _resolve(request)
        if arguments[:1] == ["--zygote"]:
            log = msgspec.json.decode(arguments[2], type=LogOptions)
            return _run_zygote(int(arguments[1]), log, arguments[5:])
        return _supervise(build_parser().parse_args(arguments))
    except ConfigError as error:
        say(str(error), error=True)
        return EXIT_CONFIG
    except OmniError as error:
        say(str(error), error=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _devices_here(base: Mapping[str, str], stage: StageConfig, count: int, machine: Machine) -> tuple[str, ...]:
    """The devices that the document gives to all local replicas. Raise ConfigError.

    A warning is logged for devices that may be wrong, and what is inherited where it gives none.
    """
    from stage_runtime.supervisor.environment import doubtful_devices, inherited_text, stage_devices

    devices = stage_devices(base, stage, count, machine)
    if inherited := inherited_text(base, stage, count, machine):
        logger.info("stage.devices stage %d: %s", stage.stage_id, inherited)
    if doubt := doubtful_devices(base, stage, count, machine):
        logger.warning("stage.devices %s", doubt)
    return devices


def _read_document(arguments: Sequence[str], kind: type[T]) -> T:
    """The settings that the parent process hands over in ``--config-fd``. Raise ConfigError."""
    parser = argparse.ArgumentParser(prog="stage_runtime", add_help=False)
    parser.add_argument("--stage-id")
    parser.add_argument("--namespace")
    parser.add_argument("--config-fd", type=int, required=True)
    return read_config(parser.parse_args(arguments[1:]).config_fd, kind)


def _check(check: StageCheck) -> int:
    """Whether this machine could run the stage; prints why not."""
    configure_logging()
    try:
        check_packages(check.stage.stage_id, check.stage.engine)
        from stage_runtime.engine_loop.payloads import build_edges
        from stage_runtime.engines.base import create_engine
        from stage_runtime.engines.capabilities import capabilities_of
        from stage_runtime.engines.trusted import trusted_stage
        from stage_runtime.supervisor.devices import find_machine
        from stage_runtime.supervisor.environment import replica_devices

        stage = check.stage
        guard_model_code(may_run=may_run_model_code(check.deploy, stage.stage_id, check.bounds))
        trusted = trusted_stage(check.deploy, stage.stage_id, check.bounds)
        engine = create_engine(msgspec.structs.replace(trusted, runtime=stage.runtime))
        if (check_engine := capabilities_of(engine).check) is not None:
            check_engine()
        engine.close()
        for edge in build_edges(check.deploy, stage.stage_id, "dry-run").values():
            edge.connector.close()
        base, machine = dict(os.environ), find_machine()
        _devices_here(base, stage, check.count, machine)
        shares = [replica_devices(base, stage, check.count, ordinal, machine) for ordinal in range(check.count)]
        sys.stdout.write(f"\n{msgspec.json.encode(StageDevices(of_replicas=shares)).decode()}\n")
    except OmniError as error:
        say(str(error), error=True)
        return EXIT_CONFIG
    return 0


def _resolve(request: ResolveRequest) -> int:
    """Print the deploy document of a vLLM-Omni pipeline as one line of JSON."""
    from stage_runtime.supervisor.environment import stage_environment

    check_packages(0, _OMNI)
    # Its libraries print to standard output, where only the answer belongs.
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    settings = stage_environment(StageConfig(stage_id=0, engine=_OMNI), Path(request.model).exists())
    os.environ.update({**settings, **os.environ})
    # Asked for by a command line of this host alone.
    guard_model_code(may_run=bool(request.engine_args.get("trust_remote_code")))
    from stage_runtime.engines.vllm_omni.resolver import resolve_document

    answer = resolve_document(request)
    try:
        line = msgspec.json.encode(answer)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM-Omni's deploy file holds what is no JSON: {error}") from error
    with os.fdopen(answer_fd, "wb") as file:
        file.write(b"\n" + line + b"\n")
    return 0


def _read_options(arguments: argparse.Namespace) -> StageOptions:
    """The settings of this supervisor: from ``--config-fd``, else from the flags. Raise ConfigError."""
    if arguments.config_fd is not None:
        return read_config(arguments.config_fd, StageOptions)
    check_data_plane(arguments)
    check_timeout("--stage-init-timeout", arguments.stage_init_timeout)
    check_headless(parse_overrides(arguments.stage_overrides))
    check_backend(arguments)
    check_metrics(arguments)
    check_metrics_token(arguments)
    runtime = runtime_here(arguments, arguments.stage_id)
    return read_stage_options(arguments, arguments.stage_id, arguments.omni_dp_size_local, runtime)


def _supervise(arguments: argparse.Namespace) -> int:
    configure_logging(read_log_options(arguments))
    options = _read_options(arguments)
    configure_logging(options.log)
    identify_process(stage=options.stage_id)
    try:
        return _supervise_stage(arguments, options)
    except OmniError as error:
        if not arguments.parent_pid:
            raise
        # The last line of a hub's own error names this one.
        code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        logger.error("supervisor.gave_up stage=%d code=%d: %s", options.stage_id, code, error)
        return code


def _supervise_stage(arguments: argparse.Namespace, options: StageOptions) -> int:
    # A hub that starts this process has logged it already.
    if not arguments.parent_pid:
        warn_if_plain(options.zmq_security)
    bind_host, advertise_host = "127.0.0.1", "127.0.0.1"
    if options.endpoints:
        bind_host, advertise_host = find_hosts(options.endpoints, options.replica_address)
    replica = replica_config(options, bind_host, advertise_host, os.getpid())
    if options.worker_backend != RAY:
        check_packages(replica.stage_id)
    # The replicas have it in their settings; the libraries and processes that they load or start need not see it.
    take_secrets()
    _be_brief(replica, user_runtime_dir())
    config = SupervisorConfig(replica=replica, count=options.count, parent_pid=arguments.parent_pid)
    with closing(_metrics_exporter(options)) as exporter, _refusal_left_for_doctor(replica):
        return _run_stage(config, options, exporter)


def _metrics_exporter(options: StageOptions) -> MetricsExporter:
    """Where the samples of this supervisor go. Raise ConfigError."""
    from stage_runtime.supervisor.exporter import MetricsExporter

    exporter = MetricsExporter()
    if options.metrics_fd is not None:
        exporter.send_to_hub(options.metrics_fd)
    if options.metrics_port is not None:
        exporter.serve(options.metrics_host, options.metrics_port, options.metrics_token_file)
    # Seen also while the supervisor waits for a deploy document.
    exporter.export(
        SupervisorSample(
            namespace=options.namespace, stage_id=options.stage_id, wanted=options.count, restarts=0, replica_ids=()
        )
    )
    return exporter


def _run_stage(config: SupervisorConfig, options: StageOptions, exporter: MetricsExporter) -> int:
    from omni_discovery.etcd.check import check_ttl
    from omni_discovery.etcd.config import RegistryConfig
    from stage_runtime.engines.base import create_engine
    from stage_runtime.engines.trusted import trusted_stage
    from stage_runtime.supervisor.deploy_document import read_pipeline

    replica = config.replica
    raise_descriptor_limit("a replica")
    with _waiting(_waits_of(replica)) as waits:
        deploy = read_pipeline(
            replica.endpoints,
            replica.namespace,
            security=replica.security,
            absent_wait_s=replica.pipeline_wait_s,
            on_wait=lambda reason: waits.begin(
                "pipeline", f"the supervisor of stage {replica.stage_id}", reason, WaitKind.PIPELINE, replica.stage_id
            ),
        )
    # Judged before anything is imported that it names. In a Ray cluster, that is not on this machine.
    check_document(deploy, replica.stage_id, replica.bounds, locate_model)
    is_own = replica.bounds.trusts(deploy)
    here = with_omni_python(deploy.stage(replica.stage_id), options.runtime, options.omni_python)
    in_force, deploy = deploy, document_here(deploy, replica.stage_id, here)
    if is_own:
        bounds = replica.bounds.owning(deploy)
        config = msgspec.structs.replace(config, replica=msgspec.structs.replace(replica, bounds=bounds))
    export = exporter.export if exporter.is_used else None
    check_ttl(RegistryConfig(replica.endpoints, replica.namespace, replica.security, ttl_s=replica.ttl_s))
    if options.worker_backend == RAY:
        if deploy.stage(replica.stage_id).runtime.own_python:
            raise ConfigError(f"stage {replica.stage_id}: runtime.python is for replicas outside of Ray")
        return _run_on_ray(config, deploy, options.ray_address, export)
    # Built once, without loading it, so that an error in its arguments is printed once, before any replica starts.
    if deploy.stage(replica.stage_id).runtime.own_python:
        stage = deploy.stage(replica.stage_id)
        check = StageCheck(stage=stage, deploy=in_force, count=config.count, bounds=replica.bounds)
        check_stage(check, os.environ)
    else:
        guard_model_code(may_run=may_run_model_code(in_force, replica.stage_id, replica.bounds))
        with private_folders(os.environ):
            create_engine(trusted_stage(in_force, replica.stage_id, replica.bounds)).close()
    return _run_supervisor(config, deploy, export)


def _waits_of(replica: ReplicaConfig) -> Waits:
    """Where this supervisor says what it waits for: on this machine, and in the registry while that can be reached."""
    from omni_discovery.clients.wait_board import WaitBoard

    board = WaitBoard(replica.endpoints, replica.namespace, replica.security)
    return Waits(user_runtime_dir(), replica.namespace, replica.endpoints, board=board)


@contextmanager
def _waiting(waits: Waits) -> Iterator[Waits]:
    """Take back what is waited for when it is over, also where SIGTERM ends the process meanwhile."""

    def end(number: int, _frame: object) -> None:
        waits.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield waits
    finally:
        signal.signal(signal.SIGTERM, former)
        waits.close()


def _run_supervisor(config: SupervisorConfig, deploy: DeployConfig, export: Callable[[Sample], None] | None) -> int:
    from stage_runtime.engines.base import modules_to_preload
    from stage_runtime.supervisor.device_locks import DeviceLocks, Holder
    from stage_runtime.supervisor.devices import find_machine
    from stage_runtime.supervisor.environment import on_cpu_only, replica_environment, stage_environment
    from stage_runtime.supervisor.launch import SpawnLauncher, ZygoteLauncher
    from stage_runtime.supervisor.supervisor import Supervisor

    replica, machine, base = config.replica, find_machine(), dict(os.environ)
    stage = deploy.stage(replica.stage_id)
    devices = _devices_here(base, stage, config.count, machine)
    holder = Holder(pid=os.getpid(), namespace=replica.namespace, stage_id=replica.stage_id)
    locks = DeviceLocks(user_runtime_dir(), devices, holder)
    waits = _waits_of(replica)
    who = f"the supervisor of stage {replica.stage_id}"
    with _waiting(waits):
        locks.acquire(on_wait=lambda reason: waits.begin("devices", who, reason, WaitKind.DEVICES, replica.stage_id))
    settings = stage_environment(stage, Path(stage.model).exists(), replica.advertise_host)
    # On the CPU only: a process that has initialized a GPU must not be forked.
    modules = modules_to_preload(stage.engine)
    shared_output_fd, write_fd = os.pipe()
    is_on_cpu, python = on_cpu_only(base, stage, config.count, machine), stage.runtime.own_python
    supervisor = Supervisor(
        config,
        deploy,
        ZygoteLauncher(modules, write_fd, python) if modules and is_on_cpu else SpawnLauncher(python),
        lambda ordinal: replica_environment(base, stage, settings, config.count, ordinal, machine),
        locks.mark_leaving,
        waits,
        export,
        shared_output_fd,
        remove_left_folders,
        partial(_leave_word, replica),
    )
    return supervisor.run()


def _leave_word(replica: ReplicaConfig, why: str) -> None:
    # Not at the top: a supervisor that forks replicas has no client of etcd of its own.
    from omni_discovery.clients.wait_board import leave_last_words

    leave_last_words(replica.endpoints, replica.namespace, replica.stage_id, why, replica.security)


def _run_on_ray(
    config: SupervisorConfig, deploy: DeployConfig, address: str, export: Callable[[Sample], None] | None
) -> int:
    from stage_runtime.supervisor.ray_launcher import RayLauncher
    from stage_runtime.supervisor.supervisor import Supervisor

    replica = config.replica
    waits = _waits_of(replica)
    with _waiting(waits):
        who = f"the supervisor of stage {replica.stage_id}"
        reason = "the Ray cluster has not given it room yet"
        waits.begin("ray", who, reason, WaitKind.ROOM, replica.stage_id)
        launcher = RayLauncher(deploy.stage(replica.stage_id), config.count, address, replica.pipeline_wait_s)
    return Supervisor(config, deploy, launcher, lambda ordinal: {}, waits=waits, export=export).run()


def _run_zygote(parent_pid: int, log: LogOptions, modules: list[str]) -> int:
    die_with_parent(parent_pid, signal.SIGKILL)
    configure_logging(log)

    from stage_runtime.supervisor.zygote import Zygote

    def run_replica(config: ReplicaConfig, environment: dict[str, str]) -> int:
        os.environ.clear()
        os.environ.update(environment)
        # The zygote's, which this process has from it.
        tempfile.tempdir = None
        return _run_replica(config)

    with private_folders(os.environ), socket.socket(fileno=os.dup(sys.stdin.fileno())) as orders:
        Zygote(orders, run_replica).serve(modules)
    return 0


def _be_brief(config: ReplicaConfig, folder: Path) -> None:
    """Have warnings of etcd's known bugs logged in short: the hubs log them in full."""
    from omni_discovery.etcd.store import EtcdKV

    embedded = embedded_among(folder, config.namespace, config.endpoints)
    EtcdKV.version_log.be_brief(embedded=embedded, count_only=True)


@contextmanager
def _refusal_left_for_doctor(replica: ReplicaConfig) -> Iterator[None]:
    """Leave on this machine, and in etcd, why the supervisor ends: nothing else tells of one that has ended."""
    from omni_discovery.clients.wait_board import leave_last_words
    from omni_discovery.stories import Stories

    try:
        yield
    except ConfigError as error:
        leave_last_words(replica.endpoints, replica.namespace, replica.stage_id, str(error), replica.security)
        stories = Stories(user_runtime_dir(), replica.namespace, replica.endpoints)
        reason = str(error)
        stories.write("supervisor", f"stage {replica.stage_id}", lambda: [f"refused: {reason}"])
        stories.flush()
        raise


def _connect_with_stories(config: ReplicaConfig, folder: Path) -> Callable[..., OmniCoordClientForStage]:
    """Makes the replica's client of the registry, which leaves its lease's story for ``omni doctor``."""
    from omni_discovery.clients import OmniCoordClientForStage
    from omni_discovery.stories import Stories

    def connect(*arguments: Any, **options: Any) -> OmniCoordClientForStage:
        client = OmniCoordClientForStage(*arguments, **options)
        client.keep_stories(Stories(folder, config.namespace, config.endpoints))
        return client

    return connect


def _run_replica(config: ReplicaConfig) -> int:
    """Run one replica to its end; return its exit code, with which the process must end by ``os._exit``.

    All parts are closed by then. The libraries' own shutdown, with their threads, may crash or hang after that, and
    the supervisor would take it for a failure of the replica.
    """
    if config.parent_pid:
        die_with_parent(config.parent_pid, signal.SIGKILL)
    configure_logging(config.log)
    identify_process(stage=config.stage_id)
    tell_supervisor = write_status if config.parent_pid else no_status

    def write(message: StatusMessage) -> None:
        if isinstance(message, Registered):
            identify_process(replica=message.name, epoch=message.epoch)
        tell_supervisor(message)

    code = EXIT_FAILED
    try:
        from stage_runtime.supervisor.deploy_document import deploy_of_replica

        # Asked before there is a temporary folder of this process's own: others look for it under the shared one.
        folder = user_runtime_dir()
        _be_brief(config, folder)
        deploy, device = deploy_of_replica(config), device_text(os.environ)
        engine = deploy.stage(config.stage_id).engine
        check_packages(config.stage_id, engine)
        if (kept := vllm_plugins(engine)) is not None:
            os.environ.setdefault("VLLM_PLUGINS", kept)
        guard_model_code(may_run=may_run_model_code(deploy, config.stage_id, config.bounds))
        with private_folders(os.environ):
            from stage_runtime.replica.replica import Replica

            connect = _connect_with_stories(config, folder)
            code = Replica(config, deploy, connect, device=device, write_status=write).run()
    except OmniError as error:
        code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        write(Exiting(str(error)))
        say(str(error), error=True)
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    return code
