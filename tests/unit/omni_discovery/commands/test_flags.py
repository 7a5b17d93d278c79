"""The flags that hubs and replicas share."""

from __future__ import annotations

import argparse
import logging

import pytest

from omni_discovery.commands.flags import (
    add_data_plane_options,
    check_data_plane,
    check_host,
    read_labels,
    warn_if_plain,
)
from omni_discovery.errors import ConfigError


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--omni-replica-address")
    add_data_plane_options(parser)
    return parser.parse_args(flags)


def test_labels_are_pairs_of_short_printable_texts() -> None:
    assert read_labels([]) == {}
    assert read_labels(["zone=eu-1", "rack=7 b", "example.com/gpu=H100=1", "zone=eu-1"]) == {
        "zone": "eu-1",
        "rack": "7 b",
        "example.com/gpu": "H100=1",
    }


@pytest.mark.parametrize(
    "wrong", ["zone", "=a", "zone=", "zo ne=a", "zone=a\n", "zone=\u00e4", "-z=a", f"{'k' * 64}=a", f"k={'v' * 64}"]
)
def test_a_label_that_is_none_is_refused_with_what_would_be(wrong: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE, for example zone=a"):
        read_labels([wrong])


def test_a_label_given_twice_and_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="given twice: 'a' and 'b'"):
        read_labels(["zone=a", "zone=b"])
    with pytest.raises(ConfigError, match="32 at most"):
        read_labels([f"k{number}=v" for number in range(33)])


@pytest.mark.parametrize("right", ["10.0.0.5", "gpu-7", "gpu-7.example.com", "fd00::5", "[fd00::5]", "localhost"])
def test_a_host_or_an_ip_address_can_be_advertised(right: str) -> None:
    assert check_host("-ora", right) == right


@pytest.mark.parametrize(
    "wrong", ["", "tcp://h", "10.0.0.5:80", "h:1", "10.0.0.256", "1.2.3", "a b", "a/b", "[h]", "fd00::g", "-h", "h\n"]
)
def test_anything_else_is_refused_with_what_would_be_right(wrong: str) -> None:
    with pytest.raises(ConfigError, match="right would be a host name or an IP address"):
        check_host("--omni-replica-address", wrong)


@pytest.mark.parametrize(
    "flags",
    [["--drain-timeout", "-1"], ["--drain-timeout", "nan"], ["--label", "x"], ["--omni-replica-address", "h:1"]],
)
def test_values_that_can_not_be_meant_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="right would be"):
        check_data_plane(parsed(*flags))


def test_only_those_who_do_not_encrypt_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_plain("curve")
    assert caplog.records == []
    warn_if_plain("none")
    (record,) = caplog.records
    assert (record.levelno, "PROMPT" in record.getMessage()) == (logging.WARNING, True)
