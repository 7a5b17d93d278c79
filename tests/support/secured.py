"""An etcd with users, one for each of two namespaces, as `omni etcd grant-namespace` makes them."""

from __future__ import annotations

import asyncio
from typing import Final

from omni_discovery.etcd.admin import grant_namespace
from omni_discovery.etcd.config import RegistrySecurity, RegistryTls
from tests.support.registry import EtcdServer

ROOT: Final = "root-secret"
PASSWORDS: Final = {"alpha": "alpha-secret", "beta": "beta-secret"}


def login(namespace: str, tls: RegistryTls | None = None) -> RegistrySecurity:
    """The user of a namespace."""
    return RegistrySecurity(tls=tls, user=f"omni-{namespace}", password=PASSWORDS[namespace])


def add_users(server: EtcdServer, tls: RegistryTls | None = None) -> None:
    """Give each namespace its user, and have etcd ask for users from now on."""
    for namespace, password in PASSWORDS.items():
        grant(server, RegistrySecurity(tls=tls), namespace, password)
    server.etcdctl("user", "add", f"root:{ROOT}")
    server.etcdctl("user", "grant-role", "root", "root")
    server.etcdctl("auth", "enable")


def grant(server: EtcdServer, security: RegistrySecurity, namespace: str, password: str) -> bool:
    """As an administrator would; say whether the user is new."""
    work = grant_namespace([server.endpoint], security, namespace, f"omni-{namespace}", password)
    return asyncio.run(work).user_is_new
