"""Endpoints and times are checked at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import (
    RegistryConfig,
    RegistrySecurity,
    RegistryTls,
    parse_endpoints,
    scheme_of,
    socket_path,
    url_of,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("etcd:2379", ("etcd:2379",)),
        ("http://etcd-0.etcd.svc:2379/", ("etcd-0.etcd.svc:2379",)),
        (" a:1 , b:2,, a:1", ("a:1", "b:2")),
        (["a:1", "b:2,c:3"], ("a:1", "b:2", "c:3")),
        ("[fd00::5]:2379", ("[fd00::5]:2379",)),
        ("10.0.0.1:02379", ("10.0.0.1:2379",)),
        ("unix:///run/omni/etcd:2379", ("unix:///run/omni/etcd:2379",)),
        ("unix:///a, etcd:1", ("unix:///a", "etcd:1")),
    ],
)
def test_endpoints_are_read_as_people_write_them(given: str | Sequence[str], expected: tuple[str, ...]) -> None:
    assert parse_endpoints(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        "", [], " , ", "etcd", "etcd:", ":2379", "etcd:port", "etcd:0", "etcd:65536", "fd00::5:2379", "[fd00::5]",
        "[nonsense]:1", "http://", "https://etcd", "a b:1", "etcd:2379/path", "unix:/run/etcd", "-x:1", "etcd:²",
    ],
)  # fmt: skip
def test_what_is_no_endpoint_is_refused_and_told_what_would_be_one(given: str | Sequence[str]) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_endpoints(given)


@pytest.mark.parametrize("given", ["unix://run/etcd", "unix://", "unix:///", "unix:///run/", "unix:///a\nb"])
def test_a_socket_without_its_whole_path_is_refused_and_shown_one(given: str) -> None:
    with pytest.raises(ConfigError, match="unix:///run/x"):
        parse_endpoints(given)


def test_a_path_that_no_socket_may_have_is_refused() -> None:
    assert parse_endpoints(f"unix:///{'x' * 106}")
    with pytest.raises(ConfigError, match="107 bytes"):
        parse_endpoints(f"unix:///{'x' * 107}")


def test_a_socket_has_no_scheme_but_its_own_and_no_tls() -> None:
    assert scheme_of("unix:///a,http://etcd:1") == "http"
    assert (socket_path("unix:///a"), socket_path("etcd:1")) == ("/a", "")
    assert (url_of("unix:///a", "https"), url_of("etcd:1", "https"), url_of("etcd:1", "")) == (
        "unix:///a",
        "https://etcd:1",
        "etcd:1",
    )
    for tls, endpoints in ((RegistryTls(), "unix:///a"), (None, "unix:///a,https://etcd:1")):
        with pytest.raises(ConfigError, match="has no TLS"):
            RegistrySecurity(tls=tls).for_endpoints(endpoints)


def test_endpoints_that_are_not_text_are_refused() -> None:
    with pytest.raises(ConfigError):
        parse_endpoints([2379])  # type: ignore[list-item]


def test_a_config_holds_its_endpoints_apart_and_three_attempts_fit_into_one_ttl() -> None:
    config = RegistryConfig("a:1,b:2", ttl_s=2.0)
    assert config.endpoints == ("a:1", "b:2")
    assert 3 * config.try_timeout_s <= config.ttl_s
    assert config.try_timeout_s <= config.call_timeout_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": 0.5},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"ttl_s": 2.0, "load_interval_s": 3.0},
        {"load_interval_s": 0.0},
        {"close_timeout_s": 0.0},
        {"namespace": "a/b"},
        {"namespace": ""},
        {"endpoints": "nonsense"},
    ],
)
def test_values_that_can_not_work_together_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RegistryConfig(**{"endpoints": "etcd:2379", **wrong})
