"""The ``omni`` command. Its sub-commands are entry points of the group ``omni_discovery.commands``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, Protocol

from omni_discovery import __version__
from omni_discovery.errors import ConfigError, OmniError, RegistryUnavailableError
from omni_discovery.etcd.config import RegistrySecurity, RegistryTls, parse_endpoints
from omni_discovery.etcd.embedded_file import read_embedded
from omni_discovery.runtime_dir import runtime_dir

GROUP: Final = "omni_discovery.commands"

_ANSWER_S: Final = 5.0


class Command(Protocol):
    """One sub-command. ``run`` returns the exit code and may raise OmniError: one clear line, exit code 2 or 1."""

    summary: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it."""


def main(argv: list[str] | None = None) -> int:
    """Run ``omni``; return the exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="omni", description="Serve multi-stage models on many hosts, without a head.")
    parser.add_argument("--version", action="version", version=f"omni {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _add(commands, entry)
    arguments = parser.parse_args(argv)
    try:
        code = int(arguments.command.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who read has had enough; the interpreter must not try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        return _complain(error, 2)
    except OmniError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130


def configure_logging(*, verbose: bool = False) -> None:
    """One line per transition on standard error."""
    # gRPC's core writes a line of its own for each attempt that fails; ours says what is wrong, once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def quiet_logging() -> None:
    """For a command that prints an answer: only what needs a person now, and never between its lines."""
    logging.basicConfig(level=logging.ERROR, format="omni: %(message)s", stream=sys.stderr)


def add_registry_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags that say which registry and which namespace; returns their group."""
    group = parser.add_argument_group("the registry")
    group.add_argument(
        "--etcd-endpoints",
        metavar="HOST:PORT[,...]",
        default=os.environ.get("OMNI_ETCD_ENDPOINTS"),
        help="the etcd cluster (default: $OMNI_ETCD_ENDPOINTS)",
    )
    group.add_argument(
        "--namespace", default="default", metavar="NAME", help="which deployment on that etcd (default: %(default)s)"
    )
    add_security_options(parser)
    return group


def add_security_options(parser: argparse.ArgumentParser) -> None:
    """The flags for TLS and login. There is none for the password itself: every user of a machine can read flags."""
    group = parser.add_argument_group("a secured etcd")
    group.add_argument("--etcd-ca", metavar="PEM", default="", help="who signed etcd's certificate; turns TLS on")
    group.add_argument("--etcd-cert", metavar="PEM", default="", help="our certificate, where etcd asks for one")
    group.add_argument("--etcd-key", metavar="PEM", default="", help="the key of --etcd-cert")
    group.add_argument("--etcd-server-name", metavar="NAME", default="", help="the name in etcd's certificate")
    group.add_argument("--etcd-user", metavar="NAME", default="", help="log in; the password is $OMNI_ETCD_PASSWORD")
    group.add_argument("--etcd-password-file", metavar="FILE", default="", help="the password's file, instead")


def read_security(arguments: argparse.Namespace) -> RegistrySecurity:
    """What the flags of add_security_options say. Raise ConfigError."""
    asked = {
        "ca_file": arguments.etcd_ca,
        "cert_file": arguments.etcd_cert,
        "key_file": arguments.etcd_key,
        "server_name": arguments.etcd_server_name,
    }
    tls = RegistryTls(**asked) if any(asked.values()) else None
    if not arguments.etcd_user:
        return RegistrySecurity(tls=tls)
    return RegistrySecurity(tls=tls, user=arguments.etcd_user, password=_read_password(arguments.etcd_password_file))


def _read_password(file: str) -> str:
    if not file:
        return os.environ.get("OMNI_ETCD_PASSWORD", "")
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--etcd-password-file {file} can't be read: {error}") from error


def child_environment() -> dict[str, str]:
    """The environment of this process for one that it starts, without the password: the settings hold that."""
    return {name: value for name, value in os.environ.items() if name != "OMNI_ETCD_PASSWORD"}


def user_runtime_dir() -> Path:
    """Where this user's embedded etcd leaves its endpoint."""
    return runtime_dir(os.environ.get("XDG_RUNTIME_DIR"))


def find_endpoints(arguments: argparse.Namespace) -> str:
    """The endpoints that the flags name, else those of this user's embedded etcd. Raise ConfigError without any."""
    if arguments.etcd_endpoints:
        parse_endpoints(arguments.etcd_endpoints)
        return str(arguments.etcd_endpoints)
    embedded = read_embedded(user_runtime_dir(), arguments.namespace)
    if embedded is None:
        raise ConfigError(
            f"no etcd known: give --etcd-endpoints HOST:PORT or set OMNI_ETCD_ENDPOINTS "
            f"(no embedded etcd of namespace {arguments.namespace!r} runs on this machine)"
        )
    return embedded.endpoint


class ReplicasCommand:
    """``omni replicas``: the live table of stages and replicas."""

    summary = "show the stages and their replicas"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add_registry_options(parser)
        parser.add_argument("--watch", action="store_true", help="keep showing it until Ctrl-C")
        parser.add_argument("--json", action="store_true", help="print the records as JSON lines instead")

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command."""
        from rich.console import Console
        from rich.live import Live

        from omni_discovery.clients import OmniCoordClientForHub
        from omni_discovery.commands.replicas import replica_json, replica_table
        from omni_discovery.etcd.check import check_registry, empty_namespace_text, read_namespaces
        from omni_discovery.etcd.config import RegistryConfig

        quiet_logging()
        endpoints, security = find_endpoints(arguments), read_security(arguments)
        check_registry(RegistryConfig(endpoints, arguments.namespace, security), _ANSWER_S)
        console = Console()
        with OmniCoordClientForHub(
            endpoints,
            namespace=arguments.namespace,
            tls=security.tls,
            user=security.user,
            password=security.password,
        ) as client:
            try:
                client.wait_synced(timeout_s=_ANSWER_S)
            except TimeoutError as error:
                raise RegistryUnavailableError(f"no etcd answered at {endpoints}: correct --etcd-endpoints") from error
            if arguments.json:
                for line in replica_json(client.view()):
                    sys.stdout.write(line + "\n")
            elif arguments.watch:
                with Live(console=console, refresh_per_second=4) as live:
                    while True:
                        live.update(replica_table(client.view(), arguments.namespace, time.time(), console.width))
                        time.sleep(0.25)
            else:
                console.print(replica_table(client.view(), arguments.namespace, time.time(), console.width))
            view = client.view()
        if not (view.replicas or view.hubs or view.pipeline):
            names = read_namespaces(endpoints, security)
            sys.stderr.write(f"omni: {empty_namespace_text(arguments.namespace, names)}\n")
        return 0


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], entry: EntryPoint) -> None:
    try:
        command: Command = entry.load()()
    except ImportError as error:
        # One broken third-party command must not take the others away.
        sys.stderr.write(f"omni: the command {entry.name!r} can't be loaded: {error}\n")
        return
    parser = commands.add_parser(entry.name, help=command.summary, description=command.summary)
    command.add_arguments(parser)
    parser.set_defaults(command=command)


def _complain(error: OmniError, code: int) -> int:
    sys.stderr.write(f"omni: {error}\n")
    return code
