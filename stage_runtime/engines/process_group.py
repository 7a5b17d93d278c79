"""Process groups of torch.distributed that have one rank: they open no port that anybody can connect to.

vLLM makes about a dozen process groups, also for a model on one device, and the gloo backend of each listens on a TCP
port of its own. gloo never gives back the descriptor of a connection that was closed at once, and aborts the process at
its limit of open files. A group of one rank connects to nobody, so its listener can be shared and closed to everybody.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import socket
import struct
from functools import cache
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

#: Linux's numbers of a socket's option and of a filter's instruction; Python's socket module has neither.
_SO_ATTACH_FILTER: Final = 26
_BPF_RET: Final = 0x06


def seal_single_rank_groups() -> None:
    """Let the gloo groups of one rank that this process makes from now on share one listener that drops every packet.

    Groups of more ranks are as torch makes them. Does nothing the second time, or where this torch has no gloo.
    """
    try:
        from torch.distributed.distributed_c10d import ProcessGroupGloo
    except ImportError:
        return
    group_class: Any = ProcessGroupGloo
    made_by_torch = group_class.__init__
    if made_by_torch.__module__ == __name__:
        return

    def begin_group(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        is_plain = not args and set(kwargs) <= {"timeout"}
        if size != 1 or not is_plain:
            made_by_torch(self, store, rank, size, *args, **kwargs)
            return
        # Private names; torch has no other way to give a group its device.
        options = group_class._Options()  # noqa: SLF001
        options._devices = [_sealed_device(os.getpid())]  # noqa: SLF001
        if "timeout" in kwargs:
            options._timeout = kwargs["timeout"]  # noqa: SLF001
        made_by_torch(self, store, rank, size, options)

    # On the class itself: torch asks for instances of it, and hands it out under several names.
    group_class.__init__ = begin_group


@cache
def _sealed_device(pid: int) -> Any:
    """Gloo's device of this process. Per process: the thread that serves it does not live on in a fork."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    # gloo does not tell its socket: an address that nothing else of this process is bound to finds it.
    drawn = secrets.token_bytes(3)
    host = f"127.{drawn[0] | 0x80}.{drawn[1]}.{drawn[2] | 1}"
    device = ProcessGroupGloo.create_device(hostname=host)
    try:
        _seal_listeners(host)
    except OSError as error:
        logger.warning(
            "engine.port_not_sealed pid=%d host=%s error=%s: users of this host can reach gloo's port", pid, host, error
        )
    return device


def _seal_listeners(host: str) -> None:
    """Have the kernel drop whatever reaches this process's sockets at an address. Raise OSError if it does not."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            # Closed meanwhile.
            continue
        with copy:
            name = copy.getsockname()
            # The names of other families have another form.
            if isinstance(name, tuple) and name[0] == host:
                _drop_all(copy)


def _drop_all(listener: socket.socket) -> None:
    """Attach a filter that keeps no byte of any packet, so that no connection can begin. Raise OSError."""
    keep_nothing = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET, 0, 0, 0))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(keep_nothing)))
