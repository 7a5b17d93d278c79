"""RegistrySecurity and its flags: what can't work together is refused at the door, and no password is ever shown."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from omni_discovery.clients import OmniCoordClientForHub
from omni_discovery.commands.registry import add_security_options, read_security
from omni_discovery.errors import ConfigError
from omni_discovery.etcd.config import RegistryConfig, RegistrySecurity, RegistryTls
from stage_runtime.config import ReplicaConfig
from tests.support.certificates import Certificates, make_certificates


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_security_options(parser)
    return parser.parse_args(flags)


def test_a_client_certificate_without_a_ca_is_refused(pem: Certificates) -> None:
    """Some clients take this for plaintext."""
    with pytest.raises(ConfigError, match="--etcd-ca"):
        RegistryTls(cert_file=pem.client_cert, key_file=pem.client_key)


def test_half_a_pair_of_certificate_and_key_is_refused(pem: Certificates) -> None:
    with pytest.raises(ConfigError, match="give both"):
        RegistryTls(ca_file=pem.ca, cert_file=pem.client_cert)


def test_files_that_are_not_there_or_not_what_they_should_be_are_named(pem: Certificates, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    with pytest.raises(ConfigError, match=r"--etcd-ca /nowhere\.pem can't be read"):
        RegistryTls(ca_file="/nowhere.pem")
    with pytest.raises(ConfigError, match=r"--etcd-ca .*empty\.pem holds no certificate"):
        RegistryTls(ca_file=str(empty))
    with pytest.raises(ConfigError, match="don't go together"):
        RegistryTls(ca_file=pem.ca, cert_file=pem.client_cert, key_file=pem.strange_key)


def test_user_and_password_go_together() -> None:
    with pytest.raises(ConfigError, match="OMNI_ETCD_PASSWORD or give --etcd-password-file"):
        RegistrySecurity(user="u")
    with pytest.raises(ConfigError, match="--etcd-user"):
        RegistrySecurity(password="p")


@pytest.mark.parametrize("endpoints", ["https://a:1", "https://a:1,https://b:2", ["https://a:1"]])
def test_endpoints_that_say_https_turn_tls_on(endpoints: str | list[str]) -> None:
    config = RegistryConfig(endpoints)
    assert config.security.tls == RegistryTls()
    assert config.endpoints[0] == "a:1"


def test_endpoints_that_say_http_and_a_ca_contradict_each_other(pem: Certificates) -> None:
    with pytest.raises(ConfigError, match="write https://"):
        RegistryConfig("http://a:1", security=RegistrySecurity(tls=RegistryTls(ca_file=pem.ca)))


def test_endpoints_that_mix_the_two_are_refused() -> None:
    with pytest.raises(ConfigError, match="mix"):
        RegistryConfig("http://a:1,https://b:2")


def test_the_password_is_shown_by_nothing_that_holds_it() -> None:
    security = RegistrySecurity(user="u", password="hush-hush")
    replica = ReplicaConfig(stage_id=0, endpoints="a:1", namespace="n", security=security)
    for holder in (security, RegistryConfig("a:1", security=security), replica):
        assert "hush-hush" not in repr(holder) + str(holder)


def test_a_replicas_settings_with_security_survive_the_pipe(pem: Certificates) -> None:
    security = RegistrySecurity(tls=RegistryTls(ca_file=pem.ca), user="u", password="p")
    config = ReplicaConfig(stage_id=0, endpoints="https://a:1", namespace="n", security=security)
    assert msgspec.json.decode(msgspec.json.encode(config), type=ReplicaConfig) == config


def test_the_password_comes_from_the_environment_or_a_file_and_never_from_a_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMNI_ETCD_PASSWORD", "from-environment")
    file = tmp_path / "password"
    file.write_text("from file \n")
    assert read_security(parsed()) == RegistrySecurity()
    assert read_security(parsed("--etcd-user", "u")).password == "from-environment"
    by_file = parsed("--etcd-user", "u", "--etcd-password-file", str(file))
    assert read_security(by_file).password == "from file "
    with pytest.raises(ConfigError, match="--etcd-password-file /nowhere can't be read"):
        read_security(parsed("--etcd-user", "u", "--etcd-password-file", "/nowhere"))
    with pytest.raises(ConfigError, match="--etcd-password-file p can't be read"):
        read_security(parsed("--etcd-user", "u", "--etcd-password", "p"))


def test_the_flags_name_the_files_of_tls(pem: Certificates) -> None:
    flags = ["--etcd-ca", pem.ca, "--etcd-cert", pem.client_cert, "--etcd-key", pem.client_key]
    flags += ["--etcd-server-name", "etcd.example"]
    assert read_security(parsed(*flags)).tls == RegistryTls(
        ca_file=pem.ca, cert_file=pem.client_cert, key_file=pem.client_key, server_name="etcd.example"
    )


def test_the_clients_take_tls_user_and_password_as_keywords() -> None:
    with pytest.raises(ConfigError, match="has no password"):
        OmniCoordClientForHub("a:1", user="u")
    with OmniCoordClientForHub("127.0.0.1:9", tls=RegistryTls(), user="u", password="p") as client:
        assert client.view().revision == 0
