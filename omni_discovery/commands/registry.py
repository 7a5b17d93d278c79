"""How the commands find the registry and log in to it: flags, environment variables and files."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.commands.output import quiet_logging, say
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_discovery.deploy.trust.bounds import Bounds
    from omni_discovery.etcd.config import RegistrySecurity
    from omni_discovery.kv import KVStore
    from omni_discovery.records.schema import HubRecord

#: How long etcd may take to answer a command that a person waits for.
ANSWER_S: Final = 5.0
_CALL_S: Final = 4.0


def add_registry_options(parser: argparse.ArgumentParser, *, must_be_named: bool = False) -> argparse._ArgumentGroup:
    """Add the flags for the registry and the namespace; return their group, for flags of the command's own.

    ``must_be_named``: no namespace of the environment is taken.
    """
    group = parser.add_argument_group("the registry")
    group.add_argument(
        "--etcd-endpoints",
        metavar="HOST:PORT[,...]",
        default=os.environ.get("OMNI_ETCD_ENDPOINTS"),
        help="the etcd cluster (default: $OMNI_ETCD_ENDPOINTS)",
    )
    if must_be_named:
        group.add_argument("--namespace", required=True, metavar="NAME", help="which deployment on that etcd")
    else:
        add_namespace_option(group)
    add_security_options(parser)
    return group


def add_namespace_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--namespace``."""
    parser.add_argument(
        "--namespace",
        default=default_namespace(),
        metavar="NAME",
        help="which deployment on that etcd (default: $OMNI_NAMESPACE, else default)",
    )


def default_namespace(fallback: str = "default") -> str:
    """The namespace of a command that names none: that of the environment, else ``fallback``."""
    return os.environ.get("OMNI_NAMESPACE") or fallback


def add_trust_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags about what a pipeline that comes from etcd may have done on this host."""
    from omni_discovery.deploy.trust.bounds import PLAIN_KINDS, VALUED

    kinds = ", ".join([*(f"{kind}=..." for kind in VALUED), *PLAIN_KINDS])
    parser.add_argument(
        "--allow",
        action="append",
        metavar="KIND[=VALUE]",
        help="what a pipeline that comes from etcd may use here beyond built-in engines and safetensors, for example"
        f" target=my_models (repeatable; there are {kinds}; default: $OMNI_ALLOW, with commas, else nothing more)",
    )
    parser.add_argument(
        "--model-root",
        action="append",
        metavar="FOLDER",
        help="where the models of a pipeline that comes from etcd may lie (repeatable; default: $OMNI_MODEL_ROOT, with"
        " colons, else /models and the folder of this start, unless it is / or others can write there); the model hub's"
        " cache always. What is below a folder that is named here is taken, whoever else can change it",
    )


def read_bounds(arguments: argparse.Namespace) -> Bounds:
    """What the flags of ``add_trust_options``, or their variables, and MODEL allow. Raise ConfigError."""
    from omni_discovery.deploy.trust.bounds import Bounds, read_allow

    said = os.environ.get("OMNI_ALLOW", "").split(",") if arguments.allow is None else arguments.allow
    allow = read_allow([text.strip() for text in said if text.strip()])
    named = arguments.model_root
    if named is None:
        named = [folder for folder in os.environ.get("OMNI_MODEL_ROOT", "").split(":") if folder]
    cache = os.environ.get("HF_HUB_CACHE") or str(
        Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    )
    # Who names a model on this host's own command line wants it served here, as ``Bounds.owning`` has it.
    own = (f"model={model}",) if (model := getattr(arguments, "model", None)) else ()
    return Bounds(
        allow=(*allow, *own),
        model_roots=_both_paths([*(named or _usual_roots()), cache, str(_OWN_MODELS)]),
        named_roots=_both_paths(named),
    )


def _both_paths(folders: Sequence[str]) -> tuple[str, ...]:
    """The folders' full paths, as given and with all links followed."""
    paths = [Path.cwd() / Path(folder).expanduser() for folder in folders]
    return tuple(dict.fromkeys(text for path in paths for text in (os.path.normpath(path), str(path.resolve()))))


#: The demo's models, which come with the product.
_OWN_MODELS: Final = Path(__file__).resolve().parents[2] / "stage_runtime" / "demo"


def _usual_roots() -> list[str]:
    from omni_discovery.processes import is_unshared

    here = Path.cwd()
    return [str(here)] * (here != Path("/") and is_unshared(here)) + ["/models"]


def add_security_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for TLS and login. None takes the password itself: all users of a machine can read flags."""
    group = parser.add_argument_group("a secured etcd")
    group.add_argument("--etcd-ca", metavar="PEM", default="", help="who signed etcd's certificate; turns TLS on")
    group.add_argument("--etcd-cert", metavar="PEM", default="", help="our certificate, where etcd asks for one")
    group.add_argument("--etcd-key", metavar="PEM", default="", help="the key of --etcd-cert")
    group.add_argument("--etcd-server-name", metavar="NAME", default="", help="the name in etcd's certificate")
    group.add_argument("--etcd-user", metavar="NAME", default="", help="log in; the password is $OMNI_ETCD_PASSWORD")
    group.add_argument("--etcd-password-file", metavar="FILE", default="", help="the password's file, instead")


def read_security(arguments: argparse.Namespace) -> RegistrySecurity:
    """Return what the flags of add_security_options, with the password, come to. Raise ConfigError."""
    from omni_discovery.etcd.config import RegistrySecurity, RegistryTls

    files = {
        "ca_file": arguments.etcd_ca,
        "cert_file": arguments.etcd_cert,
        "key_file": arguments.etcd_key,
        "server_name": arguments.etcd_server_name,
    }
    tls = RegistryTls(**files) if any(files.values()) else None
    if not arguments.etcd_user:
        return RegistrySecurity(tls=tls)
    file = arguments.etcd_password_file
    password = read_password(file) if file else os.environ.get("OMNI_ETCD_PASSWORD", "")
    password_file = str(Path(file).absolute()) if file else ""
    return RegistrySecurity(tls=tls, user=arguments.etcd_user, password=password, password_file=password_file)


def read_password(file: str) -> str:
    """The password in a file, without the line's end. Raise ConfigError if it can't be read."""
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--etcd-password-file {file} can't be read: {error}") from error


#: Variables with secrets of a hub's HTTP ports, and all with secrets: the settings of replicas hold the password.
DOOR_SECRETS: Final = ("VLLM_API_KEY", "OMNI_ADMIN_TOKEN")
SECRETS: Final = ("OMNI_ETCD_PASSWORD", *DOOR_SECRETS)


def child_environment() -> dict[str, str]:
    """Return this process's environment without secrets, for child processes; they load nothing from their folder."""
    # Not at the top: help has to be there at once.
    from omni_discovery.processes import reads_own_files

    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return kept | reads_own_files(kept)


def take_secrets(names: Sequence[str] = SECRETS) -> dict[str, str]:
    """Take secrets out of this process's environment, and return them."""
    return {name: os.environ.pop(name) for name in names if name in os.environ}


def user_runtime_dir() -> Path:
    """The folder in which this user's embedded etcd leaves its endpoint."""
    from omni_discovery.processes import runtime_dir

    return runtime_dir(os.environ.get("XDG_RUNTIME_DIR"))


def clients_key() -> str:
    """The key of hubs' APIs that this environment has; empty if it has none."""
    return os.environ.get("VLLM_API_KEY", "")


def operators_token() -> str:
    """The token of hubs' ports for operators that this environment has; empty if it has none."""
    return os.environ.get("OMNI_ADMIN_TOKEN", "")


def find_endpoints(arguments: argparse.Namespace) -> str:
    """The endpoints that the flags name, else those of this user's embedded etcd. Raise ConfigError if neither is."""
    from omni_discovery.etcd.config import parse_endpoints
    from omni_discovery.etcd.embedded_file import embedded_namespaces, read_embedded

    if arguments.etcd_endpoints:
        parse_endpoints(arguments.etcd_endpoints)
        return str(arguments.etcd_endpoints)
    embedded = read_embedded(user_runtime_dir(), arguments.namespace)
    if embedded is None:
        match embedded_namespaces(user_runtime_dir()):
            case []:
                others = ""
            case [other]:
                others = f"; one of {other!r} does: add --namespace {other}"
            case names:
                others = f"; those of {', '.join(names)} do: choose with --namespace"
        raise ConfigError(
            f"no etcd known: give --etcd-endpoints HOST:PORT or set OMNI_ETCD_ENDPOINTS "
            f"(no embedded etcd of namespace {arguments.namespace!r} runs on this machine{others})"
        )
    return embedded.endpoint


def registry_flags(arguments: argparse.Namespace) -> list[str]:
    """The flags of ``add_registry_options`` that lead to the same registry, for commands that are shown to paste.

    Files are named by their whole path. No password is among them.
    """
    flags = []
    if arguments.etcd_endpoints:
        flags += ["--etcd-endpoints", arguments.etcd_endpoints]
    flags += ["--namespace", arguments.namespace]
    for name in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file"):
        if file := getattr(arguments, name):
            flags += [f"--{name.replace('_', '-')}", str(Path(file).absolute())]
    for name in ("etcd_server_name", "etcd_user"):
        if value := getattr(arguments, name):
            flags += [f"--{name.replace('_', '-')}", value]
    return flags


async def read_hub_records(kv: KVStore, namespace: str) -> list[HubRecord]:
    """The records of a namespace's hubs, without those that can't be read; of too many the first. Raise RegistryError.

    How many are left out is said on standard error.
    """
    from omni_discovery.errors import RecordError
    from omni_discovery.records import keys
    from omni_discovery.records.schema import decode_hub
    from omni_discovery.view.record_bounds import MOST_HUBS, RecordBounds, too_many

    found = []
    items, bounds = (await kv.list(keys.hubs_prefix(namespace))).items, RecordBounds(MOST_HUBS)
    bounds.fill(items)
    if bounds.refused_count:
        say(f"{too_many(bounds.refused_count, 'hubs')}; omni doctor says what to do", error=True)
    for item in items:
        key = keys.parse_key(namespace, item.key)
        if isinstance(key, keys.HubKey) and bounds.is_read(item.key):
            with suppress(RecordError):
                found.append(decode_hub(item.key, key.hub_id, item.value))
    return found


async def tell_if_empty(kv: KVStore, namespace: str) -> int:
    """Say on standard error that a namespace has no key at all, and which others there are; return 0."""
    from omni_discovery.etcd.check import explain_empty

    if text := await explain_empty(kv, namespace):
        say(text, error=True)
    return 0


def with_registry(arguments: argparse.Namespace, work: Callable[[KVStore], Any]) -> int:
    """Connect to etcd, await ``work``, disconnect; return the exit code that ``work`` returns.

    Raise ConfigError without an etcd to connect to, RegistryError that names what to correct if it does not answer.
    """
    import asyncio

    from omni_discovery.etcd.check import check_registry
    from omni_discovery.etcd.config import RegistryConfig
    from omni_discovery.view.families import NamespaceReader

    quiet_logging()
    endpoints, security = find_endpoints(arguments), read_security(arguments)
    check_registry(RegistryConfig(endpoints, arguments.namespace, security), ANSWER_S)

    async def connected() -> int:
        kv = NamespaceReader(arguments.namespace, endpoints, security=security, call_timeout_s=_CALL_S)
        try:
            return int(await work(kv))
        finally:
            await kv.close()

    return asyncio.run(connected())
