"""Which release of etcd has which published weakness."""

from __future__ import annotations

import pytest

from omni_discovery.etcd.releases.advisories import (
    ADVISORIES,
    FULL_STORE,
    HALF_HANDSHAKES,
    NESTED,
    OPEN_WATCH,
    PREVIOUS_VALUES,
    UNCHECKED_CALLS,
    Advisory,
    Version,
    advisories_text,
    open_advisories,
)

#: The last release with each weakness and the first without it, of each line.
BORDERS = [
    (NESTED, (3, 4, 41), (3, 4, 42)),
    (NESTED, (3, 5, 27), (3, 5, 28)),
    (NESTED, (3, 6, 8), (3, 6, 9)),
    (UNCHECKED_CALLS, (3, 6, 8), (3, 6, 9)),
    (PREVIOUS_VALUES, (3, 4, 43), (3, 4, 44)),
    (PREVIOUS_VALUES, (3, 5, 29), (3, 5, 30)),
    (PREVIOUS_VALUES, (3, 6, 10), (3, 6, 11)),
    (OPEN_WATCH, (3, 5, 32), (3, 5, 33)),
    (OPEN_WATCH, (3, 6, 13), (3, 6, 14)),
    (OPEN_WATCH, (3, 7, 0), (3, 7, 1)),
    (FULL_STORE, (3, 5, 34), (3, 6, 0)),
]


@pytest.mark.parametrize(("advisory", "last", "first"), BORDERS)
def test_a_weakness_ends_with_the_release_that_mends_it(advisory: Advisory, last: Version, first: Version) -> None:
    assert advisory.is_open_in(last)
    assert not advisory.is_open_in(first)


def test_a_line_that_was_never_mended_stays_open_and_one_that_began_later_is_not() -> None:
    assert OPEN_WATCH.is_open_in((3, 4, 99))
    assert not NESTED.is_open_in((3, 7, 0))
    assert all(advisory.is_open_in((3, 3, 27)) for advisory in ADVISORIES)


@pytest.mark.parametrize("version", [(3, 6, 14), (3, 6, 16), (3, 7, 1), (4, 0, 0)])
def test_the_recommended_releases_have_none(version: Version) -> None:
    assert open_advisories(version, has_users=True, has_tls=True) == ()


def test_only_what_matters_is_told() -> None:
    """What breaks roles matters where there are users, what takes memory by TLS where there is TLS."""
    assert open_advisories((3, 5, 1), has_users=False, has_tls=False) == ()
    assert open_advisories((3, 5, 1), has_users=False, has_tls=True) == (HALF_HANDSHAKES,)
    found = open_advisories((3, 5, 31), has_users=True, has_tls=False)
    assert found == (OPEN_WATCH, FULL_STORE)
    assert "; " in advisories_text(found)
    assert "[GHSA-xg4h-6gfc-h4m8 (CVE-2026-73499)]" in advisories_text(found)
