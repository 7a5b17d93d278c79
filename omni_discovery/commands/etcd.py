"""``omni etcd``: the way to the etcd for ``etcdctl``, and what an administrator of the cluster does for a namespace."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from omni_discovery.commands.registry import add_registry_options, find_endpoints, read_security

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_discovery.etcd.admin import NamespaceAccess
    from omni_discovery.etcd.config import RegistrySecurity


class EtcdCommand:
    """``omni etcd env``, ``grant-namespace NAME`` and ``grant-role NAME ROLE [ROLE ...]``."""

    summary = "what etcdctl needs to reach the etcd; users and roles, one namespace each"

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
            action.set_defaults(action=_grant)
        environment = actions.add_parser(
            "env",
            help="print the variables by which etcdctl finds the etcd",
            description='For a shell: eval "$(omni etcd env)", then etcdctl get --prefix /omni/v1/',
        )
        environment.add_argument(
            "--with-password", action="store_true", help="print the password too (default: etcdctl asks for it)"
        )
        add_registry_options(environment)
        environment.set_defaults(action=_print_environment)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        return int(arguments.action(arguments))


def _print_environment(arguments: argparse.Namespace) -> int:
    endpoints, security = find_endpoints(arguments), read_security(arguments)
    lines = etcdctl_environment(endpoints, security.for_endpoints(endpoints), with_password=arguments.with_password)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def etcdctl_environment(endpoints: str, security: RegistrySecurity, *, with_password: bool) -> list[str]:
    """Lines for a shell that set the variables of etcdctl for this etcd, and take away those for another one."""
    from pathlib import Path

    from omni_discovery.etcd.config import RegistryTls, parse_endpoints, url_of

    tls = security.tls or RegistryTls()
    scheme = "https" if security.tls else ""
    files = {"ETCDCTL_CACERT": tls.ca_file, "ETCDCTL_CERT": tls.cert_file, "ETCDCTL_KEY": tls.key_file}
    values = {
        "ETCDCTL_API": "3",
        "ETCDCTL_ENDPOINTS": ",".join(url_of(endpoint, scheme) for endpoint in parse_endpoints(endpoints)),
        **{name: str(Path(file).absolute()) if file else "" for name, file in files.items()},
        "ETCDCTL_USER": security.user,
    }
    if with_password or not security.user:
        values["ETCDCTL_PASSWORD"] = security.password
    lines = [f"export {name}={shlex.quote(value)}" for name, value in values.items() if value]
    if absent := [name for name, value in values.items() if not value]:
        lines.append(f"unset {' '.join(absent)}")
    if security.user and not with_password:
        lines.append("# etcdctl asks for the password, or takes it from ETCDCTL_PASSWORD")
    if tls.server_name:
        lines.append(f"# etcdctl expects the endpoint's host in the certificate, not {tls.server_name}")
    return lines


def _grant(arguments: argparse.Namespace) -> int:
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
    password = getpass.getpass(f"password of {user}, if it is new: ") if arguments.ask else secrets.token_urlsafe(24)
    if not password:
        raise ConfigError("an empty password is none")
    parsed = parse_endpoints(endpoints)
    if roles:
        work = grant_roles(parsed, security, namespace, roles, user, password)
    else:
        work = grant_namespace(parsed, security, namespace, user, password)
    granted, made = asyncio.run(work), "" if arguments.ask else password
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
        return f"/omni/v1/{namespace}/ and /omni/v1-jobs/{namespace}/, and nothing else"
    written = ", ".join(sorted({family for role in roles for family in WRITES[role]})) or "nothing"
    with_jobs = f", and all of /omni/v1-jobs/{namespace}/" if "hub" in roles else ""
    return f"of /omni/v1/{namespace}/ it may write {written}{with_jobs}"


def _command(roles: Sequence[str]) -> str:
    """What such a user is for."""
    usual = {"hub": "serve --hub-only", "replica": "serve --headless", "operator": "drain", "observer": "replicas"}
    return usual[roles[0]] if len(roles) == 1 else "serve"
