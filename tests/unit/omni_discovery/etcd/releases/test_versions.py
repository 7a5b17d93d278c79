"""Which release of etcd has which known bugs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from omni_discovery.etcd.releases.versions import KNOWN_BUGS, VersionLog, known_bugs, parse_version


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What is logged of bugs."""
    caplog.set_level(logging.INFO)
    return lambda: [told for each in caplog.records if "known_bugs" in (told := each.getMessage())]


def test_bugs_are_named_by_one_process_counted_by_others_and_left_out_for_an_etcd_of_ours(
    said: Callable[[], list[str]],
) -> None:
    versions = VersionLog()
    versions.be_brief(embedded="127.0.0.1:7")
    versions.log_version("127.0.0.1:7", "3.5.1")
    assert said() == []
    versions.log_version("etcd-1:2379", "3.5.2")
    assert "can lose writes" in said()[0]
    versions.be_brief(count_only=True)
    versions.log_version("etcd-1:2379", "3.5.3")
    assert said()[1] == "etcd.known_bugs version=3.5.3 count=7: 'omni doctor' names them"


def test_weaknesses_are_warned_of_where_users_are_asked_for_and_counted_by_other_processes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Never for an etcd of our own, nor for one that asks for nobody."""
    caplog.set_level(logging.WARNING)
    versions = VersionLog()
    versions.be_brief(embedded="unix:///a")
    versions.log_version("unix:///a", "3.5.1", has_users=True)
    versions.log_version("etcd-1:2379", "3.5.23")
    assert caplog.messages == []
    versions.log_version("etcd-1:2379", "3.5.30", has_users=True)
    versions.log_version("etcd-2:2379", "3.5.30", has_users=True)
    versions.log_version("etcd-2:2379", "3.6.14", has_users=True, has_tls=True)
    (told,) = caplog.messages
    assert told.startswith("etcd.advisories version=3.5.30 count=2: ")
    assert "run etcd 3.6.14 or newer" in told
    assert "CVE-2026-73499" in told
    versions.be_brief(count_only=True)
    versions.log_version("etcd-1:2379", "3.5.29", has_users=True)
    assert caplog.messages[1].endswith("count=3: this release has published weaknesses, run etcd 3.6.14 or newer, or "
                                       "3.7.1 or newer: 'omni doctor' names them")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "version"),
    [("3.4.23", (3, 4, 23)), ("3.6.0-rc.1", (3, 6, 0)), ("3.5.23+dfsg", (3, 5, 23)), ("", None), ("unknown", None)],
)
def test_a_version_is_read_from_what_servers_say(text: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("version", "count"),
    [((3, 4, 23), 7), ((3, 4, 24), 6), ((3, 4, 38), 0), ((3, 5, 1), 8), ((3, 5, 3), 7), ((3, 5, 22), 1)],
)
def test_a_release_has_the_bugs_that_it_came_before_the_fix_of(version: tuple[int, int, int], count: int) -> None:
    assert len(known_bugs(version)) == count


@pytest.mark.parametrize("version", [(3, 5, 23), (3, 6, 0), (4, 0, 0)])
def test_current_releases_have_none(version: tuple[int, int, int]) -> None:
    assert known_bugs(version) == ()


def test_releases_that_were_never_mended_have_all_that_their_line_had() -> None:
    assert len(known_bugs((3, 3, 10))) == 7


def test_every_bug_but_one_has_a_workaround_and_that_one_is_about_stored_data() -> None:
    (bare,) = (bug for bug in KNOWN_BUGS if not bug.workaround)
    assert "lose writes" in bare.what
