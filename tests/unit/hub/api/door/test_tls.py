"""Files of TLS are checked before anything starts, and a renewed certificate is used without a restart."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from pathlib import Path

import pytest

from hub.api.door.tls import TlsFiles, follow_files, load_context
from omni_discovery.errors import ConfigError
from tests.support.certificates import Certificates, make_certificates
from tests.support.hub_fakes import until


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pems"))


def test_a_pair_or_one_file_with_both_is_taken(pems: Certificates, tmp_path: Path) -> None:
    load_context(TlsFiles(pems.server_cert, pems.server_key))
    both = tmp_path / "both.pem"
    both.write_text(Path(pems.server_cert).read_text() + Path(pems.server_key).read_text())
    context = load_context(TlsFiles(str(both), ca=pems.ca, cert_reqs=ssl.CERT_REQUIRED))
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_wrong_file_is_named_with_what_is_wrong(pems: Certificates, tmp_path: Path) -> None:
    empty, encrypted = tmp_path / "empty.pem", tmp_path / "encrypted.key"
    empty.touch()
    encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n")
    for files, wrong in (
        (TlsFiles("/no/such.crt", pems.server_key), "--ssl-certfile /no/such.crt can't be read: No such file"),
        (TlsFiles(pems.server_cert, "/no/such.key"), "--ssl-keyfile /no/such.key can't be read: No such file"),
        (TlsFiles(pems.server_cert, pems.client_key), "the key is not that of the certificate"),
        (TlsFiles(pems.server_cert), "no PEM block of a certificate and of its key"),
        (TlsFiles(str(empty), pems.server_key), "can't be used"),
        (TlsFiles(pems.server_cert, pems.server_key, str(empty), 2), f"--ssl-ca-certs {empty} can't be used"),
        (TlsFiles(pems.server_cert, str(encrypted)), f"--ssl-keyfile {encrypted} can't be used"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_context(files)
        assert wrong in str(caught.value)


async def test_new_connections_get_a_renewed_certificate_and_never_half_a_pair(
    pems: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. the first certificate is served; 2. only the certificate is replaced: it goes on; 3. the key, too: the new"""
    caplog.set_level(logging.INFO)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(pems.server_cert, certificate)
    shutil.copy(pems.server_key, key)
    files = TlsFiles(str(certificate), str(key))
    context = load_context(files)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    following = asyncio.create_task(follow_files(context, files, 0.05))
    port = server.sockets[0].getsockname()[1]
    try:
        assert await shown(port) == der(pems.server_cert)
        shutil.copy(pems.client_cert, certificate)
        await logged(caplog, "tls.not_renewed")
        assert await shown(port) == der(pems.server_cert)
        shutil.copy(pems.client_key, key)
        await logged(caplog, "tls.renewed")
        assert await shown(port) == der(pems.client_cert)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        server.close()
        await server.wait_closed()


def der(file: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(file).read_text())


async def shown(port: int) -> bytes:
    text = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=30)
    return ssl.PEM_cert_to_DER_cert(text)


async def logged(caplog: pytest.LogCaptureFixture, event: str) -> None:
    await until(lambda: event in caplog.text, 30.0)
