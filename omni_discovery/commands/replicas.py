"""``omni replicas``: the live table of stages and replicas."""

from __future__ import annotations

import argparse
import itertools
import time
from typing import TYPE_CHECKING, Final

from omni_discovery.commands.output import quiet_logging
from omni_discovery.commands.registry import (
    ANSWER_S,
    add_registry_options,
    find_endpoints,
    read_security,
    tell_if_empty,
    with_registry,
)
from omni_discovery.errors import RegistryError, RegistryUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from omni_discovery.clients import OmniCoordClientForHub
    from omni_discovery.records.beat import BeatRecord

#: How long the whole list may take, of an etcd that answers.
_LIST_S: Final = 30.0
#: The table on screen is drawn anew each turn, and what hubs report is read each so many turns.
_TURN_S: Final = 0.25
_TURNS_PER_READ: Final = 4


def _beats_or_none(client: OmniCoordClientForHub) -> dict[str, BeatRecord] | None:
    """The beats of the hubs; None while etcd does not answer."""
    try:
        return client.read_beats()
    except RegistryError:
        return None


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
        from rich.live import Live

        from omni_discovery.clients import OmniCoordClientForHub
        from omni_discovery.commands.tables import replica_json, replica_table
        from omni_discovery.commands.terminal import TextConsole, print_json
        from omni_discovery.etcd.check import check_registry
        from omni_discovery.etcd.config import RegistryConfig
        from omni_discovery.view.hub_reports import read_reports

        quiet_logging()
        endpoints, security = find_endpoints(arguments), read_security(arguments)
        check_registry(RegistryConfig(endpoints, arguments.namespace, security), ANSWER_S)
        console = TextConsole()
        with OmniCoordClientForHub(
            endpoints,
            namespace=arguments.namespace,
            tls=security.tls,
            user=security.user,
            password=security.password,
        ) as client:
            try:
                client.wait_synced(timeout_s=_LIST_S)
            except TimeoutError as error:
                # It has answered just before.
                raise RegistryUnavailableError(
                    f"etcd at {endpoints} answers, but all of namespace {arguments.namespace!r} did not come within "
                    f"{_LIST_S:g} s: it is too much, or etcd is slow; omni doctor names keys to delete"
                ) from error

            def table(beats: Mapping[str, BeatRecord] | None) -> Table:
                view = client.view()
                reports = None if beats is None else read_reports(view, beats)
                return replica_table(view, arguments.namespace, time.time(), console.width, reports)

            if arguments.json:
                for line in replica_json(client.view(), read_reports(client.view(), client.read_beats())):
                    print_json(line)
            elif arguments.watch:
                with Live(console=console, refresh_per_second=4) as live:
                    for turn in itertools.count():
                        if turn % _TURNS_PER_READ == 0:
                            beats = _beats_or_none(client)
                        live.update(table(beats))
                        time.sleep(_TURN_S)
            else:
                console.print(table(client.read_beats()))
            view = client.view()
        if not (view.replicas or view.hubs or view.pipeline):
            return with_registry(arguments, lambda kv: tell_if_empty(kv, arguments.namespace))
        return 0
