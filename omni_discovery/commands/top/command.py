"""``omni top``: the live screen of stages and replicas."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from omni_discovery.commands.output import quiet_logging
from omni_discovery.commands.registry import (
    ANSWER_S,
    add_registry_options,
    find_endpoints,
    read_security,
    user_runtime_dir,
)
from omni_discovery.commands.why.command import add_hub_options, hubs_to_ask
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_discovery.view.table import View


class TopCommand:
    """``omni top``."""

    summary = "show stages and replicas live, and act on one with a key"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_hub_options(parser)
        add_registry_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command. Raise ConfigError without a terminal, or without the library that draws."""
        # The library draws on standard error.
        if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
            raise ConfigError(
                "omni top needs a terminal: omni status prints what needs you, omni replicas --watch the replicas"
            )
        try:
            import textual  # noqa: F401
        except ImportError:
            raise ConfigError(
                "omni top needs textual, which is not installed here: pip install 'omni-discovery[top]'; without it,"
                " omni replicas --watch and omni status show the same as text"
            ) from None
        return _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    import asyncio

    from omni_discovery.etcd.check import check_registry
    from omni_discovery.etcd.config import RegistryConfig
    from omni_discovery.records.keys import check_namespace

    check_namespace(arguments.namespace)
    # A line of the log would stand in the middle of the screen.
    quiet_logging(silent=True)
    endpoints, security = find_endpoints(arguments), read_security(arguments)
    check_registry(RegistryConfig(endpoints, arguments.namespace, security), ANSWER_S)
    find_hubs = hub_finder(arguments)

    async def shown() -> int:
        from omni_discovery.commands.top.screen import TopApp
        from omni_discovery.commands.top.source import TopSource
        from omni_discovery.view.families import NamespaceReader

        kv = NamespaceReader(arguments.namespace, endpoints, security=security, call_timeout_s=ANSWER_S)
        try:
            source = TopSource(kv, arguments.namespace, find_hubs, user_runtime_dir())
            app = TopApp(source, arguments.namespace)
            await app.run_async()
            return app.return_code or 0
        finally:
            await kv.close()

    return asyncio.run(shown())


def hub_finder(arguments: argparse.Namespace) -> Callable[[View], Sequence[Callable[[str], dict[str, Any]]]]:
    """Who is asked for requests, anew each time: hubs come and go. Raise ConfigError for what can't be asked."""

    def find(view: View) -> Sequence[Callable[[str], dict[str, Any]]]:
        urls: list[str] = []
        if arguments.all_hubs:
            urls = [hub.admin for _, hub in sorted(view.hubs.items()) if isinstance(hub.admin, str) and hub.admin]
        return hubs_to_ask(arguments, urls)

    # What is wrong with the flags is said before the screen opens.
    hubs_to_ask(arguments, [])
    return find
