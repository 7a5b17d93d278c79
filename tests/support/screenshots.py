"""``python -m tests.support.screenshots``: the pictures of the dashboard in the docs, from a hub at work.

It needs Debian's chromium. The hub has text, pictures and sound; one replica is cordoned and one was killed.
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from PIL import Image

from tests.support.browser import Watched, chromium
from tests.support.dashboard import ROOT, DashboardHub
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Page

FOLDER: Final = ROOT / "docs" / "images"
_COLOURS: Final = 96
_CLIENTS: Final = 3
#: How long rates are let settle.
_SETTLE_MS: Final = 6000


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        hub = DashboardHub(Path(folder))
        stopping = threading.Event()
        try:
            hub.wait_ready()
            clients = [threading.Thread(target=_ask, args=(hub, stopping), daemon=True) for _ in range(_CLIENTS)]
            for client in clients:
                client.start()
            _act(hub)
            for name, options in _PICTURES.items():
                with Watched(browser, **options) as watched:
                    page = watched.opened(hub.link)
                    if name == "light":
                        _try(page)
                    page.wait_for_timeout(_SETTLE_MS)
                    _write(FOLDER / f"dashboard-{name}.png", page.screenshot(full_page=name == "light"))
                    if name == "light":
                        _open_lost(page)
                        _write(FOLDER / "dashboard-request.png", page.locator("#way-dialog").screenshot())
        finally:
            stopping.set()
            hub.stop()


_PICTURES: Final[dict[str, dict[str, Any]]] = {
    "light": {"viewport": {"width": 1200, "height": 900}},
    "dark": {"viewport": {"width": 1200, "height": 860}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 1180}, "is_mobile": True, "device_scale_factor": 1.5},
}


def _ask(hub: DashboardHub, stopping: threading.Event) -> None:
    number = 0
    while not stopping.is_set():
        number += 1
        text = "kaputt" if number == 3 else "one two three four"
        hub.hub.ask(text, modalities=["text", "image", "audio"])


def _act(hub: DashboardHub) -> None:
    """Cordon one replica and kill another."""
    records = {(each["stage_id"], each["replica_id"]): each for each in hub.hub.replicas()}
    with hub.client() as http:
        epoch = records[1, 1]["epoch"]
        assert http.post("replicas/1/1/cordon", json={"epoch": epoch}).status_code == 200
    os.kill(records[0, 1]["pid"], signal.SIGKILL)
    wait_for("the loss", lambda: "replica.session_down" in hub.hub.text)


def _try(page: Page) -> None:
    page.fill("#prompt", "to be or not to be")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_text("all of it after").wait_for()


def _open_lost(page: Page) -> None:
    """Open a request that was at the replica which was killed, if one is shown, else the first."""
    lost = page.locator("#slow-list button", has_text="0/1, 0/")
    (lost if lost.count() else page.locator("#slow-list button")).first.click()
    page.locator(".waterfall li").first.wait_for()


def _write(path: Path, png: bytes) -> None:
    """Write a picture with few colours, which makes it small."""
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB")  # noqa: T201


if __name__ == "__main__":
    main()
