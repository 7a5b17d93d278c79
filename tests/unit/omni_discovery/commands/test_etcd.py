"""``omni etcd env``: lines for a shell, by which etcdctl finds the same etcd as omni does."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest

from omni_discovery.commands.etcd import EtcdCommand, etcdctl_environment
from omni_discovery.etcd.config import RegistrySecurity, RegistryTls
from omni_discovery.etcd.embedded_file import write_endpoint
from tests.support.certificates import make_certificates


def test_an_etcd_without_users_needs_its_endpoints_and_nothing_left_of_another() -> None:
    assert etcdctl_environment("unix:///tmp/o/etcd:2379", RegistrySecurity(), with_password=False) == [
        "export ETCDCTL_API=3",
        "export ETCDCTL_ENDPOINTS=unix:///tmp/o/etcd:2379",
        "unset ETCDCTL_CACERT ETCDCTL_CERT ETCDCTL_KEY ETCDCTL_USER ETCDCTL_PASSWORD",
    ]


def test_certificates_are_named_by_whole_paths_and_endpoints_say_https(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificates(tmp_path)
    monkeypatch.chdir(tmp_path)
    tls = RegistryTls(
        ca_file=Path(made.ca).name, cert_file=made.client_cert, key_file=made.client_key, server_name="etcd.example"
    )
    lines = etcdctl_environment("a:1,b:2", RegistrySecurity(tls=tls), with_password=False)
    assert "export ETCDCTL_ENDPOINTS=https://a:1,https://b:2" in lines
    assert f"export ETCDCTL_CACERT={made.ca}" in lines
    assert f"export ETCDCTL_KEY={made.client_key}" in lines
    assert "etcd.example" in lines[-1]


def test_a_password_is_printed_only_if_it_is_asked_for() -> None:
    security = RegistrySecurity(user="omni-a", password="it's $secret")
    lines = etcdctl_environment("a:1", security, with_password=False)
    assert "secret" not in "".join(lines)
    assert "export ETCDCTL_USER=omni-a" in lines
    assert "PASSWORD" not in next(line for line in lines if line.startswith("unset"))
    (told,) = (line for line in etcdctl_environment("a:1", security, with_password=True) if "PASSWORD" in line)
    printed = subprocess.run(
        ["sh", "-c", f'{told}; printf %s "$ETCDCTL_PASSWORD"'], check=True, capture_output=True, text=True
    )
    assert printed.stdout == "it's $secret"


def test_without_flags_it_is_the_embedded_etcd_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMNI_ETCD_ENDPOINTS", raising=False)
    monkeypatch.delenv("OMNI_NAMESPACE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    write_endpoint(tmp_path / "omni", "default", "unix:///tmp/o/etcd:2379")
    parser = argparse.ArgumentParser()
    command = EtcdCommand()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["env"])) == 0
    assert shlex.split(capsys.readouterr().out)[3] == "ETCDCTL_ENDPOINTS=unix:///tmp/o/etcd:2379"
