"""The flags for what clients may do."""

from __future__ import annotations

import argparse

import pytest

from hub.api.connections import ConnectionLimits
from hub.api.cross_origin import WebPolicy
from hub.api.server import HttpConfig
from hub.cli import check_flags
from hub.command import ServeCommand
from hub.config import ClientBounds, HubConfig
from hub.serve.clients.flags import client_bounds, http_config
from hub.serve.flags import hub_config
from omni_discovery.errors import ConfigError, InvalidRequestError

NUMBERS = (
    *("--header-timeout", "--body-timeout", "--send-timeout", "--stream-idle-timeout", "--max-timeout"),
    *("--max-connections", "--max-unfinished-bytes", "--max-held-bytes"),
    *("--max-requests-per-client", "--stream-headers-wait"),
)


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    arguments = parser.parse_args(["model", *flags])
    check_flags(arguments)
    return arguments


def test_what_is_not_given_is_as_the_help_says_it_is() -> None:
    http, bounds = http_config(parse(), "0.0.0.0", 1_000_000), client_bounds(parse())
    assert (http, bounds) == (HttpConfig(), ClientBounds())
    assert hub_config(parse()) == HubConfig()
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    text = " ".join(parser.format_help().split())
    limits = http.limits
    seconds = (limits.header_timeout_s, limits.body_timeout_s, limits.send_timeout_s)
    for value in (*seconds, limits.max_unfinished_bytes, limits.max_held_bytes):
        assert f"(default: {value:.0f})" in text
    assert f"(default: {limits.max_connections}, or half" in text
    assert f"(default: {bounds.max_timeout_s:.0f}, or" in text
    assert f"(default: {bounds.least_priority}:{bounds.most_priority}," in text
    assert f"(default: {HubConfig().stream_idle_timeout_s:.0f})" in text


def test_each_flag_sets_its_value() -> None:
    flags = [word for number, flag in enumerate(NUMBERS, 11) for word in (flag, str(number))]
    arguments = parse(*flags, "--request-timeout", "5", "--priority-range=-5:7")
    http = http_config(arguments, "127.0.0.1", 1000)
    assert http.limits == ConnectionLimits(11, 12, 13, 16, 17, 18)
    assert http.most_per_client == 19
    assert hub_config(arguments).stream_idle_timeout_s == 14
    assert hub_config(arguments).client_bounds == ClientBounds(15, -5, 7)


def test_the_longest_timeout_is_never_less_than_the_usual_one() -> None:
    assert client_bounds(parse("--request-timeout", "7200")).max_timeout_s == 7200
    with pytest.raises(ConfigError, match=r"--max-timeout \(5\) is less than --request-timeout \(10\)"):
        parse("--request-timeout", "10", "--max-timeout", "5")


def test_connections_leave_half_of_the_descriptors_unless_told() -> None:
    assert http_config(parse(), "127.0.0.1", 1024).limits.max_connections == 512
    assert http_config(parse("--max-connections", "9000"), "127.0.0.1", 1024).limits.max_connections == 9000


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ((), WebPolicy(())),
        (("--allowed-hosts", "*"), WebPolicy(None)),
        (("--allowed-hosts", "Hub.example, other.example"), WebPolicy(("hub.example", "other.example"))),
        (("--allowed-hosts", "[::1]"), WebPolicy(("[::1]",))),
        (("--allowed-origins", "https://a.example,http://b"), WebPolicy((), ("https://a.example", "http://b"))),
        (("--allowed-origins", '["https://a.example", "*"]'), WebPolicy((), ("https://a.example", "*"))),
    ],
)
def test_names_are_separated_by_commas_or_a_json_list_as_vllm_has_it(flags: tuple[str, ...], policy: WebPolicy) -> None:
    assert http_config(parse(*flags), "127.0.0.1", 1024).policy == policy


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        *(((flag, value), f"{flag} is {value}; it must be more than 0") for flag in NUMBERS for value in ("0", "-1")),
        (("--header-timeout", "inf"), "--header-timeout"),
        (("--priority-range", "5"), "LOW:HIGH"),
        (("--priority-range", "5:1"), "LOW:HIGH"),
        (("--priority-range", "0:9999999"), "from -1000000 to 1000000"),
        (("--allowed-origins", "good.example"), "an origin is like https://chat.example"),
        (("--allowed-origins", "https://*.example"), "an origin is like"),
        (("--allowed-origins", "[1]"), "no list of names"),
        (("--allowed-hosts", "http://a"), "without a port"),
        (("--allowed-hosts", "a:80"), "without a port"),
        (("--allowed-hosts", "*.example"), "without a port"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_flag(flags: tuple[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(*flags)


@pytest.mark.parametrize(
    "flags", [*((flag, "5") for flag in NUMBERS), ("--priority-range", "0:1"), ("--allowed-hosts", "a")]
)
def test_headless_has_no_clients(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]} is a hub's"):
        parse("--headless", "--stage-id", "0", "--etcd-endpoints", "127.0.0.1:1", *flags)


@pytest.mark.attack("A9", "A17")
def test_what_a_client_may_not_ask_for_is_refused_with_the_range() -> None:
    bounds = ClientBounds(10.0, -5, 5)
    for timeout_s, priority in ((None, -5), (10.0, 5)):
        bounds.check_asked(timeout_s, priority)
    with pytest.raises(InvalidRequestError, match=r"'timeout' is 10\.5 s; this hub allows at most 10"):
        bounds.check_asked(10.5, 0)
    for priority in (-6, 6):
        with pytest.raises(InvalidRequestError, match=f"'priority' is {priority}; this hub allows -5 to 5"):
            bounds.check_asked(None, priority)
