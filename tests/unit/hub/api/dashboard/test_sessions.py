"""A cookie opens what is read; to act, a page needs a second secret that no other port can see."""

from __future__ import annotations

import pytest

from hub.api.dashboard.sessions import MOST_SESSIONS, SESSION_S, BrowserSessions


@pytest.mark.attack("C28")
def test_a_cookie_alone_reads_and_acts_with_its_own_key_only() -> None:
    sessions = BrowserSessions()
    sessions.begin("cookie", "key", 0.0)
    sessions.begin("other", "its key", 0.0)
    assert sessions.may_read("cookie", 1.0)
    assert sessions.may_act("cookie", "key", 1.0)
    for key in ("", "its key", "cookie"):
        assert not sessions.may_act("cookie", key, 1.0)
    for cookie in ("", "key", "guessed"):
        assert not sessions.may_read(cookie, 1.0)
        assert not sessions.may_act(cookie, "key", 1.0)


def test_a_session_ends_after_its_time_and_by_a_log_out() -> None:
    sessions = BrowserSessions()
    sessions.begin("cookie", "key", 10.0)
    assert sessions.may_read("cookie", 10.0 + SESSION_S - 1)
    assert not sessions.may_read("cookie", 10.0 + SESSION_S)
    assert not sessions.may_read("cookie", 11.0), "an ended session does not come back"
    sessions.begin("second", "key", 0.0)
    sessions.end("second")
    sessions.end("unknown")
    assert not sessions.may_act("second", "key", 1.0)


def test_the_oldest_session_gives_way_and_no_secret_is_kept() -> None:
    sessions = BrowserSessions()
    for number in range(MOST_SESSIONS + 1):
        sessions.begin(f"cookie-{number}", f"key-{number}", 0.0)
    assert not sessions.may_read("cookie-0", 1.0)
    assert sessions.may_read("cookie-1", 1.0)
    assert "cookie" not in repr(vars(sessions))
