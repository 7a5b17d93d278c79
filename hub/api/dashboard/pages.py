"""The files of the dashboard's page, and the headers that keep a browser from running or fetching anything else."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: Texts of records are shown as text: whatever a page holds, the browser runs its own modules alone, and asks this port
#: alone. A script that would put HTML into the page is stopped by trusted-types.
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


def load_pages() -> dict[str, Response]:
    """An answer for each file, by its name; the page itself is the empty name."""
    found: dict[str, Response] = {}
    for file in resources.files("hub.api.dashboard").joinpath("static").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = Response(file.read_bytes(), headers={**HEADERS, "Content-Type": kind})
    found[""] = found.pop("index.html")
    return found
