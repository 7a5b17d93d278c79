"""``omni serve``: a hub, the stages beside it, or (``--headless``) only replicas of one stage."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from hub.admission_flags import add_admission_options, check_admission, hub_config
from hub.api_flags import add_api_options, check_api, check_tracing
from omni_discovery.cli import (
    add_registry_options,
    configure_logging,
    read_security,
    security_flags,
    user_runtime_dir,
)
from omni_discovery.config import RegistryConfig
from omni_discovery.data_plane_flags import (
    add_data_plane_options,
    check_data_plane,
    data_plane_flags,
    read_labels,
    warn_if_plain,
)
from omni_discovery.deploy import DeployConfig, StageConfig
from omni_discovery.deploy_check import doubtful_engines
from omni_discovery.deploy_file import load_deploy
from omni_discovery.endpoints import parse_endpoints
from omni_discovery.errors import ConfigError
from omni_discovery.keys import check_namespace
from omni_discovery.registry_security import RegistrySecurity

if TYPE_CHECKING:
    from hub.running_hub import ServeConfig

logger = logging.getLogger(__name__)


class ServeCommand:
    """``omni serve [MODEL]``."""

    summary = "serve a pipeline: a hub with its local stages, or only replicas with --headless"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        parser.add_argument(
            "model",
            nargs="?",
            help="with --deploy-config: the model of stages that name none; without: one vLLM text stage of it",
        )
        parser.add_argument("--deploy-config", type=Path, metavar="YAML", help="the stages of the pipeline")
        parser.add_argument("--stage-id", type=int, help="run only this stage here (default: all of them)")
        parser.add_argument("--headless", action="store_true", help="only replicas of --stage-id, no hub")
        parser.add_argument("--hub-only", action="store_true", help="only a hub: all replicas run elsewhere")
        parser.add_argument(
            "--omni-dp-size-local",
            type=int,
            metavar="K",
            help="how many replicas of --stage-id to run here (default: 1)",
        )
        parser.add_argument(
            "--omni-lb-policy",
            default="least-load",
            metavar="POLICY",
            help="how replicas are picked: random, round-robin, least-queue-length, least-load, power-of-two,"
            " prefix-hash or an installed package's policy (default: %(default)s)",
        )
        parser.add_argument(
            "--omni-heartbeat-timeout",
            type=float,
            default=10.0,
            metavar="SECONDS",
            help="the lease's TTL: how long a silent replica or hub stays listed (default: %(default)s)",
        )
        parser.add_argument(
            "--omni-replica-address", "-ora", metavar="IP", help="the address that local replicas advertise"
        )
        add_data_plane_options(parser)
        add_api_options(parser)
        add_admission_options(parser)
        parser.add_argument("--host", default="127.0.0.1", help="where the HTTP API listens (default: %(default)s)")
        parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
        add_registry_options(parser)
        for name, kind in (("--replica-id", int), ("--omni-master-address", str), ("--omni-master-port", int)):
            parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
        parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        configure_logging()
        check_flags(arguments)
        warn_of_ignored_flags(arguments)
        if arguments.headless:
            return run_headless(arguments)
        return run_with_hub(arguments)


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse combinations that can't be meant. Raise ConfigError with the reason."""
    check_local_replicas(arguments)
    if arguments.headless and arguments.stage_id is None:
        raise ConfigError("--headless runs replicas of one stage: say which with --stage-id N")
    if arguments.headless and not arguments.etcd_endpoints:
        raise ConfigError(
            "--headless joins an existing etcd: give --etcd-endpoints HOST:PORT or set OMNI_ETCD_ENDPOINTS"
        )
    check_data_plane(arguments)
    check_api(arguments)
    check_tracing(arguments)
    check_admission(arguments)
    if arguments.omni_heartbeat_timeout <= 0:
        raise ConfigError("--omni-heartbeat-timeout must be more than 0 seconds")
    if not arguments.headless and arguments.deploy_config is None and not arguments.model:
        raise ConfigError(
            "nothing to serve: give a MODEL or --deploy-config YAML"
            " ('omni pipeline show > pipeline.yaml' writes the one in force)"
        )
    check_namespace(arguments.namespace)
    security = read_security(arguments)
    if arguments.etcd_endpoints:
        parse_endpoints(arguments.etcd_endpoints)
        RegistryConfig(arguments.etcd_endpoints, arguments.namespace, security, ttl_s=arguments.omni_heartbeat_timeout)
    elif security != RegistrySecurity():
        raise ConfigError("an embedded etcd has neither users nor TLS: give --etcd-endpoints, or no other --etcd flag")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port} is none; take 0 to 65535")


def check_local_replicas(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict each other about what runs here. Raise ConfigError with the reason."""
    if arguments.hub_only and (arguments.headless or arguments.stage_id is not None):
        raise ConfigError("--hub-only runs no replicas: leave out --headless and --stage-id")
    if arguments.omni_dp_size_local is not None:
        if arguments.stage_id is None:
            raise ConfigError("--omni-dp-size-local counts replicas of one stage: say which with --stage-id N")
        if arguments.omni_dp_size_local < 1:
            raise ConfigError("--omni-dp-size-local must be at least 1")


def warn_of_ignored_flags(arguments: argparse.Namespace) -> None:
    """Say once what old launchers still pass and nothing reads any more."""
    if arguments.replica_id is not None:
        logger.warning("flag.ignored --replica-id: replica ids are claimed in etcd")
    if arguments.omni_master_address is not None or arguments.omni_master_port is not None:
        logger.warning("flag.ignored --omni-master-address, --omni-master-port: there is no master any more")


def run_headless(arguments: argparse.Namespace) -> int:
    """Become the supervisor of one stage's local replicas; does not return."""
    command = [
        *(sys.executable, "-m", "stage_runtime"),
        *("--stage-id", str(arguments.stage_id)),
        *("--omni-dp-size-local", str(arguments.omni_dp_size_local or 1)),
        *("--etcd-endpoints", arguments.etcd_endpoints),
        *("--namespace", arguments.namespace),
        *("--omni-heartbeat-timeout", str(arguments.omni_heartbeat_timeout)),
        *data_plane_flags(arguments),
        *security_flags(arguments),
    ]
    if arguments.omni_replica_address:
        command += ["--omni-replica-address", arguments.omni_replica_address]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


def run_with_hub(arguments: argparse.Namespace) -> int:
    """Serve over HTTP until a signal comes."""
    config = serve_config(arguments, read_deploy(arguments))
    from hub.app import run_hub
    from omni_discovery.process_tools import die_with_parent

    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    return run_hub(config)


def serve_config(arguments: argparse.Namespace, deploy: DeployConfig) -> ServeConfig:
    """What a hub needs to know of the flags. Raise ConfigError."""
    try:
        import hub.app  # noqa: F401 - all that a hub needs
        from hub.local_stages import LocalStage
        from hub.running_hub import ServeConfig
        from omni_discovery.balancers import build_load_balancer_factory
    except ModuleNotFoundError as error:
        raise ConfigError(f"a hub needs more packages ({error}): pip install 'omni-discovery[hub,embedded]'") from error
    try:
        build_load_balancer_factory(arguments.omni_lb_policy)
    except ValueError as error:
        raise ConfigError(f"--omni-lb-policy: {error}") from error
    warn_if_plain(arguments.zmq_security)
    for doubt in doubtful_engines(deploy, [entry.name for entry in entry_points(group="omni_discovery.engines")]):
        logger.warning("deploy.engine_unknown %s", doubt)
    raise_descriptor_limit()
    local = [stage for stage in deploy.stages if arguments.stage_id in (None, stage.stage_id)]
    if arguments.hub_only:
        local = []
    counts = {stage.stage_id: arguments.omni_dp_size_local or stage.runtime.num_replicas for stage in local}
    for stage in local:
        check_model(stage)
    return ServeConfig(
        deploy=deploy,
        hub=hub_config(arguments),
        endpoints=arguments.etcd_endpoints,
        security=read_security(arguments),
        security_flags=(*data_plane_flags(arguments), *security_flags(arguments)),
        zmq_security=arguments.zmq_security,
        labels=read_labels(arguments.label),
        drain_timeout_s=arguments.drain_timeout,
        namespace=arguments.namespace,
        ttl_s=arguments.omni_heartbeat_timeout,
        policy=arguments.omni_lb_policy,
        host=arguments.host,
        port=arguments.port,
        local_stages=tuple(LocalStage(stage_id, count) for stage_id, count in counts.items()),
        replica_address=arguments.omni_replica_address,
        runtime_dir=user_runtime_dir(),
        state_dir=user_state_dir(),
        api=arguments.api,
        api_flags=arguments.api_args or "",
        admin_api=arguments.admin_api,
        traces_endpoint=arguments.otlp_traces_endpoint,
        etcd_binary=Path(binary) if (binary := os.environ.get("OMNI_ETCD_BINARY")) else None,
    )


def user_state_dir() -> Path:
    """Where this user's hubs keep their identity and their last view of a registry."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "omni"


def raise_descriptor_limit() -> None:
    """Take all the file descriptors that this user may have: each replica's two encrypted sockets need several."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_deploy(arguments: argparse.Namespace) -> DeployConfig:
    """The pipeline that the flags describe. Raise ConfigError."""
    if arguments.deploy_config is None:
        stage = StageConfig(stage_id=0, engine="vllm", model=arguments.model, final_output="text")
        return DeployConfig(stages=(stage,))
    deploy = load_deploy(arguments.deploy_config, arguments.model)
    if arguments.stage_id is not None:
        deploy.stage(arguments.stage_id)
    return deploy


def check_model(stage: StageConfig) -> None:
    """Raise ConfigError if a stage that is to run here names a folder that is not there."""
    if stage.model.startswith("/") and not Path(stage.model).exists():
        raise ConfigError(f"stage {stage.stage_id}: the model folder {stage.model} does not exist; correct 'model'")
