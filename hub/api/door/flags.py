"""The flags of ``omni serve`` about who may use its ports, and what they come to."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import ssl
from typing import TYPE_CHECKING, Any, Final

from hub.api.door.config import DoorConfig, OwnPort
from hub.api.door.keys import ApiKey, read_key, read_key_file
from hub.api.door.tls import TlsFiles, load_context
from omni_discovery.commands.access.secret_file import read_secret_file
from omni_discovery.commands.flags import METRICS_HOST, check_host
from omni_discovery.errors import ConfigError
from omni_discovery.sockets.hosts import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

#: The variables that hold what these flags name files for.
KEY_VARIABLE: Final = "VLLM_API_KEY"
ADMIN_VARIABLE: Final = "OMNI_ADMIN_TOKEN"
_ADMIN_HOST: Final = "127.0.0.1"
_REQS: Final = (int(ssl.CERT_NONE), int(ssl.CERT_OPTIONAL), int(ssl.CERT_REQUIRED))


def add_door_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags, but those of metrics, which supervisors have, too."""
    door = parser.add_argument_group("who may use a hub's API")
    door.add_argument(
        "--api-key-file",
        action="append",
        default=[],
        metavar="FILE",
        help="ask clients for one of the keys in it: one on each line, or name:key; readable by you alone (repeatable)",
    )
    _add(
        door,
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="the same with keys in the command, which history files keep; $VLLM_API_KEY is one, too",
    )
    door.add_argument(
        "--api-keys-from-etcd",
        action="store_true",
        help="the same with the keys that 'omni key create' makes and 'omni key revoke' takes back, without a restart",
    )
    door.add_argument("--api-key-fd", type=int, help=argparse.SUPPRESS)
    _add(door, "--ssl-certfile", metavar="PEM", help="serve HTTPS with this certificate, and those that signed it")
    _add(door, "--ssl-keyfile", metavar="PEM", help="its key, if that is not in the same file")
    _add(door, "--ssl-ca-certs", metavar="PEM", help="who signs the certificates of clients (--ssl-cert-reqs)")
    _add(
        door,
        "--ssl-cert-reqs",
        type=int,
        choices=_REQS,
        default=0,
        help="whether clients need a certificate: 0 no, 1 it is checked if they have one, 2 yes (default: %(default)s)",
    )
    door.add_argument(
        "--forwarded-allow-ips",
        default="",
        metavar="IP[,...]",
        help="addresses or networks of proxies in front, whose X-Forwarded-For and -Proto are believed (default: none)",
    )
    admin = parser.add_argument_group("the port for operators of a hub")
    admin.add_argument(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="a dashboard for browsers at this port, and POST /admin/<method>, which calls every replica: profiles,"
        " sleep, LoRA adapters; 0 takes a free one (default: there is none)",
    )
    admin.add_argument("--admin-host", metavar="HOST", help=f"the address of that port (default: {_ADMIN_HOST})")
    admin.add_argument(
        "--admin-token-file",
        metavar="FILE",
        help="the token that it asks for (default: $OMNI_ADMIN_TOKEN, else one is made, and the log names its file)",
    )
    admin.add_argument("--admin-api", action="store_true", help="the same as --admin-port 0")
    admin.add_argument(
        "--dashboard-open",
        action="store_true",
        help="who reaches that port may look at its dashboard without the token, and do nothing; on loopback only",
    )
    admin.add_argument("--demo-fd", type=int, help=argparse.SUPPRESS)


def _add(group: argparse._ArgumentGroup, flag: str, **options: Any) -> None:
    """Add a flag that vLLM has, too, which also takes underscores."""
    action = group.add_argument(flag, **options)
    group.add_argument(flag.replace("-", "_").replace("__", "--", 1), dest=action.dest, **{**options, "help": _HIDDEN})


_HIDDEN: Final = argparse.SUPPRESS


def check_door(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other, or are a hub's where none runs."""
    given = {
        "--api-key-file": arguments.api_key_file,
        "--api-key": arguments.api_key or arguments.api_key_fd is not None,
        "--api-keys-from-etcd": arguments.api_keys_from_etcd,
        "--ssl-certfile": arguments.ssl_certfile,
        "--ssl-keyfile": arguments.ssl_keyfile,
        "--ssl-ca-certs": arguments.ssl_ca_certs,
        "--ssl-cert-reqs": arguments.ssl_cert_reqs,
        "--forwarded-allow-ips": arguments.forwarded_allow_ips,
        "--admin-api": arguments.admin_api,
        "--admin-port": arguments.admin_port is not None,
        "--admin-host": arguments.admin_host,
        "--admin-token-file": arguments.admin_token_file,
        "--dashboard-open": arguments.dashboard_open,
        "--demo-fd": arguments.demo_fd is not None,
    }
    if arguments.headless and (of_hub := [flag for flag, value in given.items() if value]):
        raise ConfigError(f"--headless has no HTTP API: leave out {', '.join(of_hub)}, or give it to a hub")
    _check_tls(arguments)
    has_admin = arguments.admin_api or arguments.admin_port is not None
    for flag in ("--admin-host", "--admin-token-file", "--dashboard-open", "--demo-fd"):
        if given[flag] and not has_admin:
            raise ConfigError(f"{flag} is about --admin-port: give that too, or leave it out")
    if arguments.admin_port is not None and not 0 <= arguments.admin_port <= 65535:
        raise ConfigError(f"--admin-port {arguments.admin_port} is none; take 0 to 65535")
    if arguments.admin_host is not None:
        check_host("--admin-host", arguments.admin_host)
        for flag in ("--dashboard-open", "--demo-fd"):
            if given[flag] and not is_loopback(arguments.admin_host):
                text = f"{flag} is for loopback only, and --admin-host is {arguments.admin_host}: leave one of them out"
                raise ConfigError(text)
    for word in filter(None, arguments.forwarded_allow_ips.split(",")):
        try:
            ipaddress.ip_network(word.strip(), strict=False)
        except ValueError:
            text = f"--forwarded-allow-ips: {word.strip()!r} is no address; right would be 10.0.0.5 or 10.0.0.0/24"
            raise ConfigError(text) from None


def _check_tls(arguments: argparse.Namespace) -> None:
    for flag, value in (("--ssl-keyfile", arguments.ssl_keyfile), ("--ssl-ca-certs", arguments.ssl_ca_certs)):
        if value and not arguments.ssl_certfile:
            raise ConfigError(f"{flag} needs a certificate beside it: --ssl-certfile")
    if arguments.ssl_cert_reqs and not arguments.ssl_ca_certs:
        raise ConfigError("--ssl-cert-reqs: say who signs the certificates of clients: --ssl-ca-certs")
    if arguments.ssl_ca_certs and not arguments.ssl_cert_reqs:
        raise ConfigError("--ssl-ca-certs has no effect alone: add --ssl-cert-reqs 2 to ask clients for a certificate")


def read_door(arguments: argparse.Namespace, environment: Mapping[str, str], moved_keys: str = "") -> DoorConfig:
    """The settings of the flags. Raise ConfigError for files that are wrong.

    ``environment`` holds ``$VLLM_API_KEY`` and ``$OMNI_ADMIN_TOKEN``; ``moved_keys`` the values of ``--api-key`` that
    were taken out of the command line, one on each line.
    """
    tls = None
    if arguments.ssl_certfile:
        tls = TlsFiles(
            arguments.ssl_certfile, arguments.ssl_keyfile or "", arguments.ssl_ca_certs or "", arguments.ssl_cert_reqs
        )
        load_context(tls)
    admin = None
    if arguments.admin_api or arguments.admin_port is not None:
        admin = OwnPort(arguments.admin_host or _ADMIN_HOST, arguments.admin_port or 0)
    metrics = None
    if arguments.metrics_port is not None:
        metrics = OwnPort(arguments.metrics_host or METRICS_HOST, arguments.metrics_port)
    return DoorConfig(
        keys=_keys(arguments, environment, moved_keys),
        keys_from_etcd=arguments.api_keys_from_etcd,
        tls=tls,
        admin=admin,
        admin_token=_token("admin", "--admin-token-file", arguments.admin_token_file, environment.get(ADMIN_VARIABLE)),
        dashboard_open=arguments.dashboard_open,
        demo_fd=arguments.demo_fd,
        metrics=metrics,
        metrics_token=_token("metrics", "--metrics-token-file", arguments.metrics_token_file, None),
        forwarded_allow_ips=arguments.forwarded_allow_ips,
    )


def _keys(arguments: argparse.Namespace, environment: Mapping[str, str], moved_keys: str) -> tuple[ApiKey, ...]:
    found: list[ApiKey] = []
    for number, key in enumerate([*arguments.api_key, *moved_keys.splitlines()], 1):
        found.append(read_key(f"api-key-{number}", key, "--api-key"))
    for number, file in enumerate(arguments.api_key_file, 1):
        found += read_key_file(read_secret_file("--api-key-file", file), f"--api-key-file {file}", number)
    if key := environment.get(KEY_VARIABLE):
        found.append(read_key(KEY_VARIABLE, key, f"${KEY_VARIABLE}"))
    return tuple(found)


def _token(name: str, flag: str, file: str | None, value: str | None) -> ApiKey | None:
    if file:
        return read_key(name, read_secret_file(flag, file).strip(), f"{flag} {file}")
    return read_key(name, value, f"${ADMIN_VARIABLE}") if value else None


def warn_if_open(host: str, door: DoorConfig) -> None:
    """Log a warning if other hosts may reach an API that asks for no key."""
    if not door.asks_for_key and not is_loopback(host):
        text = "hub.open host=%s: whoever reaches this port may use the API; --api-key-file FILE has it ask for a key"
        logger.warning(text, host)
