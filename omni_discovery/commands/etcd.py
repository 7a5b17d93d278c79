"""``omni etcd``: what an administrator of the etcd cluster does for a namespace."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from omni_discovery.commands.registry import add_registry_options, find_endpoints, read_security

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_discovery.etcd.admin import NamespaceAccess


class EtcdCommand:
    """``omni etcd grant-namespace NAME`` and ``omni etcd grant-role NAME ROLE [ROLE ...]``."""

    summary = "set up users and roles of etcd, one namespace each"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        from omni_discovery.records.roles import WRITES

        actions = parser.add_subparsers(metavar="ACTION", required=True)
        whole = actions.add_parser(
            "grant-namespace",
            help="confine a user to one namespace",
            description="Make a role that reaches one namespace only, and a user that has it. Doing it again changes "
            "nothing. Once etcd has users, log in as an administrator with --etcd-user.",
        )
        roles = actions.add_parser(
            "grant-role",
            help="confine a user to what a hub, a replica, an operator or an observer does",
            description="Make roles of one namespace, and a user that has them. hub: register hubs, put the pipeline, "
            "read all. replica: register replicas. operator: steer and revoke, replace the pipeline, make API keys. "
            "observer: look on. A hub that runs replicas itself is both hub and replica. Only hubs and operators see "
            "the API keys. Doing it again changes nothing.",
        )
        for action in (whole, roles):
            action.add_argument("name", metavar="NAME", help="the namespace")
        whole.set_defaults(roles=[])
        roles.add_argument("roles", metavar="ROLE", nargs="+", choices=WRITES, help=f"some of {', '.join(WRITES)}")
        whole.add_argument("--user", default="", help="the user (default: omni-NAME)")
        roles.add_argument("--user", default="", help="the user (default: omni-NAME/ROLE, of the first role)")
        for action in (whole, roles):
            action.add_argument("--ask", action="store_true", help="ask for a new user's password (default: make one)")
            add_registry_options(action)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        import asyncio
        import getpass
        import secrets

        from omni_discovery.errors import ConfigError
        from omni_discovery.etcd.admin import grant_namespace, grant_roles, role_of
        from omni_discovery.etcd.config import parse_endpoints
        from omni_discovery.records.keys import check_namespace

        namespace, roles = check_namespace(arguments.name), arguments.roles
        endpoints, security = find_endpoints(arguments), read_security(arguments)
        security = security.for_endpoints(endpoints)
        user = arguments.user or role_of(namespace, *roles[:1])
        password = (
            getpass.getpass(f"password of {user}, if it is new: ") if arguments.ask else secrets.token_urlsafe(24)
        )
        if not password:
            raise ConfigError("an empty password is none")
        parsed = parse_endpoints(endpoints)
        if roles:
            work = grant_roles(parsed, security, namespace, roles, user, password)
        else:
            work = grant_namespace(parsed, security, namespace, user, password)
        granted = asyncio.run(work)
        made = "" if arguments.ask else password
        sys.stdout.write("\n".join(_report(granted, namespace, roles, user, made)) + "\n")
        return 0


def _report(granted: NamespaceAccess, namespace: str, roles: Sequence[str], user: str, made_password: str) -> list[str]:
    lines = [f"user {user} has role {', '.join(granted.roles)}: {_reach(namespace, roles)}"]
    if not granted.user_is_new:
        lines += ["the user was there already: its password is as it was"]
    elif made_password:
        lines += ["its password, shown this once:", f"  export OMNI_ETCD_PASSWORD={made_password}"]
    lines += [f"then: omni {_command(roles)} --namespace {namespace} --etcd-user {user} ..."]
    if not granted.auth_is_on:
        lines += [
            "etcd does not ask for users yet, so the role confines nobody. Once every namespace has its user:",
            "  etcdctl user add root && etcdctl user grant-role root root && etcdctl auth enable",
        ]
    return lines


def _reach(namespace: str, roles: Sequence[str]) -> str:
    from omni_discovery.records.roles import WRITES

    if not roles:
        return f"/omni/v1/{namespace}/ and nothing else"
    written = ", ".join(sorted({family for role in roles for family in WRITES[role]})) or "nothing"
    return f"of /omni/v1/{namespace}/ it may write {written}"


def _command(roles: Sequence[str]) -> str:
    """What such a user is for."""
    usual = {"hub": "serve --hub-only", "replica": "serve --headless", "operator": "drain", "observer": "replicas"}
    return usual[roles[0]] if len(roles) == 1 else "serve"
