"""The flags of ``omni serve``: what there is, in the order of its help, and what does not go together."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Final

from hub.admission_flags import add_admission_options, check_admission
from hub.api_flags import add_api_options, check_api, check_tracing
from omni_discovery.commands.flags import add_backend_options, add_data_plane_options, check_backend, check_data_plane
from omni_discovery.commands.main import add_registry_options, read_security
from omni_discovery.deploy.overrides import check_headless, parse_overrides
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import RegistryConfig, RegistrySecurity

logger = logging.getLogger(__name__)

DEFAULT_POLICY: Final = "least-load"
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
_MOST_REPLICAS: Final = 1024


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    _add_pipeline_options(parser)
    _add_local_options(parser)
    add_data_plane_options(parser.add_argument_group("hubs and replicas among each other"))
    http = parser.add_argument_group("the HTTP API of a hub")
    http.add_argument("--host", help=f"where it listens (default: {DEFAULT_HOST})")
    http.add_argument("--port", type=int, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    add_api_options(http)
    requests = parser.add_argument_group("the requests of a hub")
    requests.add_argument(
        "--omni-lb-policy",
        metavar="POLICY",
        help="how replicas are picked: random, round-robin, least-queue-length, least-load, power-of-two,"
        f" prefix-hash or an installed package's policy (default: {DEFAULT_POLICY})",
    )
    add_admission_options(requests)
    add_registry_options(parser).add_argument(
        "--omni-heartbeat-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="the lease's TTL: how long a silent replica or hub stays listed (default: %(default)g)",
    )
    _add_ignored_options(parser)
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)


def _add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the pipeline")
    group.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="with --deploy-config: the model of stages that name none; without: one vLLM text stage of it",
    )
    group.add_argument("--deploy-config", type=Path, metavar="YAML", help="the stages of the pipeline")
    group.add_argument(
        "--stage-overrides",
        metavar="JSON",
        help='what the document says otherwise, by stage id: \'{"0": {"engine_args": {"max_num_seqs": 4}}}\';'
        " 'runtime' holds for this host alone, all else for everybody",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print what would be done, start and write nothing, and exit"
    )


def _add_local_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what runs here")
    group.add_argument("--stage-id", type=int, metavar="N", help="run only this stage here (default: all of them)")
    group.add_argument("--headless", action="store_true", help="only replicas of --stage-id, no hub")
    group.add_argument("--hub-only", action="store_true", help="only a hub: all replicas run elsewhere")
    group.add_argument(
        "--omni-dp-size-local",
        type=int,
        metavar="K",
        help="how many replicas of --stage-id to run here (default: 1; without --stage-id, what the document says)",
    )
    group.add_argument("--omni-replica-address", "-ora", metavar="IP", help="the address that local replicas advertise")
    add_backend_options(group)


def _add_ignored_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted with a warning, and ignored", "What older launchers still pass.")
    group.add_argument("--replica-id", type=int, metavar="N", help="ids are claimed in etcd")
    group.add_argument("--omni-master-address", "-oma", metavar="HOST", help="there is no master any more")
    group.add_argument("--omni-master-port", "-omp", type=int, metavar="PORT", help="likewise")


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse combinations that can't be meant. Raise ConfigError with the reason."""
    _check_local_replicas(arguments)
    if arguments.headless:
        _check_headless(arguments)
    elif arguments.deploy_config is None and not arguments.model:
        raise ConfigError(
            "nothing to serve: give a MODEL or --deploy-config YAML"
            " ('omni pipeline show > pipeline.yaml' writes the one in force)"
        )
    check_data_plane(arguments)
    check_backend(arguments)
    check_api(arguments)
    check_tracing(arguments)
    check_admission(arguments)
    if arguments.port is not None and not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port} is none; take 0 to 65535")
    security = read_security(arguments)
    # An etcd of our own grants what any other does; its endpoint is not known yet.
    endpoints = arguments.etcd_endpoints or "127.0.0.1:2379"
    RegistryConfig(endpoints, arguments.namespace, security, ttl_s=arguments.omni_heartbeat_timeout)
    if not arguments.etcd_endpoints and security != RegistrySecurity():
        raise ConfigError("an embedded etcd has neither users nor TLS: give --etcd-endpoints, or no other --etcd flag")


def _check_local_replicas(arguments: argparse.Namespace) -> None:
    count = arguments.omni_dp_size_local
    if arguments.stage_id is not None and arguments.stage_id < 0:
        raise ConfigError(f"--stage-id must be 0 or more, not {arguments.stage_id}")
    if arguments.hub_only:
        if arguments.headless or arguments.stage_id is not None:
            raise ConfigError("--hub-only runs no replicas: leave out --headless and --stage-id")
        if count not in (None, 1):
            raise ConfigError("--hub-only runs no replicas: leave out --omni-dp-size-local")
        if arguments.omni_replica_address:
            raise ConfigError(
                "--omni-replica-address is local replicas', and --hub-only runs none: leave one of them out"
            )
    if count is None:
        return
    if not 1 <= count <= _MOST_REPLICAS:
        raise ConfigError(f"--omni-dp-size-local must be at least 1 and at most {_MOST_REPLICAS}, not {count}")
    if count != 1 and arguments.stage_id is None:
        raise ConfigError("--omni-dp-size-local counts replicas of one stage: say which with --stage-id N")


def _check_headless(arguments: argparse.Namespace) -> None:
    if arguments.stage_id is None:
        raise ConfigError("--headless runs replicas of one stage: say which with --stage-id N")
    if not arguments.etcd_endpoints:
        raise ConfigError(
            "--headless joins an existing etcd: give --etcd-endpoints HOST:PORT or set OMNI_ETCD_ENDPOINTS"
        )
    for flag, value in (("--host", arguments.host), ("--port", arguments.port)):
        if value is not None:
            raise ConfigError(f"{flag} is a hub's: leave it out with --headless, which has no HTTP API")
    check_headless(parse_overrides(arguments.stage_overrides))


def warn_of_ignored_flags(arguments: argparse.Namespace) -> None:
    """Say once what launchers pass and nothing reads."""
    if arguments.replica_id is not None:
        logger.warning("flag.ignored --replica-id: replica ids are claimed in etcd")
    if arguments.omni_master_address is not None or arguments.omni_master_port is not None:
        logger.warning("flag.ignored --omni-master-address, --omni-master-port: there is no master any more")
    if not arguments.headless:
        return
    if arguments.model is not None or arguments.deploy_config is not None:
        logger.warning("flag.ignored MODEL, --deploy-config: --headless takes the pipeline in force from etcd")
    if arguments.omni_lb_policy is not None:
        logger.warning("flag.ignored --omni-lb-policy: hubs pick, and --headless is none")
