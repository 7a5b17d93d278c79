"""Certificates for one test session, made by the openssl command: an authority, a server, a client, and a stranger."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """PEM files. ``strange_ca`` has signed nothing of the others."""

    ca: str
    server_cert: str
    server_key: str
    client_cert: str
    client_key: str
    strange_ca: str
    strange_cert: str
    strange_key: str


def make_certificates(folder: Path, server_names: str = "IP:127.0.0.1,DNS:localhost") -> Certificates:
    """Valid for a day."""
    _make_authority(folder, "ca")
    _make_authority(folder, "strange-ca")
    _make_signed(folder, "ca", "server", server_names)
    _make_signed(folder, "ca", "client", "DNS:client")
    _make_signed(folder, "strange-ca", "stranger", "DNS:stranger")
    return Certificates(
        ca=str(folder / "ca.crt"),
        server_cert=str(folder / "server.crt"),
        server_key=str(folder / "server.key"),
        client_cert=str(folder / "client.crt"),
        client_key=str(folder / "client.key"),
        strange_ca=str(folder / "strange-ca.crt"),
        strange_cert=str(folder / "stranger.crt"),
        strange_key=str(folder / "stranger.key"),
    )


def _make_authority(folder: Path, name: str) -> None:
    _openssl(
        folder,
        *("req", "-x509", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}"),
        *("-days", "1"),
    )


def _make_signed(folder: Path, authority: str, name: str, names: str) -> None:
    (folder / f"{name}.ext").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
    _openssl(
        folder, "req", "-new", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}-cert"
    )
    _openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"),
        *("-CAcreateserial", "-days", "1", "-extfile", f"{name}.ext", "-out", f"{name}.crt"),
    )


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)
