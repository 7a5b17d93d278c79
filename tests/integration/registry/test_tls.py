"""TLS and mutual TLS to etcd, and each way to get them wrong, told by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from omni_discovery.errors import RegistryTlsError, RegistryUnavailableError
from omni_discovery.etcd.check import check_registry
from omni_discovery.etcd.config import RegistryConfig, RegistrySecurity, RegistryTls
from tests.support.binaries import require_debian_etcd, wheel_etcd
from tests.support.certificates import Certificates, make_certificates
from tests.support.population import Population
from tests.support.quiet import soon_s
from tests.support.registry import EtcdServer


@dataclass(frozen=True)
class Servers:
    plaintext: EtcdServer
    #: Shows a certificate; asks for none.
    tls: EtcdServer
    #: Asks for a certificate, too.
    mutual: EtcdServer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=[wheel_etcd, require_debian_etcd], ids=["etcd_35", "etcd_34"])
def servers(
    request: pytest.FixtureRequest, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    binary, c = request.param(), certificates
    shown = [f"--cert-file={c.server_cert}", f"--key-file={c.server_key}"]
    asked = ["--client-cert-auth", f"--trusted-ca-file={c.ca}"]
    by_etcdctl = [f"--cacert={c.ca}", f"--cert={c.client_cert}", f"--key={c.client_key}"]
    made = Servers(
        EtcdServer(tmp_path_factory.mktemp("plaintext"), binary=binary),
        EtcdServer(tmp_path_factory.mktemp("tls"), binary=binary, flags=shown, tls_flags=by_etcdctl),
        EtcdServer(tmp_path_factory.mktemp("mutual"), binary=binary, flags=[*shown, *asked], tls_flags=by_etcdctl),
    )
    every = (made.plaintext, made.tls, made.mutual)
    try:
        for server in every:
            server.start()
        yield made
    finally:
        for server in every:
            server.kill()


def check(endpoints: str, tls: RegistryTls | None = None) -> None:
    check_registry(RegistryConfig(endpoints, security=RegistrySecurity(tls=tls)), 2.0)


def test_everything_works_over_tls(servers: Servers, certificates: Certificates) -> None:
    with Population(f"https://{servers.tls.endpoint}", "tls", tls=RegistryTls(ca_file=certificates.ca)) as population:
        population.load_travels(5.0)


def test_everything_works_over_mutual_tls(servers: Servers, certificates: Certificates) -> None:
    c = certificates
    tls = RegistryTls(ca_file=c.ca, cert_file=c.client_cert, key_file=c.client_key)
    with Population(servers.mutual.endpoint, "mutual", tls=tls) as population:
        population.load_travels(5.0)


def test_the_name_in_the_certificate_may_be_another_than_the_endpoints(
    servers: Servers, certificates: Certificates
) -> None:
    check(servers.tls.endpoint, RegistryTls(ca_file=certificates.ca, server_name="localhost"))


def test_each_mistake_has_its_own_words_and_names_the_endpoint(servers: Servers, certificates: Certificates) -> None:
    c = certificates
    strange = RegistryTls(ca_file=c.ca, cert_file=c.strange_cert, key_file=c.strange_key)
    mistakes = [
        (servers.tls.endpoint, RegistryTls(ca_file=c.strange_ca), f"not signed by {c.strange_ca}: correct --etcd-ca"),
        (f"https://{servers.tls.endpoint}", None, "not signed by an authority that this system trusts"),
        (servers.tls.endpoint, RegistryTls(ca_file=c.ca, server_name="other.example"), "--etcd-server-name"),
        (servers.tls.endpoint, None, "as one that speaks TLS does: write https://"),
        (servers.mutual.endpoint, None, "as one that speaks TLS does: write https://"),
        (servers.plaintext.endpoint, RegistryTls(ca_file=c.ca), "does not answer in TLS: write http://"),
        (servers.mutual.endpoint, RegistryTls(ca_file=c.ca), "asks for a client certificate: give --etcd-cert"),
        (servers.mutual.endpoint, strange, "does not take our client certificate: correct --etcd-cert"),
    ]

    def complaint(mistake: tuple[str, RegistryTls | None, str]) -> str:
        with pytest.raises(RegistryTlsError) as caught:
            check(mistake[0], mistake[1])
        return str(caught.value)

    with ThreadPoolExecutor(len(mistakes)) as pool:
        for (endpoints, _, said), complained in zip(mistakes, pool.map(complaint, mistakes), strict=True):
            assert said in complained
            assert endpoints.removeprefix("https://") in complained


def test_a_wrong_endpoint_is_named() -> None:
    began_s = time.monotonic()
    with pytest.raises(RegistryUnavailableError, match=r"127\.0\.0\.1:9: .*Connection refused"):
        check("127.0.0.1:9")
    assert time.monotonic() - began_s < soon_s(6.0)


def test_one_bad_endpoint_beside_a_good_one_does_not_matter(servers: Servers, certificates: Certificates) -> None:
    for _ in range(3):
        check_registry(
            RegistryConfig(
                f"{servers.plaintext.endpoint},{servers.tls.endpoint}",
                security=RegistrySecurity(tls=RegistryTls(ca_file=certificates.ca)),
            ),
            5.0,
        )
