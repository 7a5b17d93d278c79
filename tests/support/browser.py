"""Debian's Chromium without a window, driven by playwright. Absent on a workplace is a skip, in CI a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.binaries import absent

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM: Final = Path("/usr/bin/chromium")
#: Its sandbox can't be had as root; a page may play sound though nobody has clicked.
_FLAGS: Final = ("--no-sandbox", "--autoplay-policy=no-user-gesture-required", "--disable-dev-shm-usage")
#: Everything here waits for a condition, on a machine that may be slow.
LIMIT_MS: Final = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; skips the test, or fails in CI, where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        absent("playwright is not installed: make setup-test")
    if not os.access(CHROMIUM, os.X_OK):
        absent(f"{CHROMIUM} is not there: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, all that it has asked for, and what it has complained of."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.context: BrowserContext = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(LIMIT_MS)
        self.page: Page = self.context.new_page()
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def opened(self, url: str) -> Page:
        """The dashboard, once it shows the first snapshot."""
        self.page.goto(url)
        self.page.wait_for_selector("#graph svg")
        return self.page
