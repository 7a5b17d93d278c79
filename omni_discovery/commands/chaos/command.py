"""``omni chaos --namespace staging --yes``: one replica after the other is killed, stopped or cordoned, and healed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from omni_discovery.commands.registry import add_registry_options, with_registry
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from omni_discovery.kv import KVStore

_ACTS: Final = ("kill", "stop", "cordon")
#: The longest that a run may be told to last, in seconds.
_LONGEST_S: Final = 3600.0


class ChaosCommand:
    """``omni chaos``."""

    summary = "kill, stop and cordon replicas of a staging deployment at random; do all come back?"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        parser.add_argument("--yes", action="store_true", help="do it; without this it says what could be done")
        parser.add_argument("--action", action="append", choices=_ACTS, help="only this (repeatable; default: all)")
        parser.add_argument(
            "--for",
            type=float,
            dest="for_s",
            default=60.0,
            metavar="S",
            help="begin nothing new after so long (default: %(default)g)",
        )
        parser.add_argument(
            "--pause", type=float, default=5.0, metavar="S", help="between two of them (default: %(default)g)"
        )
        parser.add_argument(
            "--hold",
            type=float,
            default=5.0,
            metavar="S",
            help="how long a stop or a cordon lasts (default: %(default)g)",
        )
        parser.add_argument(
            "--recovery",
            type=float,
            default=60.0,
            metavar="S",
            help="each time as many replicas must serve each stage as before within so long (default: %(default)g)",
        )
        parser.add_argument("--seed", type=int, default=None, help="of the draws, to have the same again")
        add_registry_options(parser, must_be_named=True)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        for flag, value in (("for", arguments.for_s), ("pause", arguments.pause), ("hold", arguments.hold)):
            if not 0 <= value <= _LONGEST_S:
                raise ConfigError(f"--{flag} is {value:g}; right would be 0 to {_LONGEST_S:g} seconds")
        if not 0 < arguments.recovery <= _LONGEST_S:
            raise ConfigError(f"--recovery is {arguments.recovery:g}; right would be up to {_LONGEST_S:g} seconds")
        return with_registry(arguments, lambda kv: _run(kv, arguments))


async def _run(kv: KVStore, arguments: argparse.Namespace) -> int:
    from omni_discovery.commands.chaos.draw import Act
    from omni_discovery.commands.chaos.run import Chaos, Times
    from omni_discovery.records.keys import check_namespace

    times = Times(arguments.for_s, arguments.pause, arguments.hold, arguments.recovery)
    acts = [Act(each) for each in arguments.action or _ACTS]
    chaos = Chaos(kv, check_namespace(arguments.namespace), acts, times)
    if not arguments.yes:
        await chaos.show()
        return 2
    return await chaos.run(arguments.seed)
