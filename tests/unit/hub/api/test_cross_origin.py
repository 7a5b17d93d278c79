"""Which hosts and origins are answered."""

from __future__ import annotations

import pytest

from hub.api.cross_origin import web_policy

LOOPBACK = web_policy("127.0.0.1", (), ())


@pytest.mark.attack("A30")
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST.",
        "a.localhost:1",
        "127.0.0.1:80",
        "127.9.9.9",
        "[::1]:8000",
        "10.1.2.3",
    ],
)
def test_a_hub_on_loopback_answers_to_addresses_and_to_localhost(host: str) -> None:
    """An address can't be made to lead elsewhere: who sends it means that address."""
    assert LOOPBACK.refusal("GET", host, None) == ""


@pytest.mark.attack("A30")
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "a b",
        "@localhost",
    ],
)
def test_it_answers_to_no_name_that_a_stranger_may_own(host: str) -> None:
    assert "--allowed-hosts" in LOOPBACK.refusal("GET", host, None)


def test_names_can_be_allowed_and_a_hub_for_others_answers_to_all_unless_told() -> None:
    named = web_policy("127.0.0.1", ("Hub.example",), ())
    assert not named.refusal("GET", "hub.example:80", None)
    assert named.refusal("GET", "other.example", None)
    assert not web_policy("127.0.0.1", ("*",), ()).refusal("GET", "other.example", None)
    assert not web_policy("0.0.0.0", (), ()).refusal("GET", "other.example", None)
    assert web_policy("0.0.0.0", ("hub.example",), ()).refusal("GET", "other.example", None)
    # HTTP/1.0 has none, and no browser speaks it.
    assert not LOOPBACK.refusal("GET", None, None)


@pytest.mark.attack("A30", "A9")
@pytest.mark.parametrize(
    ("method", "origin", "is_refused"),
    [
        ("POST", None, False),
        ("POST", "https://evil.example", True),
        ("PUT", "https://evil.example", True),
        ("", "https://evil.example", True),
        ("GET", "https://evil.example", False),
        ("OPTIONS", "https://evil.example", False),
        ("POST", "null", True),
        ("POST", "http://localhost:8000", False),
        ("POST", "https://localhost:8000", False),
        ("POST", "http://localhost:9000", True),
        ("POST", "https://good.example", False),
        ("POST", "HTTPS://GOOD.example", False),
        ("POST", "https://good.example.evil.example", True),
        ("", "https://good.example", False),
    ],
)
def test_only_pages_of_this_hub_and_of_allowed_origins_may_send(
    method: str, origin: str | None, is_refused: bool
) -> None:
    """A WebSocket has no method. Without an Origin it is no page."""
    policy = web_policy("127.0.0.1", (), ("https://good.example/",))
    assert bool(policy.refusal(method, "localhost:8000", origin)) == is_refused


def test_all_origins_can_be_allowed() -> None:
    assert not web_policy("127.0.0.1", (), ("*",)).refusal("POST", "localhost", "null")
