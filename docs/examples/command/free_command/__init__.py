"""``omni free``: how many more requests each stage can run now."""

# `omni --help` imports this module: what only `run` needs is imported there.
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from omni_discovery.commands.registry import add_registry_options, find_endpoints, read_security

if TYPE_CHECKING:
    from omni_discovery import ReplicaInfo

_ANSWER_S = 5.0


class FreeCommand:
    """See omni_discovery.commands.main.Command."""

    summary = "print how many more requests each stage can run now"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags: which etcd and which namespace, as all commands have them."""
        add_registry_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print one line for each stage; return 0. An OmniError becomes one line and exit code 1 or 2."""
        from omni_discovery import OmniCoordClientForHub
        from omni_discovery.errors import RegistryUnavailableError

        endpoints, security = find_endpoints(arguments), read_security(arguments)
        with OmniCoordClientForHub(
            endpoints,
            namespace=arguments.namespace,
            tls=security.tls,
            user=security.user,
            password=security.password,
        ) as client:
            try:
                client.wait_synced(timeout_s=_ANSWER_S)
            except TimeoutError as error:
                raise RegistryUnavailableError(f"no etcd answered at {endpoints}") from error
            for stage_id, slots in sorted(free_slots(client.get_replica_list().replicas).items()):
                sys.stdout.write(f"stage {stage_id}: {slots} free\n")
        return 0


def free_slots(replicas: Iterable[ReplicaInfo]) -> dict[int, int]:
    """The free slots by stage id, over all replicas that take new requests."""
    free: dict[int, int] = {}
    for info in replicas:
        slots = max(0, info.capacity - info.queue_length) if info.takes_new_work else 0
        free[info.stage_id] = free.get(info.stage_id, 0) + slots
    return free
