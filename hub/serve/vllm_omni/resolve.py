"""``omni serve MODEL --omni`` and deploy files in vLLM-Omni's own dialect: vLLM-Omni says which stages these are.

It is asked in a process of its own, by the Python that has it; the hub's needs neither vLLM nor torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from omni_discovery.commands.registry import child_environment
from omni_discovery.commands.stage_options import run_with_config
from omni_discovery.deploy.document import DeployConfig
from omni_discovery.deploy.overrides import of_this_host, parse_overrides
from omni_discovery.deploy.resolution import ResolveRequest, is_peers, read_answer
from omni_discovery.errors import ConfigError

logger = logging.getLogger(__name__)

#: Importing vLLM-Omni takes from 10 s to a minute; a model's config may have to be fetched.
_RESOLVE_S: Final = 300.0
FLAG: Final = "--omni-python"


def add_omni_options(group: argparse._ActionsContainer) -> None:
    """Add the flags that concern vLLM-Omni alone."""
    group.add_argument(
        "--omni",
        action="store_true",
        help="with MODEL and no --deploy-config: the pipeline that vLLM-Omni knows for it, with the deploy file that it"
        " ships; else it changes nothing",
    )
    group.add_argument(
        FLAG,
        metavar="PATH",
        default="",
        help="this host's Python with vLLM-Omni in it, such as /opt/omni/bin/python: it says which stages MODEL or a"
        " deploy file of vLLM-Omni has, and runs those of engine 'vllm-omni' here (default: the one that runs this)",
    )


def check_omni_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a Python that is none."""
    python = arguments.omni_python
    if python and not (Path(python).is_absolute() and os.access(python, os.X_OK)):
        raise ConfigError(f"{FLAG} is {python}; right would be the path of a program, as /opt/omni/bin/python")


def asks_vllm_omni(arguments: argparse.Namespace) -> bool:
    """Whether the stages of this command are for vLLM-Omni to say."""
    if arguments.headless or not arguments.model:
        return False
    if arguments.deploy_config is None:
        return bool(arguments.omni)
    if _is_shipped(arguments):
        return True
    try:
        if any("engine" in part for part in parse_overrides(arguments.stage_overrides).values()):
            return False
        text = Path(arguments.deploy_config).read_text(encoding="utf-8")
        return is_peers(text, str(arguments.deploy_config))
    except (OSError, UnicodeDecodeError, ConfigError):
        # Told when the file is loaded.
        return False


def _is_shipped(arguments: argparse.Namespace) -> bool:
    """Whether the deploy file is a name that may be among those that vLLM-Omni ships."""
    file = Path(arguments.deploy_config)
    return bool(arguments.omni) and not file.exists() and file.parent == Path()


def python_of_omni(arguments: argparse.Namespace) -> str:
    """The Python of this host that has vLLM-Omni in it; empty if none is known. Raise ConfigError."""
    if arguments.omni_python:
        return str(arguments.omni_python)
    named = (runtime.get("python") for runtime in of_this_host(parse_overrides(arguments.stage_overrides)).values())
    if found := next((python for python in named if isinstance(python, str)), ""):
        return found
    return sys.executable if importlib.util.find_spec("vllm_omni") is not None else ""


def resolve_request(
    arguments: argparse.Namespace,
    engine_args: dict[str, object],
    served_name: str,
    overrides: dict[int, dict[str, object]],
) -> ResolveRequest:
    """What these flags ask vLLM-Omni. A folder is named in full: the process runs elsewhere."""
    model, file = str(arguments.model), arguments.deploy_config
    if Path(model).exists():
        model = str(Path(model).absolute())
    if file is not None:
        file = str(file) if _is_shipped(arguments) else str(Path(file).absolute())
    return ResolveRequest(
        model=model,
        deploy_file=file or "",
        served_name=served_name or str(arguments.model),
        async_chunk=arguments.async_chunk,
        engine_args=engine_args,
        overrides=overrides,
    )


def resolve_document(python: str, request: ResolveRequest) -> DeployConfig:
    """Have vLLM-Omni resolve a pipeline, and log what the document does not hold. Raise ConfigError."""
    logger.info("deploy.resolving model=%s python=%s: vLLM-Omni takes up to a minute", request.model, python)
    deploy, resolved = read_answer(_ask(python, request), request, f"vLLM-Omni's pipeline of {request.model}")
    stages = [stage.stage_id for stage in deploy.stages]
    logger.info("deploy.resolved pipeline=%s platform=%s stages=%s", resolved.pipeline, resolved.platform, stages)
    for text in resolved.left_out:
        logger.warning("deploy.left_out %s", text)
    return deploy


def _ask(python: str, request: ResolveRequest) -> bytes:
    command = [python, "-u", "-P", "-m", "stage_runtime", "--resolve", "--config-fd"]
    try:
        ended = run_with_config(lambda config_fd: [*command, str(config_fd)], request, child_environment(), _RESOLVE_S)
    except OSError as error:
        raise ConfigError(f"{FLAG} {python} can't be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{python}: vLLM-Omni has not resolved {request.model} within {_RESOLVE_S:g} s") from error
    if not ended.returncode:
        return ended.stdout
    said = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    last = next((line for line in reversed(said) if line.startswith("omni: ")), said[-1] if said else "").removeprefix(
        "omni: "
    )
    if "No module named" in last:
        last = (
            f"{python} lacks what resolving needs: {last}; install it there: {python} -m pip install"
            " 'omni-discovery[vllm-omni]'"
        )
    raise ConfigError(last or f"{python}: vLLM-Omni has ended with code {ended.returncode} and said nothing")


def without_python(arguments: argparse.Namespace, waiting: Sequence[str] = ()) -> ConfigError:
    """The error of a hub that can't resolve, where etcd has no pipeline either; ``waiting`` are hosts of stages."""
    what = f"MODEL {arguments.model} --omni"
    if arguments.deploy_config is not None:
        what = f"{arguments.deploy_config}, in which no stage says an engine, so that it counts as vLLM-Omni's,"
    etcd = "and etcd has no pipeline yet" if arguments.etcd_endpoints else "and no --etcd-endpoints is given"
    hosts = f" (those that wait for it: {', '.join(waiting)})" if waiting else ""
    return ConfigError(
        f"{what} is for vLLM-Omni to resolve: this Python has none, {etcd}. Name one of this host ({FLAG}"
        f" /opt/omni/bin/python), or start the first hub on a host that has one, as every host of these stages"
        f" has{hosts}: the pipeline is in etcd then, and this hub takes it from there"
    )
