"""The flags of ``omni serve`` for videos, which are made as jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hub.jobs.config import JobsConfig, job_store_of
from hub.jobs.job import JobBounds
from omni_discovery.commands.access.secret_file import read_secret_file
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    import argparse

#: The flags by the field of JobBounds that each sets.
_BOUNDS: Final = {"--max-jobs": "most", "--max-jobs-per-client": "most_per_client", "--job-lifetime": "lifetime_s"}


def add_job_options(parser: argparse._ActionsContainer) -> None:
    """Add the flags. Without one, the default of JobBounds holds."""
    parser.add_argument(
        "--job-store",
        metavar="STORE",
        help="where the files of /v1/videos lie, encrypted: a folder that all hubs of the namespace reach, and nobody"
        " else can write to; or mooncake://HOST:PORT, the master of a Mooncake store (default: each hub keeps its"
        " videos to itself, and they end with it)",
    )
    parser.add_argument(
        "--job-key-file",
        metavar="FILE",
        help="the keys of --job-store, the same on all hubs: 64 hexadecimal digits on each line (openssl rand -hex 32);"
        " the first encrypts, all decrypt; readable by you alone",
    )
    parser.add_argument(
        "--max-jobs", type=int, metavar="N", help="videos that the namespace keeps; more get a 429 (default: 1000)"
    )
    parser.add_argument(
        "--max-jobs-per-client",
        type=int,
        metavar="N",
        help="videos that it keeps for one API key; more get a 429 (default: 100)",
    )
    parser.add_argument(
        "--job-lifetime",
        type=float,
        metavar="SECONDS",
        help="when a video is deleted, counted from its request (default: 86400)",
    )


def check_job_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other, or are a hub's where none runs."""
    given = [flag for flag in ("--job-store", "--job-key-file", *_BOUNDS) if _value(arguments, flag) is not None]
    if given and arguments.headless:
        raise ConfigError(f"{given[0]} is a hub's: leave it out with --headless")
    if given and arguments.api != "omni":
        raise ConfigError(f"{given[0]} is for the hub's own API: leave it out with --api {arguments.api}")
    if bool(arguments.job_store) is not bool(arguments.job_key_file):
        raise ConfigError("--job-store and --job-key-file go together: give both, or none of them")
    if arguments.job_store:
        job_store_of(arguments.job_store)
    _bounds(arguments)


def jobs_config(arguments: argparse.Namespace) -> JobsConfig:
    """The settings of the flags. Raise ConfigError for a file that is wrong."""
    if not arguments.job_store:
        return JobsConfig(bounds=_bounds(arguments))
    from hub.jobs.cipher import read_job_keys

    file = arguments.job_key_file
    keys = read_job_keys(read_secret_file("--job-key-file", file), f"--job-key-file {file}")
    return JobsConfig(job_store_of(arguments.job_store), keys, _bounds(arguments))


def _bounds(arguments: argparse.Namespace) -> JobBounds:
    given = {field: value for flag, field in _BOUNDS.items() if (value := _value(arguments, flag)) is not None}
    usual = JobBounds()
    given.setdefault("most_per_client", min(usual.most_per_client, max(1, given.get("most", usual.most))))
    return JobBounds(**given)


def _value(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag.removeprefix("--").replace("-", "_"))
