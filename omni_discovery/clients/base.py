"""RegistryClient: the base of both registry clients: a thread, a connection to etcd, and a close that happens once."""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

from omni_discovery.clients.calls import ClientCalls
from omni_discovery.errors import ConfigError, RegistryUnavailableError
from omni_discovery.etcd.config import RegistryConfig, RegistrySecurity, RegistryTls, parse_endpoints
from omni_discovery.etcd.store import EtcdKV
from omni_discovery.kv import KVCalls
from omni_discovery.log_once import LogOnce
from omni_discovery.loop_thread import LoopThread
from omni_discovery.registration.lease import LeaseState
from omni_discovery.registration.leased_key import LeasedKey
from omni_discovery.stories import Stories
from omni_discovery.view.api_keys import ApiKeyWatch
from omni_discovery.view.watcher import Watcher

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S: Final = 10.0

#: States of a lease of which an operator may want the story.
_FAILED: Final = (LeaseState.SUSPECT, LeaseState.LOST)

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

#: What ``endpoints`` is called where a coordinator stands in etcd's place.
_OLD_NAME: Final = "coord_zmq_addr"
_log_once = LogOnce()


def accepts_old_name(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a call take its ``endpoints`` as ``coord_zmq_addr``, too; the first such call of the process warns."""

    @functools.wraps(call)
    def renamed(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        if _OLD_NAME in options:
            if _log_once.should(_OLD_NAME):
                logger.warning("client.old_name coord_zmq_addr means etcd's endpoints here: write endpoints=host:port")
            renamed_options: Any = {("endpoints" if name == _OLD_NAME else name): options[name] for name in options}
            if len(renamed_options) < len(options):
                raise TypeError("give endpoints or coord_zmq_addr, not both")
            return call(*args, **renamed_options)
        return call(*args, **options)

    return renamed


def client_config(
    endpoints: str | Sequence[str],
    namespace: str,
    ttl_s: float,
    tls: RegistryTls | None,
    user: str | None,
    password: str | None,
) -> RegistryConfig:
    """Build the config of a client. Raise RuntimeError for endpoints that are not valid, else ConfigError."""
    try:
        parse_endpoints(endpoints)
    except ConfigError as error:
        # The clients that this one replaces raise RuntimeError for an address that is not valid, and name it.
        raise RuntimeError(str(error)) from error
    security = RegistrySecurity(tls=tls, user=user or "", password=password or "")
    return RegistryConfig(endpoints, namespace=namespace, ttl_s=ttl_s, security=security)


class RegistryClient(abc.ABC):
    """One thread with an event loop, one connection to etcd, and the registrar and watchers that run there."""

    def __init__(self, config: RegistryConfig, thread_name: str) -> None:
        self._config = config
        self._close_lock = threading.Lock()
        #: Whether ``close`` was called, and whether it has ended.
        self._is_closed = False
        self._has_ended = False
        self._watchers: tuple[Watcher | ApiKeyWatch, ...] = ()
        self._registrar: LeasedKey | None = None
        #: Receives the story of a suspect or lost lease, for ``omni doctor``; None: not kept.
        self._stories: Stories | None = None
        self._thread = LoopThread(thread_name)

    @abc.abstractmethod
    def _start_on_loop(self, kv: EtcdKV) -> None:
        """Start registrar and watchers; called on the loop."""

    def _open(self) -> None:
        """Open the connection, lazily: returns without any call to etcd."""
        try:
            self._thread.run(self._open_on_loop(), _OPEN_TIMEOUT_S)
        except BaseException:
            self._thread.close()
            raise

    def _connect(self) -> EtcdKV:
        config = self._config
        return EtcdKV(
            config.endpoints,
            security=config.security,
            try_timeout_s=config.try_timeout_s,
            call_timeout_s=config.call_timeout_s,
        )

    async def _open_on_loop(self) -> None:
        self._kv = self._connect()
        self._start_on_loop(self._kv)

    @property
    def lease_left_s(self) -> float:
        """How long the lease lasts if it is not renewed; 0 without one."""
        return 0.0 if self._registrar is None else self._registrar.lease_left_s

    @property
    def lease_id(self) -> int:
        """The lease of this client's key at this moment; 0 without one. May be read from any thread."""
        return 0 if self._registrar is None else self._registrar.lease_id

    def calls(self) -> ClientCalls:
        """The calls of this client's connection, for code on another event loop. They end when the client is closed."""

        def start(call: Callable[[KVCalls], Coroutine[Any, Any, _Result]]) -> concurrent.futures.Future[_Result]:
            self._check_open()
            return self._thread.start(call(self._kv))

        return ClientCalls(start)

    def keep_stories(self, stories: Stories) -> None:
        """Write the story of this client's lease to ``stories`` whenever the lease turns suspect or is lost."""
        self._stories = stories
        stories.cluster_id = lambda: self._kv.cluster_id

    def _on_lease_change(self, state: LeaseState) -> None:
        if self._stories is not None and self._registrar is not None and state in _FAILED:
            self._stories.write("lease", self._registrar.name, self._registrar.story_lines)

    def close(self) -> None:
        """Withdraw the record, wait a bounded time for etcd, end the thread. A second call raises RuntimeError."""
        if not self._close_once():
            raise RuntimeError("Client already closed")

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, if that has not happened yet."""
        self._close_once()

    def _close_once(self) -> bool:
        with self._close_lock:
            if self._is_closed:
                return False
            self._is_closed = True
        try:
            self._thread.run(self._close_on_loop(), self._config.close_timeout_s + 2.0)
        except (concurrent.futures.TimeoutError, RuntimeError) as error:
            logger.warning("client.close_incomplete thread=%s reason=%r", self._thread.name, error)
        self._thread.close()
        if self._stories is not None:
            self._stories.flush()
        self._has_ended = True
        return True

    async def _close_on_loop(self) -> None:
        # In reverse order of the start, but the record is withdrawn first.
        if self._registrar is not None:
            await self._registrar.close(self._config.close_timeout_s)
        await self._end_watches()
        await self._kv.close()

    async def _end_watches(self) -> None:
        for watcher in self._watchers:
            await watcher.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("Client already closed" if self._has_ended else "Client is closing")

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run on the loop, bounded. Raise RegistryUnavailableError past the bound."""
        if self._is_closed:
            work.close()
        self._check_open()
        try:
            return self._thread.run(work, self._config.call_timeout_s + self._config.try_timeout_s + 1.0)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            raise RegistryUnavailableError("etcd did not answer in time", may_have_run=True) from None
