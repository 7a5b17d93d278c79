"""Flags that ``omni serve`` and the supervisor of replicas share: the data plane, labels, and where replicas run."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from omni_discovery.errors import ConfigError
from omni_discovery.logs.setup import FORMATS, LEVELS, LogOptions

logger = logging.getLogger(__name__)

CURVE: Final = "curve"
PLAIN: Final = "none"

_MOST_LABELS: Final = 32
_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"[!-~]([ -~]{0,61}[!-~])?")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")
_HOST_RIGHT: Final = "right would be a host name or an IP address, without a port, for example 10.0.0.5 or fd00::5"


def add_data_plane_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags about sockets, labels, draining and stalls, for hubs and supervisors."""
    parser.add_argument(
        "--zmq-security",
        choices=(CURVE, PLAIN),
        default=CURVE,
        help="how hubs and replicas talk: encrypted, or readable for all who see the network (default: %(default)s)",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="where this is, for example zone=a; hubs prefer replicas that share all of theirs (repeatable)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="how long replicas that are stopped wait for what runs (default: %(default)g)",
    )
    parser.add_argument(
        "--stall-after",
        type=float,
        default=60.0,
        metavar="S",
        help="a replica whose engine has work and stands still for so long is replaced; more than its longest step"
        " takes (default: %(default)g)",
    )


def check_data_plane(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a wrong value of these flags, with what would be right."""
    read_labels(arguments.label)
    if arguments.omni_replica_address:
        check_host("--omni-replica-address", arguments.omni_replica_address)
    if not (math.isfinite(arguments.drain_timeout) and arguments.drain_timeout >= 0):
        raise ConfigError(
            f"--drain-timeout is {arguments.drain_timeout}; right would be a number of seconds, 0 or more"
        )
    if not (math.isfinite(arguments.stall_after) and arguments.stall_after > 0):
        raise ConfigError(f"--stall-after is {arguments.stall_after}; right would be a number of seconds, more than 0")


def read_labels(texts: Sequence[str]) -> Mapping[str, str]:
    """Parse ``KEY=VALUE`` texts into labels. Raise ConfigError for a wrong or repeated one."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ConfigError(
                f"--label {text!r} is none; right would be KEY=VALUE, for example zone=a: a key of letters, digits, "
                "'.', '_', '/' and '-', a value of printable ASCII, 63 characters each at most"
            )
        if found.setdefault(key, value) != value:
            raise ConfigError(f"--label {key} is given twice: {found[key]!r} and {value!r}; one of them must go")
    if len(found) > _MOST_LABELS:
        raise ConfigError(f"{len(found)} labels are too many; {_MOST_LABELS} at most")
    return found


def check_host(flag: str, text: str) -> str:
    """Return ``text`` if it is a host name or an IP address, else raise ConfigError that names ``flag``."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare or text != bare:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError:
            raise ConfigError(f"{flag} {text!r} is no address; {_HOST_RIGHT}") from None
        return text
    is_number = bool(bare) and all(part.isdigit() for part in bare.split("."))
    if is_number:
        try:
            ipaddress.IPv4Address(bare)
        except ValueError:
            raise ConfigError(f"{flag} {text!r} is no address; {_HOST_RIGHT}") from None
    elif not _HOST_NAME.fullmatch(bare):
        raise ConfigError(f"{flag} {text!r} is no address; {_HOST_RIGHT}")
    return text


def add_log_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags about what is logged, for hubs and supervisors."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="the least that is logged, by the replicas here too; debug adds omni-discovery's own lines, not those of"
        " libraries (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="json: one JSON object per line, what replicas print included (default: %(default)s)",
    )


def read_log_options(arguments: argparse.Namespace) -> LogOptions:
    """What the flags say about logging."""
    return LogOptions(level=arguments.log_level, format=arguments.log_format)


def warn_if_plain(zmq_security: str) -> None:
    """Log a warning if ``zmq_security`` turns encryption off."""
    if zmq_security == PLAIN:
        logger.warning(
            "zmq.plain --zmq-security none: WHOEVER SEES THE NETWORK BETWEEN HUBS AND REPLICAS CAN READ EVERY PROMPT "
            "AND ANSWER, SEND REQUESTS OF THEIR OWN, AND FILL THE MEMORY OF REPLICAS: LIMIT IT FOR EACH PROCESS; start "
            "all hubs and replicas of the namespace like this"
        )


def add_loading_options(parser: argparse._ActionsContainer) -> None:
    """Add the flag about how long loading may take, for hubs and supervisors."""
    parser.add_argument(
        "--stage-init-timeout",
        type=float,
        metavar="SECONDS",
        help="end a local replica whose engine has not loaded by then, and start it again (default: 5400)",
    )


def check_timeout(flag: str, value: float | None) -> None:
    """Raise ConfigError that names ``flag`` unless ``value`` is None or a positive number of seconds."""
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{flag} is {value:g}; right would be a number of seconds, more than 0")


PROCESSES: Final = "multi_process"
RAY: Final = "ray"


def add_backend_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags about where local replicas run: as processes of this machine, or in a Ray cluster."""
    parser.add_argument(
        "--worker-backend",
        choices=(PROCESSES, RAY),
        default=PROCESSES,
        help="where local replicas run: as processes of this machine, or as actors of a Ray cluster that runs already,"
        " each where the cluster has room (default: %(default)s)",
    )
    parser.add_argument(
        "--ray-address",
        default="",
        metavar="HOST:PORT",
        help="with --worker-backend ray: the cluster (default: the one of this machine)",
    )


def check_backend(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other."""
    if arguments.worker_backend != RAY and arguments.ray_address:
        raise ConfigError("--ray-address is for --worker-backend ray: give that too, or leave it out")
    if arguments.worker_backend == RAY and arguments.omni_replica_address:
        raise ConfigError(
            "--omni-replica-address can't be every machine's of a Ray cluster: leave it out, each replica then gives "
            "the address from which its own machine reaches etcd"
        )


#: Where a supervisor's metrics are served if nothing else is said.
METRICS_HOST: Final = "127.0.0.1"


def add_metrics_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags about a port of its own for metrics, and who may read them."""
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve metrics to Prometheus at /metrics of this port; 0 takes a free one (default: a hub serves its own,"
        " and those of its local replicas, at --port; with --headless there are none)",
    )
    parser.add_argument(
        "--metrics-host",
        metavar="HOST",
        help=f"the address of that port (default: {METRICS_HOST})",
    )
    parser.add_argument(
        "--metrics-token-file",
        metavar="FILE",
        help="have /metrics ask for the token in it, as 'Authorization: Bearer TOKEN' (default: it is open)",
    )


def check_metrics_token(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a token of metrics that nobody serves: those of a supervisor without a port."""
    if arguments.metrics_token_file is not None and arguments.metrics_port is None:
        raise ConfigError("--metrics-token-file is about --metrics-port: give that too, or leave it out")


def check_metrics(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a wrong value of these flags, or one without the other."""
    port = arguments.metrics_port
    if port is None and arguments.metrics_host is not None:
        raise ConfigError("--metrics-host is where --metrics-port listens: give that too, or leave it out")
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"--metrics-port {port} is none; take 0 to 65535")
    if arguments.metrics_host is not None:
        check_host("--metrics-host", arguments.metrics_host)
