"""The flags of hubs and supervisors about what local replicas run on: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import argparse
from typing import Final

from omni_discovery.errors import ConfigError

PROCESSES: Final = "multi_process"
RAY: Final = "ray"


def add_backend_options(parser: argparse._ActionsContainer) -> None:
    """The flags of hubs and supervisors alike."""
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


def backend_flags(arguments: argparse.Namespace) -> list[str]:
    """The same flags for a child process."""
    if arguments.worker_backend == PROCESSES:
        return []
    flags = ["--worker-backend", str(arguments.worker_backend)]
    return [*flags, "--ray-address", arguments.ray_address] if arguments.ray_address else flags
