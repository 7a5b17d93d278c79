"""``omni etcd``: what an administrator of the etcd cluster does for a namespace."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from omni_discovery.commands.registry import add_registry_options, find_endpoints, read_security

if TYPE_CHECKING:
    from omni_discovery.etcd.admin import NamespaceAccess


class EtcdCommand:
    """``omni etcd grant-namespace NAME``."""

    summary = "set up users and roles of etcd, one namespace each"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        actions = parser.add_subparsers(metavar="ACTION", required=True)
        grant = actions.add_parser(
            "grant-namespace",
            help="confine a user to one namespace",
            description="Make a role that reaches one namespace only, and a user that has it. Doing it again changes "
            "nothing. Once etcd has users, log in as an administrator with --etcd-user.",
        )
        grant.add_argument("name", metavar="NAME", help="the namespace")
        grant.add_argument("--user", default="", help="the user (default: omni-NAME)")
        grant.add_argument("--ask", action="store_true", help="ask for a new user's password (default: make one)")
        add_registry_options(grant)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        import asyncio
        import getpass
        import secrets

        from omni_discovery.errors import ConfigError
        from omni_discovery.etcd.admin import grant_namespace, role_of
        from omni_discovery.etcd.config import parse_endpoints
        from omni_discovery.records.keys import check_namespace

        namespace = check_namespace(arguments.name)
        endpoints, security = find_endpoints(arguments), read_security(arguments)
        security = security.for_endpoints(endpoints)
        user = arguments.user or role_of(namespace)
        password = (
            getpass.getpass(f"password of {user}, if it is new: ") if arguments.ask else secrets.token_urlsafe(24)
        )
        if not password:
            raise ConfigError("an empty password is none")
        granted = asyncio.run(grant_namespace(parse_endpoints(endpoints), security, namespace, user, password))
        sys.stdout.write("\n".join(_report(granted, namespace, user, "" if arguments.ask else password)) + "\n")
        return 0


def _report(granted: NamespaceAccess, namespace: str, user: str, made_password: str) -> list[str]:
    lines = [f"user {user} has role {granted.role}: /omni/v1/{namespace}/ and nothing else"]
    if not granted.user_is_new:
        lines += ["the user was there already: its password is as it was"]
    elif made_password:
        lines += ["its password, shown this once:", f"  export OMNI_ETCD_PASSWORD={made_password}"]
    lines += [f"then: omni serve --namespace {namespace} --etcd-user {user} ..."]
    if not granted.auth_is_on:
        lines += [
            "etcd does not ask for users yet, so the role confines nobody. Once every namespace has its user:",
            "  etcdctl user add root && etcdctl user grant-role root root && etcdctl auth enable",
        ]
    return lines
