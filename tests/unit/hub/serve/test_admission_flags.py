"""The flags that bound what a hub takes in."""

from __future__ import annotations

import argparse

import pytest

from hub.cli import check_flags
from hub.command import ServeCommand
from hub.config import HubConfig
from hub.serve.flags import hub_config
from omni_discovery.errors import ConfigError

FLAGS = ("--max-waiting", "--max-in-flight", "--request-timeout", "--pick-timeout")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser.parse_args(["model", *flags])


def test_what_is_not_given_is_as_the_help_says_it_is() -> None:
    config = HubConfig()
    assert hub_config(parse()) == config
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    text = parser.format_help()
    for value in (config.max_waiting, config.max_in_flight, config.request_timeout_s, config.pick_timeout_s):
        assert f"(default: {value:g})" in text


def test_each_flag_sets_its_bound() -> None:
    flags = ("--max-waiting", "16", "--max-in-flight", "32", "--request-timeout", "3", "--pick-timeout", "0.5")
    arguments = parse(*flags)
    check_flags(arguments)
    config = hub_config(arguments)
    assert (config.max_waiting, config.max_in_flight) == (16, 32)
    assert (config.request_timeout_s, config.pick_timeout_s) == (3.0, 0.5)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_what_makes_no_sense_is_refused_with_the_flag(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} is {value}; it must be more than 0"):
        check_flags(parse(flag, value))


def test_a_time_that_is_too_short_or_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--request-timeout is 0\.5; it must be at least 1 second"):
        check_flags(parse("--request-timeout", "0.5"))
    with pytest.raises(ConfigError, match="--pick-timeout"):
        check_flags(parse("--pick-timeout", "nan"))


@pytest.mark.parametrize("flag", FLAGS)
def test_headless_has_no_requests_to_bound(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is a hub's"):
        check_flags(parse("--headless", "--stage-id", "0", "--etcd-endpoints", "127.0.0.1:1", flag, "5"))
