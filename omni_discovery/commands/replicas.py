"""``omni replicas``: the live table of stages and replicas."""

from __future__ import annotations

import argparse
import sys
import time

from omni_discovery.commands.output import quiet_logging
from omni_discovery.commands.registry import (
    ANSWER_S,
    add_registry_options,
    find_endpoints,
    read_security,
    tell_if_empty,
    with_registry,
)
from omni_discovery.errors import RegistryUnavailableError


class ReplicasCommand:
    """``omni replicas``."""

    summary = "show the stages and their replicas"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_registry_options(parser)
        parser.add_argument("--watch", action="store_true", help="keep showing it until Ctrl-C")
        parser.add_argument("--json", action="store_true", help="print the records as JSON lines instead")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        from rich.console import Console
        from rich.live import Live

        from omni_discovery.clients import OmniCoordClientForHub
        from omni_discovery.commands.tables import replica_json, replica_table
        from omni_discovery.etcd.check import check_registry
        from omni_discovery.etcd.config import RegistryConfig

        quiet_logging()
        endpoints, security = find_endpoints(arguments), read_security(arguments)
        check_registry(RegistryConfig(endpoints, arguments.namespace, security), ANSWER_S)
        console = Console()
        with OmniCoordClientForHub(
            endpoints,
            namespace=arguments.namespace,
            tls=security.tls,
            user=security.user,
            password=security.password,
        ) as client:
            try:
                client.wait_synced(timeout_s=ANSWER_S)
            except TimeoutError as error:
                raise RegistryUnavailableError(f"no etcd answered at {endpoints}: correct --etcd-endpoints") from error
            if arguments.json:
                for line in replica_json(client.view()):
                    sys.stdout.write(line + "\n")
            elif arguments.watch:
                with Live(console=console, refresh_per_second=4) as live:
                    while True:
                        live.update(replica_table(client.view(), arguments.namespace, time.time(), console.width))
                        time.sleep(0.25)
            else:
                console.print(replica_table(client.view(), arguments.namespace, time.time(), console.width))
            view = client.view()
        if not (view.replicas or view.hubs or view.pipeline):
            return with_registry(arguments, lambda kv: tell_if_empty(kv, arguments.namespace))
        return 0
