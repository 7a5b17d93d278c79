"""The flags of ``omni serve`` that bound what a hub takes in and how long requests may last."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from hub.config import HubConfig

#: The fields of HubConfig that they set, by flag.
_FLAGS: Final = {
    "--max-waiting": "max_waiting",
    "--max-in-flight": "max_in_flight",
    "--request-timeout": "request_timeout_s",
    "--pick-timeout": "pick_timeout_s",
}
#: Below that a request could end before a replica that hangs is given up.
_LEAST_REQUEST_S: Final = 1.0


def add_admission_options(parser: argparse._ActionsContainer) -> None:
    """Bounds and times of a hub. What is not given is as in HubConfig."""
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


def check_admission(arguments: argparse.Namespace) -> None:
    """Refuse what makes no sense. Raise ConfigError with the reason."""
    for flag in _FLAGS:
        value = _value(arguments, flag)
        if value is None:
            continue
        if arguments.headless:
            raise ConfigError(f"{flag} is a hub's: leave it out with --headless")
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag} is {value:g}; it must be more than 0")
    timeout_s = arguments.request_timeout
    if timeout_s is not None and timeout_s < _LEAST_REQUEST_S:
        raise ConfigError(f"--request-timeout is {timeout_s:g}; it must be at least {_LEAST_REQUEST_S:g} second")


def hub_config(arguments: argparse.Namespace) -> HubConfig:
    """The hub's times and bounds with what the flags say."""
    from hub.config import HubConfig

    given: dict[str, Any] = {field: value for flag, field in _FLAGS.items() if (value := _value(arguments, flag))}
    if arguments.request_timeout is not None:
        given["accept_limit_s"] = min(HubConfig().accept_limit_s, arguments.request_timeout / 2)
    return HubConfig(**given)


def _value(arguments: argparse.Namespace, flag: str) -> float | None:
    value: float | None = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
    return value
