"""Mooncake's transfer engine with the pool that it reads and writes, and checks of its settings.

An engine finds another by its address alone (the library's ``P2PHANDSHAKE``): no metadata server is needed. Mooncake's
package is imported when a connector is built.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import ipaddress
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

from omni_discovery.errors import ConfigError
from stage_runtime.addresses import source_address
from stage_runtime.connectors.errors import TransferCancelledError, TransferError
from stage_runtime.connectors.producer_room import ProducerRoom
from stage_runtime.connectors.store.registered import STAMP_BYTES, Block, ManagedPool

_WANTED: Final = "pip install 'omni-discovery[mooncake]' and Debian's libibverbs1 (apt-get install libibverbs1)"
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
PROTOCOLS: Final = ("tcp", "rdma")
_AUTO: Final = "auto"
#: An address for documentation, which no host has; the kernel looks up its route and nothing is sent.
_ELSEWHERE: Final = "192.0.2.1"


#: Yuanrong's package, whose own copy of a library of logs ends Mooncake's in a SIGSEGV if it is loaded first.
_FOE: Final = "yr.datasystem"


def load(module: str) -> Any:
    """A module of Mooncake's package. Raise ConfigError that names what to install, or to remove."""
    if _FOE in sys.modules and not {"mooncake.engine", "mooncake.store"} & sys.modules.keys():
        raise ConfigError(
            "Yuanrong's package is loaded in this process, and Mooncake's would end it with a SIGSEGV. vLLM-Omni loads"
            " it wherever it is installed: pip uninstall openyuanrong-datasystem in this Python, or name another"
            " connector"
        )
    try:
        return importlib.import_module(f"mooncake.{module}")
    except ImportError as error:
        raise ConfigError(f"Mooncake's connectors need {_WANTED}: {error}") from error


def check_protocol(protocol: Any) -> str:
    """``tcp`` or ``rdma``. Raise ConfigError."""
    if protocol not in PROTOCOLS:
        raise ConfigError(f"protocol is {protocol!r}; one of {', '.join(PROTOCOLS)} is wanted")
    return str(protocol)


def check_devices(protocol: str, names: str, folder: Path = _RDMA_DEVICES) -> None:
    """Raise ConfigError for RDMA without the named devices: the library would silently use TCP instead."""
    if protocol != "rdma":
        return
    there = {device.name for device in folder.iterdir()} if folder.is_dir() else set()
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    if not there or not wanted <= there:
        names_there = ", ".join(sorted(there)) or "none"
        raise ConfigError(
            f"protocol is rdma, and {names or 'an RDMA device'} is not here; there are: {names_there}; or use tcp"
        )


def host_of(config: Mapping[str, Any]) -> str:
    """The address that ``host`` or ``advertise_host`` gives to peers; empty if neither does.

    ``host: auto`` without ``advertise_host`` is this machine's address on the way to other networks.
    """
    host = str(config.get("host") or "")
    if host and host != _AUTO:
        return host
    advertised = str(config.get("advertise_host") or "")
    if host == _AUTO and not advertised:
        with contextlib.suppress(OSError):
            return source_address(_ELSEWHERE, 9)
    return advertised


def check_host(host: str) -> str:
    """The address at which peers reach this process. Raise ConfigError for one that the library can't use."""
    host = host.strip("[]") or "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version != 4:
        raise ConfigError(f"Mooncake's processes find each other by IPv4 only, and {host} is none: use TcpConnector")
    return host


_HANDSHAKE: Final = "P2PHANDSHAKE"
#: How many reads run at the same time; others wait. Nothing ends a read but the library, so some may stand for long.
_THREADS: Final = 64
#: How long a read may go on that nobody waits for before it is late, and how many late ones a producer may have before
#: it gets no other read. One client that goes away during a large read leaves a late one, and harms nobody else.
_LATE_S: Final = 2.0
_MOST_LATE: Final = _THREADS // 8
#: Pools of connectors that were closed while others read from them.
_STILL_READ: Final[list[ManagedPool]] = []


@cache
def _engine(host: str, protocol: str, device_name: str) -> Any:
    """The process's only engine: it serves any number of pools, and takes a second to end. Raise TransferError."""
    engine = load("engine").TransferEngine()
    if engine.initialize(host, _HANDSHAKE, protocol, device_name):
        raise TransferError(
            f"Mooncake's engine does not start on {host} with protocol {protocol} and device {device_name!r}; its own "
            "log, on standard error, says why"
        )
    return engine


class ProducerReads:
    """Reads from the pools of producers, by producer: each holds a thread and a block. Used by any thread.

    Those of one producer hold at most half of this side's pool.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._room = ProducerRoom(clock)
        self._lock = threading.Lock()
        #: When each that nobody waits for any more was given up, the oldest first.
        self._since_s: dict[str, list[float]] = {}

    def begin(
        self,
        producer: str,
        size_bytes: int,
        pool_bytes: int,
        deadline_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Take room for a read, and wait for it behind the producer's others. Raise TransferError if there is none.

        ``end`` gives it back. ``deadline_s`` is a moment of the clock; what ``check`` raises ends the wait.
        """
        most_bytes = pool_bytes // 2
        if size_bytes > most_bytes:
            told = f"{size_bytes} bytes are offered, and reads of one producer take at most half of the pool"
            # It is this side that has too little.
            lacking = OSError(errno.ENOBUFS, "the pool is too small")
            raise TransferError(f"{producer}: {told}, {most_bytes} bytes: raise memory_pool_size") from lacking
        self._room.take(producer, size_bytes, most_bytes, deadline_s, check)

    def end(self, producer: str, size_bytes: int) -> None:
        """A read has ended, or was not begun."""
        self._room.give_back(producer, size_bytes)

    def check_producer(self, producer: str) -> None:
        """Raise TransferError while ``_MOST_LATE`` reads of that producer's pool, or more, are late."""
        now_s = self._clock()
        with self._lock:
            late = sum(now_s - since_s >= _LATE_S for since_s in self._since_s.get(producer, ()))
        if late >= _MOST_LATE:
            raise TransferError(f"{producer}: {late} earlier reads there do not end, so no other is begun")

    def watch(self, producer: str, reading: Future[int]) -> None:
        """Note a read that goes on, until it ends."""
        since_s = self._clock()
        with self._lock:
            self._since_s.setdefault(producer, []).append(since_s)
        reading.add_done_callback(lambda _: self._forget(producer, since_s))

    def _forget(self, producer: str, since_s: float) -> None:
        with self._lock:
            left = self._since_s[producer]
            left.remove(since_s)
            if not left:
                del self._since_s[producer]


class EngineEnd:
    """The engine and the pool of one connector, started by the first call that needs them. Used by any thread."""

    #: The library's name, for messages.
    whose = "Mooncake"

    def __init__(self, host: str, protocol: str, device_name: str, pool_bytes: int, pool_device: str) -> None:
        self._host = host
        self._protocol = protocol
        self._device_name = device_name
        self._pool_bytes = pool_bytes
        self._pool_device = pool_device
        self._check()
        self._lock = threading.Lock()
        self._closed = False
        self._reading = 0
        self._threads: ThreadPoolExecutor | None = None
        self._engine: Any = None
        self._pool: ManagedPool | None = None
        self.rpc_port = 0

    @property
    def pool(self) -> ManagedPool:
        """The registered pool. Raise TransferError if the engine does not start, ConfigError without the memory.

        Raise TransferCancelledError after ``close``.
        """
        with self._lock:
            if self._closed:
                raise TransferCancelledError("the connector is closed")
            if self._pool is None:
                self._pool = self._start()
            return self._pool

    @property
    def library_engine(self) -> Any:
        """The library's engine, started. Raises what ``pool`` raises."""
        _ = self.pool
        return self._engine

    @property
    def free_bytes(self) -> int:
        """Free bytes of the pool; all of them before it exists."""
        return self._pool_bytes if self._pool is None else self._pool.free_bytes

    def start(self) -> str:
        """Start the engine; the session name by which other engines read from the pool. Raises what ``pool`` raises."""
        _ = self.pool
        return f"{self._host}:{self.rpc_port}"

    def read(self, session: str, address: int, size_bytes: int, block: Block) -> Future[int]:
        """Start reading a stamp and ``size_bytes`` of another engine's pool into a block; the result is 0 for success.

        The block must be held until the result is there, even if the caller gives up earlier.
        """
        pool = self.pool
        with self._lock:
            if self._closed or self._threads is None:
                raise TransferCancelledError("the connector is closed")
            self._reading += 1
            here, length = pool.address + block.offset, STAMP_BYTES + size_bytes
            future: Future[int] = self._threads.submit(self._engine.transfer_sync_read, session, here, address, length)
        future.add_done_callback(self._read_is_over)
        return future

    def close(self, *, is_read: bool = False) -> None:
        """Stop reading and being read. Idempotent. Does not wait for reads under way.

        ``is_read``: another engine may be reading from the pool now. Then the memory is kept until the process ends,
        because nothing tells when that read is over.
        """
        with self._lock:
            if is_read and self._pool is not None:
                _STILL_READ.append(self._pool)
            self._closed = True
            threads, self._threads = self._threads, None
            self._stop_if_idle()
        if threads is not None:
            threads.shutdown(wait=False)

    def _check(self) -> None:
        """Raise ConfigError if there is no library."""
        load("engine")

    def _make_engine(self) -> Any:
        """The library's engine. Raise TransferError if it does not start."""
        return _engine(self._host, self._protocol, self._device_name)

    def _start(self) -> ManagedPool:
        pool = ManagedPool(self._pool_bytes, self._pool_device)
        engine = self._make_engine()
        if engine.register_memory(pool.address, pool.size_bytes):
            raise TransferError(f"{self.whose}'s engine does not take a pool of {pool.size_bytes} bytes")
        self._engine, self.rpc_port = engine, engine.get_rpc_port()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mooncake-read")
        return pool

    def _read_is_over(self, _: Future[int]) -> None:
        with self._lock:
            self._reading -= 1
            self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._closed and not self._reading and self._pool is not None and self._engine is not None:
            self._engine.unregister_memory(self._pool.address)
            self._engine = None
