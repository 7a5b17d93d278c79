"""The address that a replica listens on and the one that its record gives to hubs."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import parse_endpoints, socket_path
from omni_discovery.records.addresses import is_loopback

_LOOPBACK: Final = {"localhost": "127.0.0.1", "ip6-localhost": "::1", "ip6-loopback": "::1"}


def find_hosts(endpoints: str, replica_address: str = "") -> tuple[str, str]:
    """The host to bind and the host to advertise.

    ``replica_address``, if the operator gave one, is advertised as it is and all interfaces are bound, because it may
    be an address of a NAT or of a load balancer; a loopback address is bound alone. Otherwise both are the address from
    which this machine reaches etcd; for a socket, which only this machine reaches, that is 127.0.0.1.
    Raise ConfigError if there is no route to any endpoint.
    """
    if replica_address:
        host = replica_address.strip("[]")
        if is_loopback(host):
            return _LOOPBACK.get(host, host), host
        return ("::" if _is_only_ipv6(host) else "0.0.0.0"), host  # noqa: S104
    failures = []
    for endpoint in parse_endpoints(endpoints):
        if socket_path(endpoint):
            return _LOOPBACK["localhost"], _LOOPBACK["localhost"]
        host, _, port = endpoint.rpartition(":")
        host = host.strip("[]")
        if host in _LOOPBACK:
            return _LOOPBACK[host], _LOOPBACK[host]
        try:
            source = source_address(host, int(port))
        except OSError as error:
            failures.append(f"{endpoint}: {error}")
            continue
        if not _is_usable(source):
            failures.append(f"{endpoint}: {source} is not an address that others can reach")
            continue
        return source, source
    raise ConfigError(f"no address to give to hubs ({'; '.join(failures)}); say one with --omni-replica-address")


def _is_only_ipv6(host: str) -> bool:
    """Whether a host has IPv6 addresses only. False for a name that can't be resolved here: hubs may resolve it."""
    if ":" in host:
        return True
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(family == socket.AF_INET6 for family, *_ in addresses)


def source_address(host: str, port: int) -> str:
    """The address of this machine on the way to another one. Raise OSError if there is no way."""
    failure: OSError = OSError("no address")
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        # Connecting a UDP socket sends nothing: the kernel only looks up the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                failure = error
    raise failure


def _is_usable(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return not (address.is_unspecified or address.is_link_local)


def tcp_address(host: str, port: int) -> str:
    """The ZMQ address of a host and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
