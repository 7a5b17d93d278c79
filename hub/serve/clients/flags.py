"""The flags of ``omni serve`` for what clients may do: time-outs, caps, hosts and origins.

Defaults are those of the settings that the flags fill: ``ConnectionLimits``, ``ClientBounds`` and ``HubConfig``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.errors import ConfigError
from omni_discovery.wire import MAX_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hub.api.server import HttpConfig
    from hub.config import ClientBounds

#: The flags with one number, by the field that each sets; those of ConnectionLimits first.
_LIMITS: Final = {
    "--header-timeout": "header_timeout_s",
    "--body-timeout": "body_timeout_s",
    "--send-timeout": "send_timeout_s",
    "--max-connections": "max_connections",
    "--max-unfinished-bytes": "max_unfinished_bytes",
    "--max-held-bytes": "max_held_bytes",
}
_NUMBERS: Final = (
    *_LIMITS,
    "--stream-idle-timeout",
    "--max-timeout",
    "--max-requests-per-client",
    "--stream-headers-wait",
)
_OTHERS: Final = ("--priority-range", "--allowed-hosts", "--allowed-origins")
_RANGE: Final = re.compile(r"(-?\d{1,7}):(-?\d{1,7})")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+/?", re.IGNORECASE)
#: A flag's value may begin with the minus of a negative number: argparse takes it only as --priority-range=-5:5.
_RANGE_USAGE: Final = "--priority-range=-10:100"


def add_client_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags. Without one, the default of its setting holds."""
    seconds: Any = {"type": float, "metavar": "SECONDS"}
    parser.add_argument(
        "--max-timeout",
        **seconds,
        help="the longest 'timeout' that a client may ask for (default: 3600, or --request-timeout if that is longer)",
    )
    parser.add_argument(
        "--priority-range",
        metavar="LOW:HIGH",
        help="the values of 'priority' that clients may ask for; a lower one goes first (default: 0:1000000, so that"
        f" nobody gets in front of those who ask for none; {_RANGE_USAGE} lets clients do that)",
    )
    parser.add_argument(
        "--stream-idle-timeout",
        **seconds,
        help="how long a request whose input comes in segments keeps its slots while its client sends none"
        " (default: 60)",
    )
    parser.add_argument(
        "--max-requests-per-client",
        type=int,
        metavar="N",
        help="POST requests and WebSockets that one API key, or without keys one IP address (a network of 64 bits in"
        " IPv6), may have under way, each counted by its answers, prompts times 'n'; more get a 429; a proxy in front"
        " is one address (default: no bound)",
    )
    parser.add_argument(
        "--stream-headers-wait",
        **seconds,
        help="how long after its request the headers of an answer leave without its first piece, for proxies that wait"
        " no longer; until then a client may repeat the request at another hub (default: they wait for the piece)",
    )
    parser.add_argument(
        "--header-timeout", **seconds, help="how long the header of a request may take to come (default: 15)"
    )
    parser.add_argument(
        "--body-timeout",
        **seconds,
        help="how long a body may pause; and how long it may take, but a second more for each 16 KiB (default: 30)",
    )
    parser.add_argument(
        "--send-timeout",
        **seconds,
        help="how long a client may take nothing of the output that waits for it (default: 60)",
    )
    parser.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="connections of clients; for one more, that which has waited longest for its client is closed"
        " (default: 8192, or half of this process's descriptors if that is less)",
    )
    parser.add_argument(
        "--max-unfinished-bytes",
        type=int,
        metavar="N",
        help="bytes of all bodies that have come in part; beyond, the largest is given up (default: 268435456)",
    )
    parser.add_argument(
        "--max-held-bytes",
        type=int,
        metavar="N",
        help="bytes of memory, about, that long bodies of requests under way may take; a client gets a 429 for more"
        " than is left, so that one alone has half. As much again may lie in answers that clients leave unread, and as"
        " much behind those (default: 2147483648)",
    )
    parser.add_argument(
        "--allowed-hosts",
        metavar="NAMES",
        help="names by which clients may address this hub, separated by commas, * for all; IP addresses and localhost"
        " always may (default: none where --host is loopback, else *)",
    )
    parser.add_argument(
        "--allowed-origins",
        metavar="ORIGINS",
        help="origins of web pages whose scripts may send requests, such as https://chat.example, separated by commas"
        " or as a JSON list, * for all (default: none but this hub's own)",
    )


def check_client_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a value out of range, or a flag of a hub where there is none."""
    for flag in (*_NUMBERS, *_OTHERS):
        if _given(arguments, flag) is not None and arguments.headless:
            raise ConfigError(f"{flag} is a hub's: leave it out with --headless")
    for flag in _NUMBERS:
        value = _given(arguments, flag)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} is {value:g}; it must be more than 0")
    longest_s, usual_s = arguments.max_timeout, arguments.request_timeout
    if longest_s is not None and usual_s is not None and longest_s < usual_s:
        raise ConfigError(f"--max-timeout ({longest_s:g}) is less than --request-timeout ({usual_s:g}): raise it")
    _priorities(arguments.priority_range)
    for origin in _names(arguments.allowed_origins, "--allowed-origins"):
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"--allowed-origins: {origin!r} is none; an origin is like https://chat.example")
    for name in _names(arguments.allowed_hosts, "--allowed-hosts"):
        if "/" in name or (":" in name and not name.startswith("[")) or ("*" in name and name != "*"):
            raise ConfigError(f"--allowed-hosts: {name!r} is none; give names without a port, such as hub.example")


def client_bounds(arguments: argparse.Namespace) -> ClientBounds:
    """The bounds of what clients may ask for. Raise ConfigError."""
    from hub.config import ClientBounds, HubConfig

    usual = ClientBounds()
    request_timeout_s = arguments.request_timeout or HubConfig().request_timeout_s
    longest_s = arguments.max_timeout or max(usual.max_timeout_s, request_timeout_s)
    low, high = _priorities(arguments.priority_range) or (usual.least_priority, usual.most_priority)
    return ClientBounds(longest_s, low, high)


def http_config(arguments: argparse.Namespace, bound_to: str, descriptors: int) -> HttpConfig:
    """The settings of the HTTP server that listens on ``bound_to``. Raise ConfigError.

    By default its connections leave half of the ``descriptors`` of this process for replicas and etcd.
    """
    from hub.api.connections import ConnectionLimits
    from hub.api.cross_origin import web_policy
    from hub.api.server import HttpConfig

    given: dict[str, Any] = {field: value for flag, field in _LIMITS.items() if (value := _given(arguments, flag))}
    given.setdefault("max_connections", min(ConnectionLimits().max_connections, max(1, descriptors // 2)))
    hosts = _names(arguments.allowed_hosts, "--allowed-hosts")
    origins = _names(arguments.allowed_origins, "--allowed-origins")
    return HttpConfig(
        ConnectionLimits(**given),
        web_policy(bound_to, hosts, origins),
        arguments.max_requests_per_client or 0,
        arguments.access_log,
        arguments.stream_headers_wait,
    )


def _given(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag.removeprefix("--").replace("-", "_"))


def _priorities(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = _RANGE.fullmatch(text)
    bounds = (int(found[1]), int(found[2])) if found else (1, 0)
    if not -MAX_PRIORITY <= bounds[0] <= bounds[1] <= MAX_PRIORITY:
        most = f"-{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ConfigError(f"--priority-range is {text!r}; it is LOW:HIGH, from {most}, such as {_RANGE_USAGE}")
    return bounds


def _names(text: str | None, flag: str) -> Sequence[str]:
    """The names in a flag: separated by commas, or, as vLLM has it, a JSON list."""
    if text is None:
        return ()
    if not text.lstrip().startswith("["):
        return tuple(name for each in text.split(",") if (name := each.strip()))
    try:
        names = json.loads(text)
    except json.JSONDecodeError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        # The name of a host may be an IPv6 address in brackets.
        if flag == "--allowed-hosts":
            return tuple(each.strip() for each in text.split(","))
        raise ConfigError(f"{flag} is no list of names: {text}")
    return tuple(names)
