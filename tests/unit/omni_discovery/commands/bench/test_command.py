"""The flags of ``omni bench``: what is wrong is told before anything is sent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from omni_discovery.commands.bench.command import BenchCommand, reachable_here, read_plan
from omni_discovery.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    BenchCommand().add_arguments(parser)
    return parser.parse_args(words)


def run(*words: str) -> int:
    return BenchCommand().run(parsed("--url", "http://127.0.0.1:9", *words))


def test_without_flags_it_is_a_hundred_requests_one_after_the_other() -> None:
    plan = read_plan(parsed())
    assert (plan.requests, plan.duration_s, plan.concurrency, plan.is_open) == (100, None, 1, False)


def test_a_duration_alone_has_no_number_of_requests() -> None:
    plan = read_plan(parsed("--duration", "5", "--rate", "3"))
    assert (plan.requests, plan.duration_s, plan.rate_per_s, plan.is_open) == (None, 5.0, 3.0, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rate", "0"], "--rate is 0; right would be a number above 0"),
        (["--rate", "nan"], "--rate is nan"),
        (["--duration", "-1"], "--duration is -1"),
        (["--timeout", "inf"], "--timeout is inf"),
        (["--concurrency", "0"], "--concurrency is 0; right would be 1 to 10000"),
        (["--max-in-flight", "10001"], "--max-in-flight is 10001"),
        (["--requests", "0"], "--requests is 0; right would be 1 or more"),
        (["--warm-up", "-1"], "--warm-up is -1; right would be 0 or more"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--prompt-words", "0"], "--prompt-words is 0"),
        (["--modalities", "text,smell"], "'smell' is none; there are text, image, audio"),
        (["--extra-body", "{"], "--extra-body is no JSON object"),
        (["--extra-body", "[]"], "--extra-body is no JSON object"),
        (["--extra-body", '{"stream": false}'], "leave stream and stream_format out"),
        (["--prompt-file", "/nonexistent/prompts"], "can't be read"),
        (["--plot", "/dev/null/a.svg"], "--plot /dev/null/a.svg can't be written"),
        (["--out", "/dev/null/a.json"], "--out /dev/null/a.json can't be written"),
        (["--ca-file", "/nonexistent/ca"], "--ca-file /nonexistent/ca can't be read"),
        (["--api-key-file", "/nonexistent/key"], "--api-key-file /nonexistent/key can't be read"),
        (["--url", "127.0.0.1:8000"], "right would be http://HOST:PORT"),
        (["--url", "http://127.0.0.1:8000/v1"], "right would be http://HOST:PORT"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(*words)
    assert told in str(caught.value)


def test_an_empty_file_of_prompts_is_told(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\n \n")
    with pytest.raises(ConfigError, match="has no line; right would be one prompt a line"):
        run("--prompt-file", str(tmp_path / "prompts"))


def test_a_key_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        run("--api-key-file", str(tmp_path / "key"))


@pytest.mark.parametrize("key", ["two words", "caf\u00e9", "a\nb"])
def test_what_can_be_no_key_is_told_and_not_shown(tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key, encoding="utf-8")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key") as caught:
        run("--api-key-file", str(tmp_path / "key"))
    assert key not in str(caught.value)


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "omni_discovery.commands.bench.client", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"needs httpx, .*: pip install 'omni-discovery\[bench\]'"):
        run()


def test_no_flag_takes_the_key_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """All users of a machine can read the flags of all processes."""
    with pytest.raises(SystemExit):
        parsed("--api-key", "swordfish")
    told = capsys.readouterr().err
    assert "set VLLM_API_KEY, or give --api-key-file FILE" in told
    assert "swordfish" not in told


def test_without_a_hub_here_it_says_how_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="name one with --url http://HOST:PORT"):
        BenchCommand().run(parsed("--namespace", "nobody"))


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("https://[::]:8000", "https://[::1]:8000"),
        ("http://10.0.0.5:80", "http://10.0.0.5:80"),
    ],
)
def test_a_hub_that_listens_everywhere_is_asked_on_loopback(url: str, here: str) -> None:
    assert reachable_here(url) == here
