"""Which HTTP API ``omni serve`` shows, and what is said where it can't."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from hub.api.vllm.omni import versions
from hub.cli import check_flags
from hub.command import ServeCommand
from omni_discovery.errors import ConfigError


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser.parse_args(["--deploy-config", "pair.yaml", *flags])


def test_the_hubs_own_api_is_the_default_and_takes_no_flags_of_vllms() -> None:
    check_flags(parse())
    assert parse().api == "omni"
    with pytest.raises(ConfigError, match="add --api vllm"):
        check_flags(parse("--api-args", "--chat-template a"))


def test_without_vllm_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    with pytest.raises(ConfigError, match=r"pip install 'omni-discovery\[vllm\]'"):
        check_flags(parse("--api", "vllm"))
    check_flags(parse())


def test_vllm_omnis_server_is_taken_in_one_release_and_refused_with_the_pip_line_in_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything of it is imported; the flags of its server go with it."""
    monkeypatch.setattr(versions.check_server_version, "__defaults__", (lambda _: versions.TESTED,))
    check_flags(parse("--api", "vllm-omni", "--api-args", "--chat-template a"))
    monkeypatch.setattr(versions.check_server_version, "__defaults__", (lambda _: "0.29.1",))
    with pytest.raises(ConfigError, match=r"0\.29\.1 is here: pip install 'vllm-omni==0\.30\.0'"):
        check_flags(parse("--api", "vllm-omni"))
    with pytest.raises(ConfigError, match="add --api vllm, or --api vllm-omni"):
        check_flags(parse("--api-args", "--chat-template a"))


def test_replicas_alone_have_no_api() -> None:
    headless = ["--headless", "--stage-id", "0", "--etcd-endpoints", "127.0.0.1:2379"]
    with pytest.raises(ConfigError, match="no HTTP API"):
        check_flags(parse(*headless, "--api", "vllm"))
    check_flags(parse(*headless))
