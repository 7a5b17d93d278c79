"""Names by which a request may mean this host: a page's own name, led here by DNS, is none of them."""

from __future__ import annotations

import pytest

from hub.api.door.hosts import comes_from_elsewhere, means_this_host

NAMES = ("gpu-7.example", "Admin-Host")


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9000", "localhost", "[::1]:9000", "10.1.2.3", "GPU-7.example:1", "admin-host.", "gpu-7.example"]
)
def test_addresses_localhost_and_given_names_are_this_host(host: str) -> None:
    assert means_this_host([(b"host", host.encode())], NAMES)
    assert means_this_host([(b"Host", host.encode()), (b"Origin", b"http://" + host.encode())], NAMES)


@pytest.mark.attack("A10")
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", b"evil.example")],
        [(b"host", b"evil.example:9000")],
        [(b"host", b"localhost.evil.example")],
        [(b"host", b"127.0.0.1.evil.example")],
        [(b"host", b"127.0.0.1"), (b"host", b"evil.example")],
        [(b"host", b"")],
        [(b"host", b"[::1")],
        [(b"host", b"127.0.0.1:9000"), (b"origin", b"https://evil.example")],
        [(b"host", b"127.0.0.1:9000"), (b"origin", b"http://127.0.0.1:8000")],
        [(b"host", b"127.0.0.1:9000"), (b"origin", b"null")],
        [(b"host", b"127.0.0.1:9000"), (b"origin", b"http://[")],
    ],
)
def test_any_other_name_and_a_page_of_another_origin_is_not(headers: list[tuple[bytes, bytes]]) -> None:
    assert not means_this_host(headers, NAMES)


@pytest.mark.attack("O7")
@pytest.mark.parametrize(
    ("site", "is_elsewhere"),
    [(b"cross-site", True), (b"Same-Site", True), (b"", True), (b"same-origin", False), (b"none", False)],
)
def test_a_browser_says_that_another_origins_page_asks_and_a_program_says_nothing(
    site: bytes, is_elsewhere: bool
) -> None:
    """A page at another port of the same host is of the same site, and of another origin."""
    assert comes_from_elsewhere([(b"host", b"localhost"), (b"sec-fetch-site", site)]) is is_elsewhere
    assert not comes_from_elsewhere([(b"host", b"localhost"), (b"sec-fetch-mode", b"navigate")])
