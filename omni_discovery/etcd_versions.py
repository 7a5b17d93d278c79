"""What the releases of etcd are known to do wrong, and what here makes that harmless. Pure: a table and a look-up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

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
