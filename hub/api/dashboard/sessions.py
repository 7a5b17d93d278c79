"""BrowserSessions: who has logged in, by a random name in a cookie, and what a page needs to act. Pure.

A cookie goes to every port of a host: a server of another user at another port of this machine may be sent it. So it
opens what is read, and no more. To act, a page also sends a second secret, which the answer to its log-in gave to that
page alone.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from omni_discovery.records.api_key import digest_of

#: How long a session lasts, and how many there are at most: the oldest gives way.
SESSION_S: Final = 12 * 3600.0
MOST_SESSIONS: Final = 64


@dataclass(frozen=True, slots=True)
class _BrowserSession:
    """One session; of its two secrets only hashes are kept."""

    digest: bytes
    key_digest: bytes
    ends_at_s: float


class BrowserSessions:
    """Moments are monotonic."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _BrowserSession] = OrderedDict()

    def __repr__(self) -> str:
        return f"BrowserSessions({len(self._kept)})"

    def begin(self, cookie: str, action_key: str, now_s: float) -> None:
        """Begin a session with these two new secrets."""
        kept = _BrowserSession(digest_of(cookie), digest_of(action_key), now_s + SESSION_S)
        self._kept[kept.digest] = kept
        while len(self._kept) > MOST_SESSIONS:
            self._kept.popitem(last=False)

    def end(self, cookie: str) -> None:
        """End a session. Does nothing for an unknown one."""
        self._kept.pop(digest_of(cookie), None)

    def may_read(self, cookie: str, now_s: float) -> bool:
        """Whether a cookie is that of a session."""
        return self._find(cookie, now_s) is not None

    def may_act(self, cookie: str, action_key: str, now_s: float) -> bool:
        """Whether it is, and the page behind it has the session's other secret."""
        kept = self._find(cookie, now_s)
        return kept is not None and hmac.compare_digest(kept.key_digest, digest_of(action_key))

    def _find(self, cookie: str, now_s: float) -> _BrowserSession | None:
        # Found by its hash: the time that takes tells nothing of the cookie.
        kept = self._kept.get(digest_of(cookie)) if cookie else None
        if kept is not None and now_s >= kept.ends_at_s:
            del self._kept[kept.digest]
            return None
        return kept
