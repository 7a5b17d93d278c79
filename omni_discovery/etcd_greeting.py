"""Asks each endpoint, once a connection has come to use it, which release of etcd it is, and says what that means."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import grpc

from omni_discovery._etcd_messages import rpc
from omni_discovery.errors import RegistryError
from omni_discovery.etcd_auth import Tokens
from omni_discovery.etcd_channel import Line, was_cancelled
from omni_discovery.etcd_versions import known_bugs, parse_version

logger = logging.getLogger(__name__)

#: Releases that this process has spoken of: several connections meet the same servers, and once is enough.
_spoken_of: set[tuple[str, str]] = set()


@dataclass(slots=True)
class _Manners:
    """How much this process says of bugs."""

    #: Endpoints of an etcd of our own, which nobody could bring up to date.
    embedded: set[str] = field(default_factory=set)
    #: Whether another process says at length what the bugs are.
    count_only: bool = False


_manners = _Manners()


def be_brief(*, embedded: str = "", count_only: bool = False) -> None:
    """Say nothing of the bugs of the ``embedded`` etcd; with ``count_only``, of any other no more than their number."""
    _manners.count_only = _manners.count_only or count_only
    if embedded:
        _manners.embedded.add(embedded)


class Greetings:
    """The releases behind one connection's endpoints."""

    def __init__(self, tokens: Tokens, timeout_s: float) -> None:
        self._tokens = tokens
        self._timeout_s = timeout_s
        #: What each endpoint says of itself; empty where it would not say.
        self.versions: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def meet(self, line: Line) -> None:
        """``line`` has just answered. Returns at once."""
        if line.endpoint not in self.versions:
            self.versions[line.endpoint] = ""
            task = asyncio.create_task(self._ask(line), name=f"etcd-version-{line.endpoint}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()

    async def _ask(self, line: Line) -> None:
        try:
            metadata = await self._tokens.metadata(line)
            answer = await line.maintenance.Status(rpc.StatusRequest(), timeout=self._timeout_s, metadata=metadata)
        except (grpc.RpcError, RegistryError) as error:
            # Newer servers tell it to administrators only.
            logger.debug("etcd.version_unknown endpoint=%s reason=%r", line.endpoint, error)
            return
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            return
        self.versions[line.endpoint] = str(answer.version)
        _speak_of(line.endpoint, str(answer.version))


def _speak_of(endpoint: str, text: str) -> None:
    if (endpoint, text) in _spoken_of:
        return
    is_new_release = all(text != known for _, known in _spoken_of)
    _spoken_of.add((endpoint, text))
    logger.info("etcd.version endpoint=%s version=%s", endpoint, text)
    version = parse_version(text)
    bugs = known_bugs(version) if version else ()
    if not bugs or not is_new_release or endpoint in _manners.embedded:
        return
    if _manners.count_only:
        logger.info("etcd.known_bugs version=%s count=%d: 'omni doctor' names them", text, len(bugs))
        return
    said = "; ".join(f"{bug.what} ({bug.workaround or 'not for data that must last'})" for bug in bugs)
    logger.info("etcd.known_bugs version=%s count=%d: %s", text, len(bugs), said)
