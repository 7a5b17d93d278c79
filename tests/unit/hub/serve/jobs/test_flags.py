"""The flags of ``omni serve`` for videos."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hub.command import ServeCommand
from hub.jobs.cipher import job_key_of
from hub.jobs.config import MooncakeMaster
from hub.jobs.job import JobBounds
from hub.serve.flags import check_flags
from hub.serve.jobs.flags import jobs_config
from omni_discovery.errors import ConfigError

HEADLESS = ("--headless", "--stage-id", "0", "--etcd-endpoints", "etcd:2379")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    return parser.parse_args(["model", *flags])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("ab" * 32 + "\n" + "cd" * 32)
    file.chmod(0o600)
    return file


def test_without_flags_a_hub_keeps_its_videos_and_the_help_says_how_many() -> None:
    config = jobs_config(parse())
    assert (config.store, config.keys, config.bounds) == (None, None, JobBounds())
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    bounds = JobBounds()
    for value in (bounds.most, bounds.most_per_client, bounds.lifetime_s):
        assert f"(default: {value:.0f})" in parser.format_help()


def test_each_flag_sets_its_part(keys: Path, tmp_path: Path) -> None:
    store = ("--job-store", str(tmp_path / "store"), "--job-key-file", str(keys))
    arguments = parse(*store, "--max-jobs", "50", "--max-jobs-per-client", "5", "--job-lifetime", "3600")
    check_flags(arguments)
    config = jobs_config(arguments)
    assert (config.store, config.bounds) == (tmp_path / "store", JobBounds(50, 5, 3600.0))
    assert config.keys is not None
    assert config.keys.first == job_key_of(b"\xab" * 32)
    assert config.keys.has(job_key_of(b"\xcd" * 32).name)
    # Fewer than the usual share of one key: that is the share.
    assert jobs_config(parse("--max-jobs", "10")).bounds == JobBounds(10, 10)


def test_a_url_is_a_mooncake_store(keys: Path) -> None:
    store = ("--job-store", "mooncake://store-master.example:50051", "--job-key-file", str(keys))
    arguments = parse(*store)
    check_flags(arguments)
    config = jobs_config(arguments)
    assert config.store == MooncakeMaster("store-master.example", 50051)
    assert str(config.store) == store[1]


@pytest.mark.parametrize(
    "url",
    ["mooncake://m", "mooncake://m:0", "mooncake://m:65536", "mooncake://[::1]:1", "mooncake://m:1/x", "s3://m:1"],
)
def test_another_url_is_refused_and_no_folder(url: str) -> None:
    with pytest.raises(ConfigError, match="a folder or mooncake://HOST:PORT is wanted"):
        check_flags(parse("--job-store", url, "--job-key-file", "/a"))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--job-store", "/a"], "go together"),
        (["--job-key-file", "/a"], "go together"),
        (["--max-jobs", "0"], "--max-jobs is 0"),
        (["--max-jobs", "5", "--max-jobs-per-client", "6"], "--max-jobs-per-client is 6"),
        (["--job-lifetime", "nan"], "--job-lifetime is nan"),
        (["--api", "vllm", "--max-jobs", "5"], "--max-jobs is for the hub's own API"),
        (
            ["--headless", "--stage-id", "0", "--etcd-endpoints", "e:1", "--max-jobs", "5"],
            "leave it out with --headless",
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(flags: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_flags(parse(*flags))


@pytest.mark.attack("J4")
def test_a_key_file_that_others_can_read_is_refused(keys: Path, tmp_path: Path) -> None:
    keys.chmod(0o644)
    with pytest.raises(ConfigError, match="every user of this machine can read"):
        jobs_config(parse("--job-store", str(tmp_path), "--job-key-file", str(keys)))
