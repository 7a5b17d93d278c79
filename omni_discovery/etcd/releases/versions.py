"""The defects that each release of etcd is known to have, and the question to a server which release it is.

``known_bugs`` looks a release up in a table. ``ServerVersions`` asks each endpoint of a connection once it has
answered a call; ``VersionLog`` logs the answers, once for the process.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Final

import grpc
import msgspec

from omni_discovery.errors import RegistryError
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.auth import Tokens
from omni_discovery.etcd.channel import EndpointChannel, was_cancelled
from omni_discovery.etcd.config import RegistryTls
from omni_discovery.etcd.http import get_text
from omni_discovery.etcd.releases.advisories import SAFE_RELEASES, Version, advisories_text, open_advisories
from omni_discovery.log_once import LogOnce

logger = logging.getLogger(__name__)

_NUMBERS: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class KnownBug:
    """One defect of etcd. ``fixed_in`` has the first good release of each minor release that has one."""

    fixed_in: tuple[Version, ...]
    what: str
    #: How this project avoids harm by it; empty if it can't.
    workaround: str


KNOWN_BUGS: Final = (
    KnownBug(
        ((3, 5, 3),),
        "3.5.0 to 3.5.2 can lose writes when killed under load",
        "",
    ),
    KnownBug(
        ((3, 4, 24), (3, 5, 8)),
        "a watcher may be told the same event twice",
        "events are applied by key and revision, once",
    ),
    KnownBug(
        ((3, 4, 25), (3, 5, 8)),
        "progress replies may run ahead of the events",
        "freshness is proved by the hub's own beat on the same watch",
    ),
    KnownBug(
        ((3, 4, 31), (3, 5, 13)),
        "a leader that stalled may end leases that were renewed",
        "each replica watches its own key and puts it back",
    ),
    KnownBug(
        ((3, 4, 31), (3, 5, 13)),
        "a watch may lose events around a compaction",
        "the view is compared with the registry's count and revision",
    ),
    KnownBug(
        ((3, 4, 36), (3, 5, 18)),
        "a watch that opens on the compacted revision may miss a delete",
        "the view is compared again after each new watch",
    ),
    KnownBug(
        ((3, 4, 38), (3, 5, 22)),
        "a watch from a future revision may be told old events",
        "events of a revision that is applied already are ignored",
    ),
    KnownBug(
        ((3, 4, 38), (3, 5, 23)),
        "a renewal may be granted for a lease that has ended",
        "each replica watches its own key and puts it back",
    ),
)


def parse_version(text: str) -> Version | None:
    """The three numbers of ``3.5.23`` or ``3.6.0-rc.1``; None if there are none."""
    found = _NUMBERS.match(text.strip())
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def known_bugs(version: Version) -> tuple[KnownBug, ...]:
    """The bugs that this release has."""
    return tuple(bug for bug in KNOWN_BUGS if _has(version, bug))


def _has(version: Version, bug: KnownBug) -> bool:
    line = [fixed for fixed in bug.fixed_in if fixed[:2] == version[:2]]
    if line:
        return version < line[0]
    # A minor release without an entry: older ones were never fixed, newer ones began with the fix or without the bug.
    return version < min(bug.fixed_in) and len(bug.fixed_in) > 1


class _Release(msgspec.Struct):
    """The answer to GET /version."""

    etcdserver: str


class VersionLog:
    """Logs which releases of etcd answer and what is wrong with them, each once. EtcdKV has one for the process."""

    def __init__(self) -> None:
        #: By (endpoint, version), and by version alone.
        self._log_once = LogOnce()
        #: Endpoints of an etcd of our own, which no operator could bring up to date.
        self._embedded: set[str] = set()
        self._count_only = False

    def be_brief(self, *, embedded: str = "", count_only: bool = False) -> None:
        """Leave out the bugs of the ``embedded`` etcd; with ``count_only``, log of any other only how many it has.

        ``embedded`` is an endpoint or empty. With ``count_only`` another process of ours names them.
        """
        self._count_only = self._count_only or count_only
        if embedded:
            self._embedded.add(embedded)

    def log_version(self, endpoint: str, text: str, *, has_users: bool = False, has_tls: bool = False) -> None:
        """The server at ``endpoint`` answered that it is of release ``text``, such as ``3.5.23``.

        ``has_users``: we log in to it, so others are to be kept out of what is ours.
        """
        if not self._log_once.should((endpoint, text)):
            return
        is_new_release = self._log_once.should(text)
        logger.info("etcd.version endpoint=%s version=%s", endpoint, text)
        version = parse_version(text)
        if version is None or not is_new_release or endpoint in self._embedded:
            return
        if open_ones := open_advisories(version, has_users=has_users, has_tls=has_tls):
            names = "'omni doctor' names them" if self._count_only else advisories_text(open_ones)
            advice = f"this release has published weaknesses, run etcd {SAFE_RELEASES}"
            logger.warning("etcd.advisories version=%s count=%d: %s: %s", text, len(open_ones), advice, names)
        bugs = known_bugs(version)
        if not bugs:
            return
        if self._count_only:
            logger.info("etcd.known_bugs version=%s count=%d: 'omni doctor' names them", text, len(bugs))
            return
        names = "; ".join(f"{bug.what} ({bug.workaround or 'not for data that must last'})" for bug in bugs)
        logger.info("etcd.known_bugs version=%s count=%d: %s", text, len(bugs), names)


class ServerVersions:
    """The releases behind one connection's endpoints."""

    def __init__(
        self, tokens: Tokens, timeout_s: float, version_log: VersionLog, tls: RegistryTls | None, *, has_users: bool
    ) -> None:
        self._tokens = tokens
        self._tls = tls
        self._has_users = has_users
        self._timeout_s = timeout_s
        self._version_log = version_log
        #: Release by endpoint, such as ``3.5.23``; empty where the server does not say.
        self.versions: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask_version(self, channel: EndpointChannel) -> None:
        """The server behind ``channel`` has just answered: ask once for its release. Returns at once."""
        if channel.endpoint not in self.versions:
            self.versions[channel.endpoint] = ""
            task = asyncio.create_task(self._ask(channel), name=f"etcd-version-{channel.endpoint}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel the questions that are not answered yet. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def _ask(self, channel: EndpointChannel) -> None:
        try:
            metadata = await self._tokens.metadata(channel)
            answer = await channel.maintenance.Status(rpc.StatusRequest(), timeout=self._timeout_s, metadata=metadata)
            version = str(answer.version)
        except (grpc.RpcError, RegistryError) as error:
            # Newer servers answer this to administrators only, and to everybody in HTTP.
            logger.debug("etcd.version_refused endpoint=%s reason=%r", channel.endpoint, error)
            version = await self._ask_in_http(channel.endpoint)
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            return
        if version:
            self.versions[channel.endpoint] = version
            has_tls = self._tls is not None
            self._version_log.log_version(channel.endpoint, version, has_users=self._has_users, has_tls=has_tls)

    async def _ask_in_http(self, endpoint: str) -> str:
        try:
            text = await asyncio.to_thread(get_text, endpoint, "/version", tls=self._tls, timeout_s=self._timeout_s)
            return msgspec.json.decode(text, type=_Release).etcdserver
        except (OSError, msgspec.DecodeError) as error:
            logger.debug("etcd.version_unknown endpoint=%s reason=%r", endpoint, error)
            return ""
