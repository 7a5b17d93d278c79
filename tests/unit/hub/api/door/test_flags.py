"""The flags of the door: what they come to, and what is said of those that make no sense."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hub.api.door.config import OwnPort
from hub.api.door.flags import read_door, warn_if_open
from hub.api.door.keys import ApiKey
from hub.cli import check_flags
from hub.command import ServeCommand
from omni_discovery.errors import ConfigError
from omni_discovery.records.api_key import digest_of

HEADLESS = ("--headless", "--stage-id", "0", "--etcd-endpoints", "127.0.0.1:2379")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    arguments = parser.parse_args(["--deploy-config", "pair.yaml", *flags])
    check_flags(arguments)
    return arguments


def secret(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.touch(0o600)
    file.write_text(text)
    return str(file)


def test_without_flags_nothing_is_asked_for_and_no_other_port_is_there() -> None:
    door = read_door(parse(), {})
    assert not door.asks_for_key
    assert (door.tls, door.admin, door.metrics, door.metrics_token) == (None, None, None, None)
    assert door.forwarded_allow_ips == ""


@pytest.mark.attack("A28")
def test_keys_come_from_files_flags_and_vllms_variable_and_no_key_is_kept(tmp_path: Path) -> None:
    file = secret(tmp_path, "keys", "alice:k1\nk2\n")
    flags = ("--api-key-file", file, "--api-key", "k3", "k4", "--api_key", "k5", "--port", "0")
    door = read_door(parse(*flags), {"VLLM_API_KEY": "k6"}, "k7")
    assert door.asks_for_key
    assert {key.name: key.digest for key in door.keys} == {
        "api-key-1": digest_of("k3"),
        "api-key-2": digest_of("k4"),
        "api-key-3": digest_of("k5"),
        "api-key-4": digest_of("k7"),
        "alice": digest_of("k1"),
        "line-2": digest_of("k2"),
        "VLLM_API_KEY": digest_of("k6"),
    }
    assert read_door(parse("--api-keys-from-etcd"), {}).asks_for_key
    assert read_door(parse(), {"VLLM_API_KEY": "k"}).asks_for_key
    assert not read_door(parse(), {"VLLM_API_KEY": ""}).asks_for_key


def test_a_file_without_a_key_never_leaves_the_door_open(tmp_path: Path) -> None:
    for text in ("", "# alice:k\n"):
        with pytest.raises(ConfigError, match="holds no key"):
            read_door(parse("--api-key-file", secret(tmp_path, "keys", text)), {})
    for flags in (["--api-key", ""], ["--api-key", "a b"]):
        with pytest.raises(ConfigError, match="--api-key: a key is"):
            read_door(parse(*flags), {})
    with pytest.raises(ConfigError, match="VLLM_API_KEY: a key is"):
        read_door(parse(), {"VLLM_API_KEY": "a b"})


def test_ports_of_their_own_for_operators_and_metrics(tmp_path: Path) -> None:
    token, metrics = secret(tmp_path, "a", "t\n"), secret(tmp_path, "m", "m\n")
    flags = ("--admin-port", "9001", "--admin-token-file", token)
    door = read_door(
        parse(*flags, "--metrics-port", "9002", "--metrics-token-file", metrics), {"OMNI_ADMIN_TOKEN": "v"}
    )
    assert (door.admin, door.metrics) == (OwnPort("127.0.0.1", 9001), OwnPort("127.0.0.1", 9002))
    assert (door.admin_token, door.metrics_token) == (
        ApiKey("admin", digest_of("t")),
        ApiKey("metrics", digest_of("m")),
    )
    door = read_door(parse("--admin-api"), {"OMNI_ADMIN_TOKEN": "v"})
    assert (door.admin, door.admin_token) == (OwnPort("127.0.0.1", 0), ApiKey("admin", digest_of("v")))
    assert read_door(parse("--admin-port", "9001", "--admin-host", "10.0.0.5"), {}).admin_token is None


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (["--ssl-keyfile", "k"], "--ssl-keyfile needs a certificate beside it"),
        (["--ssl-ca-certs", "c"], "--ssl-ca-certs needs a certificate beside it"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "2"], "say who signs the certificates of clients"),
        (["--ssl_certfile", "c", "--ssl_ca_certs", "a"], "add --ssl-cert-reqs 2"),
        (["--admin-host", "h"], "--admin-host is about --admin-port"),
        (["--admin-token-file", "f"], "--admin-token-file is about --admin-port"),
        (["--admin-port", "70000"], "take 0 to 65535"),
        (["--admin-port", "0", "--admin-host", "a b"], "--admin-host 'a b' is no address"),
        (["--forwarded-allow-ips", "proxy"], "'proxy' is no address"),
        (["--forwarded-allow-ips", "*"], "'\\*' is no address"),
        ([*HEADLESS, "--admin-api"], "--headless has no HTTP API: leave out --admin-api"),
        ([*HEADLESS, "--api-keys-from-etcd", "--ssl-certfile", "c"], "leave out --api-keys-from-etcd, --ssl-certfile"),
        ([*HEADLESS, "--api-key", "secret"], "leave out --api-key, or"),
        ([*HEADLESS, "--metrics-token-file", "f"], "--metrics-token-file is about --metrics-port"),
    ],
)
def test_flags_that_make_no_sense_are_refused_by_name(flags: list[str], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        parse(*flags)
    assert "secret" not in str(caught.value)


def test_files_of_tls_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile /no/such can't be read"):
        read_door(parse("--ssl-certfile", "/no/such"), {})


@pytest.mark.parametrize(
    ("host", "flags", "warns"),
    [
        ("0.0.0.0", [], True),
        ("::", [], True),
        ("10.0.0.5", [], True),
        ("gpu-7", [], True),
        ("127.0.0.1", [], False),
        ("127.0.0.2", [], False),
        ("::1", [], False),
        ("localhost", [], False),
        ("0.0.0.0", ["--api-keys-from-etcd"], False),
        ("0.0.0.0", ["--api-key", "k"], False),
    ],
)
def test_an_api_that_others_reach_without_a_key_is_one_line_that_names_the_flag(
    host: str, flags: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(host, read_door(parse(*flags), {}))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == warns
    assert all(line.startswith(f"hub.open host={host}:") and "--api-key-file" in line for line in lines)
