"""Published weaknesses of etcd by which a user with a login, or anybody who reaches it, gets more than is granted.

They matter where several parties share an etcd. The numbers are those of the advisories, as published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: (major, minor, patch)
Version = tuple[int, int, int]

#: The oldest releases behind everything in the table, for people.
SAFE_RELEASES: Final = "3.6.14 or newer, or 3.7.1 or newer"


@dataclass(frozen=True, slots=True)
class Advisory:
    """One weakness. ``fixed_in`` has the first good release of each minor release that has one."""

    name: str
    #: What an attacker can do.
    what: str
    fixed_in: tuple[Version, ...]
    #: Whether it opens what users and roles close; otherwise it is about the TLS port.
    breaks_roles: bool = True

    def is_open_in(self, version: Version) -> bool:
        """Whether a release has it. A minor release without a fix of its own has it if it is older than those with."""
        line = [fixed for fixed in self.fixed_in if fixed[:2] == version[:2]]
        return version < (line[0] if line else min(self.fixed_in))


NESTED: Final = Advisory(
    "GHSA-rfx7-8w68-q57q (CVE-2026-33343)",
    "a transaction inside a transaction reads and writes every key",
    ((3, 4, 42), (3, 5, 28), (3, 6, 9)),
)
UNCHECKED_CALLS: Final = Advisory(
    "GHSA-q8m4-xhhv-38mg (CVE-2026-33413)",
    "everybody may raise alarms, compact the history and use others' leases",
    ((3, 4, 42), (3, 5, 28), (3, 6, 9)),
)
PREVIOUS_VALUES: Final = Advisory(
    "GHSA-x35m-3gp4-4fh5 (CVE-2026-44283)",
    "a put inside a transaction returns values that its user may not read, and takes others' leases",
    ((3, 4, 44), (3, 5, 30), (3, 6, 11)),
)
OPEN_WATCH: Final = Advisory(
    "GHSA-xg4h-6gfc-h4m8 (CVE-2026-73499)",
    "a watch without an end sees every key behind one that its user may read",
    ((3, 5, 33), (3, 6, 14), (3, 7, 1)),
)
FULL_STORE: Final = Advisory(
    # The pull request that closes it in 3.5, open in September 2026; it says that 3.6 and later never had it.
    "etcd-io/etcd#22386",
    "once the store is full, everybody may delete keys and turn authentication off",
    ((3, 6, 0),),
)
HALF_HANDSHAKES: Final = Advisory(
    "GHSA-6vch-q96h-7gc3 (CVE-2026-73500)",
    "connections that never finish their TLS handshake take up memory until none is left",
    ((3, 5, 33), (3, 6, 14), (3, 7, 1)),
    breaks_roles=False,
)

ADVISORIES: Final = (NESTED, UNCHECKED_CALLS, PREVIOUS_VALUES, OPEN_WATCH, FULL_STORE, HALF_HANDSHAKES)


def open_advisories(version: Version, *, has_users: bool, has_tls: bool) -> tuple[Advisory, ...]:
    """The weaknesses of a release that matter where it asks for users, or speaks TLS."""
    return tuple(
        each for each in ADVISORIES if (has_users if each.breaks_roles else has_tls) and each.is_open_in(version)
    )


def advisories_text(found: tuple[Advisory, ...]) -> str:
    """The weaknesses on one line."""
    return "; ".join(f"{each.what} [{each.name}]" for each in found)
