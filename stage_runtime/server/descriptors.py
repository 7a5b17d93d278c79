"""ConnectionPause: takes no new connections while few file descriptors are left, so that hand-offs still get theirs.

Whoever reaches a port holds one descriptor for each connection until its handshake is due. Connections that stand are
not touched by a pause, and those that are made meanwhile are only late: the kernel drops their first packet, which the
other side sends again after a second.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Sequence
from typing import Final

from omni_discovery.log_once import LogOnce

logger = logging.getLogger(__name__)

#: Of Linux; Python has no names for them.
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
#: The classic BPF program of one instruction that keeps 0 bytes of every packet.
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)
#: The used parts of the limit that begin and end a pause.
_PAUSE_AT: Final = 0.75
_RESUME_AT: Final = 0.5


class ConnectionPause:
    """Watches this process's descriptors for its listening sockets, which it takes over. Used by one thread."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self._listeners = listeners
        self._log_once = LogOnce()
        self.is_paused = False

    def check_descriptors(self) -> None:
        """Begin or end a pause. Cheap enough for every tenth of a second."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = 0 if limit == resource.RLIM_INFINITY else self._lowest_free(limit)
        if not self.is_paused and used >= limit * _PAUSE_AT:
            self._pause()
            if self._log_once.should():
                text = (
                    "server.connections_paused descriptors=%d: new connections wait; see ulimit -n (said once a while)"
                )
                logger.warning(text, limit)
        elif self.is_paused and used <= limit * _RESUME_AT:
            for listener in self._listeners:
                listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            self.is_paused = False

    def _pause(self) -> None:
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        for listener in self._listeners:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
        self.is_paused = True

    def _lowest_free(self, limit: int) -> int:
        """The lowest number that no open file has: all below it are in use."""
        try:
            number = os.dup(self._listeners[0].fileno())
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return limit
            raise
        os.close(number)
        return number

    def close(self) -> None:
        """Close the listening sockets. Idempotent."""
        for listener in self._listeners:
            listener.close()
