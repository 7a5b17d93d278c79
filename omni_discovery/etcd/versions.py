"""What the releases of etcd are known to do wrong, and what here makes that harmless. Pure: a table and a look-up.

Asks each endpoint, once a connection has come to use it, which release of etcd it is, and says what that means.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import Final

import grpc

from omni_discovery.errors import RegistryError
from omni_discovery.etcd._rpc import rpc
from omni_discovery.etcd.auth import Tokens
from omni_discovery.etcd.channel import Line, was_cancelled

logger = logging.getLogger(__name__)

#: (major, minor, patch)
Version = tuple[int, int, int]

_NUMBERS: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class KnownBug:
    """One defect of the server. ``fixed_in`` names the first good release of each line that has one."""

    fixed_in: tuple[Version, ...]
    what: str
    #: What of ours keeps it from doing harm; empty where nothing can.
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
    # A line without an entry: older ones were never mended; newer ones began with the fix, or never had the bug.
    return version < min(bug.fixed_in) and len(bug.fixed_in) > 1


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
