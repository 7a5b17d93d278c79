"""Listening sockets of an HTTP port: on loopback for both addresses that the name ``localhost`` leads to.

Clients that are told ``localhost`` try ::1 and 127.0.0.1 in an order of their own. Whoever listens on the one that is
left free gets their keys and prompts, and every user of the machine may listen there.
"""

from __future__ import annotations

import errno
import socket
from enum import Enum, auto
from typing import Final

from omni_discovery.errors import ConfigError

#: By the address of a socket, the other one that ``localhost`` may lead to; a socket on :: has both families.
_OTHER_LOOPBACK: Final = {"127.0.0.1": "::1", "0.0.0.0": "::1", "::1": "127.0.0.1"}  # noqa: S104 - compared only
#: A machine without that address or its family.
_NO_SUCH_ADDRESS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
#: How many free ports are tried until one is free on both addresses.
_TRIES: Final = 64
#: Clients of a socket that the kernel holds until they are accepted, if it holds as many: of others it drops a packet,
#: which comes again after a second or more.
BACKLOG: Final = 4096


class Sharing(Enum):
    """Whether several processes of one user listen at a port; the kernel gives each of them its part of the clients."""

    #: One process does.
    NONE = auto()
    #: This one does, and lets others join it; the port has to be free.
    FIRST = auto()
    #: This one joins the first. Its sockets are bound, and get no clients before they listen.
    JOINS = auto()


def bind(
    host: str,
    port: int,
    port_flag: str = "--port",
    host_flag: str = "--host",
    sharing: Sharing = Sharing.NONE,
) -> tuple[socket.socket, ...]:
    """Listening sockets of one port, that of ``host`` first; port 0 takes one that is free on all their addresses.

    Raise ConfigError, which names a flag, if an address can't be bound.
    """
    for tries_left in reversed(range(_TRIES if port == 0 else 1)):
        try:
            first = _listen(host, port, sharing)
        except OSError as error:
            flag = port_flag if error.errno in (errno.EADDRINUSE, errno.EACCES) else host_flag
            raise ConfigError(f"can't listen on {host} port {port}: {error.strerror}; choose another {flag}") from error
        bound_host, bound_port = first.getsockname()[:2]
        other = _OTHER_LOOPBACK.get(bound_host)
        if other is None:
            return (first,)
        try:
            return first, _listen(other, bound_port, sharing)
        except OSError as error:
            if error.errno in _NO_SUCH_ADDRESS:
                return (first,)
            first.close()
            if not tries_left:
                raise ConfigError(
                    f"can't listen on {other} port {bound_port}: {error.strerror}; what listens there would get the "
                    f"requests of clients that say localhost: choose another {port_flag}"
                ) from error
    raise AssertionError("the last try returns or raises")


def _listen(host: str, port: int, sharing: Sharing) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sharing is Sharing.JOINS:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((host, port))
        else:
            listener.bind((host, port))
            if sharing is Sharing.FIRST:
                # Only now: bound with it, this would join whoever of this user has the port already.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
