"""Runs ``omni serve``: a hub with its local stages, or (``--headless``) only replicas of one stage."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from hub.api.door.command_line import shows_key, without_keys
from hub.api.door.flags import read_door
from hub.serve.flags import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    check_flags,
    check_servers_with,
    hub_config,
    warn_of_ignored_flags,
)
from hub.serve.plan import deploy_of, plan_on_host, stages_on_host, supervisor_options
from omni_discovery.balancing.policies import DEFAULT_POLICY
from omni_discovery.commands.flags import read_labels, read_log_options, warn_if_plain
from omni_discovery.commands.output import configure_logging
from omni_discovery.commands.registry import (
    DOOR_SECRETS,
    child_environment,
    read_security,
    take_secrets,
    user_runtime_dir,
)
from omni_discovery.commands.stage_options import (
    open_config,
    read_config,
    read_stage_options,
    runtime_here,
    stage_command,
)
from omni_discovery.deploy.document import DeployConfig, decode_deploy
from omni_discovery.errors import ConfigError
from omni_discovery.logs.setup import identify_server
from omni_discovery.processes import die_with_parent, raise_descriptor_limit, reads_own_files

if TYPE_CHECKING:
    from hub.serve.api_servers import ServerOptions
    from hub.serve.running_hub import ServeConfig

logger = logging.getLogger(__name__)

#: Where vLLM-Omni's server keeps finished files; and its former name.
_STORAGE: Final = "VLLM_OMNI_SERVER_STORAGE__PATH"
_STORAGE_NAMES: Final = frozenset((_STORAGE, "VLLM_OMNI_STORAGE_PATH"))


def serve(arguments: argparse.Namespace) -> int:
    """Run ``omni serve`` with these arguments; return the exit code. Raise OmniError for what can't be served."""
    if arguments.api_server_fd is not None:
        return run_further_server(arguments)
    if shows_key(sys.orig_argv) and arguments.api_key:
        _hide_keys(arguments)
    configure_logging(read_log_options(arguments))
    check_flags(arguments)
    warn_of_ignored_flags(arguments)
    if arguments.dry_run:
        return dry_run(arguments)
    if arguments.headless:
        return run_headless(arguments)
    return run_with_hub(arguments)


def _hide_keys(arguments: argparse.Namespace) -> NoReturn:
    """Start this command again without the API keys in it: all users of the machine can read command lines.

    The same process goes on, with the keys in anonymous memory.
    """
    keys_fd = os.memfd_create("omni-keys")
    with os.fdopen(os.dup(keys_fd), "w", encoding="utf-8") as file:
        file.write("\n".join(arguments.api_key))
    os.lseek(keys_fd, 0, os.SEEK_SET)
    os.set_inheritable(keys_fd, True)
    words = [*without_keys(sys.orig_argv[1:]), "--api-key-fd", str(keys_fd)]
    os.execve(sys.executable, [sys.executable, *words], dict(os.environ))  # noqa: S606 - no shell is wanted


def _moved_keys(arguments: argparse.Namespace) -> str:
    if arguments.api_key_fd is None:
        return ""
    try:
        with os.fdopen(arguments.api_key_fd, encoding="utf-8") as file:
            moved = file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-fd is set by omni serve itself: leave it out ({error})") from error
    logger.warning(
        "flag.api_key --api-key: the keys were in the command line for a moment, where every user of this machine sees"
        " them, and are in the shell's history; --api-key-file FILE keeps them out of both"
    )
    return moved


def dry_run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raise OmniError if it can't be carried out."""
    from hub.serve.dry_run import dry_run_headless, dry_run_hub

    if arguments.headless:
        return dry_run_headless(arguments, read_security(arguments))
    return dry_run_hub(arguments, serve_config(arguments, _checked_deploy(arguments)))


def _checked_deploy(arguments: argparse.Namespace) -> DeployConfig:
    deploy = deploy_of(arguments)
    check_servers_with(arguments, deploy, os.environ)
    return deploy


def run_headless(arguments: argparse.Namespace) -> int:
    """Replace this process by the supervisor of one stage's local replicas; does not return. Raise ConfigError."""
    stage_id = arguments.stage_id
    runtime = runtime_here(arguments, stage_id)
    count = arguments.omni_dp_size_local or runtime.get("num_replicas") or 1
    config_fd = open_config(read_stage_options(arguments, stage_id, count, runtime))
    logger.info("stage.starting stage=%d replicas=%d namespace=%s", stage_id, count, arguments.namespace)
    os.set_inheritable(config_fd, True)
    os.execve(sys.executable, stage_command(config_fd, stage_id), child_environment())  # noqa: S606 - no shell is wanted


def run_with_hub(arguments: argparse.Namespace) -> int:
    """Serve over HTTP until a signal comes."""
    config = serve_config(arguments, _checked_deploy(arguments))
    from hub.serve.app import run_hub

    if arguments.parent_pid is not None:
        die_with_parent(arguments.parent_pid)
    # Nothing is loaded from the current folder, which may be anybody's, also by programs that vLLM's server starts.
    os.environ.update(reads_own_files(os.environ))
    if arguments.api == "vllm-omni" and not _STORAGE_NAMES & os.environ.keys():
        # Its server makes a folder as it is imported, which nothing here uses: of a name that anybody may have taken.
        os.environ[_STORAGE] = tempfile.mkdtemp(prefix="omni-storage-")
        atexit.register(shutil.rmtree, os.environ[_STORAGE], ignore_errors=True)
    return run_hub(config)


def run_further_server(arguments: argparse.Namespace) -> int:
    """Serve behind the port of the process that has started this one with its own flags, until a signal comes."""
    from hub.serve.api_servers import ServerOptions, without_first
    from hub.serve.app import run_hub

    options = read_config(arguments.api_server_fd, ServerOptions)
    die_with_parent(options.parent_pid)
    configure_logging(read_log_options(arguments))
    identify_server(options.number)
    without_first(arguments, options)
    deploy = decode_deploy(options.document, "the pipeline of the first API server")
    return run_hub(serve_config(arguments, deploy, options))


def serve_config(
    arguments: argparse.Namespace, deploy: DeployConfig, further: ServerOptions | None = None
) -> ServeConfig:
    """The settings of a hub by its flags, and for a ``further`` API server by what the first has. Raise ConfigError."""
    try:
        import hub.serve.app  # noqa: F401 - imports all packages that a hub needs
        from hub.serve.clients.flags import http_config
        from hub.serve.jobs.flags import jobs_config
        from hub.serve.running_hub import ServeConfig
        from omni_discovery.balancing.policies import build_load_balancer_factory
    except ModuleNotFoundError as error:
        raise ConfigError(f"a hub needs more packages ({error}): pip install 'omni-discovery[hub,embedded]'") from error
    policy = arguments.omni_lb_policy or DEFAULT_POLICY
    try:
        build_load_balancer_factory(policy)
    except ValueError as error:
        raise ConfigError(f"--omni-lb-policy: {error}") from error
    warn_if_plain(arguments.zmq_security)
    descriptors = raise_descriptor_limit("a hub")
    host = DEFAULT_HOST if arguments.host is None else arguments.host
    stages = stages_on_host(arguments, deploy)
    if further is None:
        plan_on_host(arguments, deploy, stages)
        door = read_door(arguments, take_secrets(DOOR_SECRETS), _moved_keys(arguments))
    else:
        door = further.door(read_door(arguments, {}))
    return ServeConfig(
        deploy=deploy,
        hub=hub_config(arguments),
        endpoints=arguments.etcd_endpoints,
        security=read_security(arguments) if further is None else further.security,
        zmq_security=arguments.zmq_security,
        labels=read_labels(arguments.label),
        namespace=arguments.namespace,
        ttl_s=arguments.omni_heartbeat_timeout,
        policy=policy,
        host=host,
        port=DEFAULT_PORT if arguments.port is None else arguments.port,
        local_stages=supervisor_options(stages, arguments, deploy),
        runtime_dir=user_runtime_dir(),
        state_dir=None if further is not None and further.is_embedded else user_state_dir(),
        api_servers=1 if further is not None else arguments.api_server_count,
        further=further,
        api=arguments.api,
        api_flags=arguments.api_args or "",
        door=door,
        http=http_config(arguments, host, descriptors),
        jobs=jobs_config(arguments),
        traces_endpoint=arguments.otlp_traces_endpoint,
        log_stats=arguments.log_stats,
        init_timeout_s=arguments.init_timeout,
        etcd_binary=Path(binary) if (binary := os.environ.get("OMNI_ETCD_BINARY")) else None,
    )


def user_state_dir() -> Path:
    """The folder in which this user's hubs keep their identity and saved view."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "omni"
