"""The whole product on an etcd with users and mutual TLS: hub, local stage, headless stage, and no secret on show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_discovery.etcd.config import RegistryTls
from tests.support.certificates import make_certificates
from tests.support.hub import ECHO_PAIR, Hub
from tests.support.processes import Child, wait_for
from tests.support.registry import EtcdServer
from tests.support.secured import PASSWORDS, add_users

pytestmark = pytest.mark.e2e

SECRET = PASSWORDS["alpha"]
HEADLESS = ("serve", "--headless", "--stage-id", "1", "--namespace", "alpha")


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[EtcdServer, list[str]]]:
    """A server, and the flags that lead to it."""
    c = make_certificates(tmp_path)
    (tmp_path / "etcd").mkdir()
    server = EtcdServer(
        tmp_path / "etcd",
        flags=[
            *(f"--cert-file={c.server_cert}", f"--key-file={c.server_key}"),
            *("--client-cert-auth", f"--trusted-ca-file={c.ca}"),
        ],
        tls_flags=[f"--cacert={c.ca}", f"--cert={c.client_cert}", f"--key={c.client_key}"],
    )
    server.start()
    add_users(server, RegistryTls(ca_file=c.ca, cert_file=c.client_cert, key_file=c.client_key))
    flags = ["--etcd-endpoints", f"https://{server.endpoint}", "--etcd-user", "omni-alpha"]
    flags += ["--etcd-ca", c.ca, "--etcd-cert", c.client_cert, "--etcd-key", c.client_key]
    yield server, flags
    server.kill()


def test_a_hub_and_stages_of_both_kinds_serve_over_it_and_no_password_is_on_show(
    secured: tuple[EtcdServer, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. the hub has its password from the environment and runs stage 0 beside it
    2. stage 1 is headless and has it from a file
    3. a request goes through both; no argument list, no environment but the hub's own, which a person has set, and
       no line of any log holds the password
    """
    _, flags = secured
    password_file = tmp_path / "password"
    password_file.write_text(f"{SECRET}\n")
    password_file.chmod(0o600)
    headless = Child(
        [*HEADLESS, *flags, "--etcd-password-file", str(password_file)],
        tmp_path,
        "headless",
    )
    monkeypatch.setenv("OMNI_ETCD_PASSWORD", SECRET)
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(ECHO_PAIR)
    hub = Hub(tmp_path, ["--deploy-config", str(deploy), "--stage-id", "0", *flags], "alpha")
    try:
        hub.wait_ready()
        status, body = hub.ask("red green", modalities=["text", "image"])
        assert status == 200, body
        assert len(body["choices"]) == 2
        table = Child(["replicas", "--namespace", "alpha", *flags], tmp_path, "table")
        assert table.process.wait(30) == 0, table.text
        processes = [*hub.tree(), *headless.tree()]
        assert len(processes) >= 5
        for pid in processes:
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != hub.process.pid:
                assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        left = [*hub.stop(), *headless.stop()]
    assert not left
    assert SECRET not in hub.text + headless.text + table.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--etcd-user": "nobody"}, "does not know this user with this password"),
        ({"--etcd-endpoints": "http"}, "say http:// and the other flags say TLS"),
        ({"--etcd-key": "/nowhere.pem"}, "--etcd-key /nowhere.pem can't be read"),
    ],
)
def test_what_is_wrong_is_said_at_once_and_by_name(
    secured: tuple[EtcdServer, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    said: str,
) -> None:
    server, flags = secured
    monkeypatch.setenv("OMNI_ETCD_PASSWORD", SECRET)
    for flag, value in changes.items():
        flags[flags.index(flag) + 1] = f"http://{server.endpoint}" if value == "http" else value
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(ECHO_PAIR)
    children = [
        Child(
            ["serve", "--port", "0", "--deploy-config", str(deploy), "--namespace", "alpha", *flags], tmp_path, "hub"
        ),
        Child([*HEADLESS, *flags], tmp_path, "headless"),
        Child(["replicas", "--namespace", "alpha", *flags], tmp_path, "replicas"),
    ]
    for child in children:
        wait_for("it to give up", lambda child=child: child.process.poll() is not None, 20.0)  # type: ignore[misc]
        assert child.process.returncode in (1, 2), child.text
        assert said in child.text
        assert SECRET not in child.text
