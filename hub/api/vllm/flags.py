"""The flags of vLLM's server, as one argument of ``omni serve``; of every vLLM whose server is put up here."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser, validate_parsed_serve_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

#: Flags of vLLM's server for its listening socket, which the hub opens itself, or for its own engine.
_NOT_HERE: Final = frozenset(
    {
        "host",
        "port",
        "grpc_port",
        "uds",
        "uvicorn_log_level",
        "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
        "h11_max_incomplete_event_size",
        "h11_max_header_count",
        "enable_per_request_metrics",
        "enable_flash_late_interaction",
        # The hub answers CORS itself: all methods and headers, no cookies.
        "allow_credentials",
        "allowed_headers",
        "allowed_methods",
    }
)
_NOT_HERE_PREFIXES: Final = ("ssl_ciphers", "enable_ssl", "data_parallel_", "dp_")
#: Flags that the hub has itself, for every API, with what to give to it.
_OF_THE_HUB: Final = {
    "allowed_origins": "--allowed-origins, outside of --api-args",
    "api_key": "--api-key-file FILE (or --api-key), outside of --api-args",
    "ssl_certfile": "--ssl-certfile, outside of --api-args",
    "ssl_keyfile": "--ssl-keyfile, outside of --api-args",
    "ssl_ca_certs": "--ssl-ca-certs, outside of --api-args",
    "ssl_cert_reqs": "--ssl-cert-reqs, outside of --api-args",
}


def parse_flags(flags: str) -> Namespace:
    """The flags for vLLM's server, as ``vllm serve`` takes them. Raise ConfigError."""
    parser = make_arg_parser(_ApiArgsParser(prog="--api-args", add_help=False))  # type: ignore[no-untyped-call, unused-ignore]
    try:
        usual: Namespace = parser.parse_args([])
        arguments: Namespace = parser.parse_args(shlex.split(flags))
        check_flags(arguments, usual)
        validate_parsed_serve_args(arguments)
        # The hub answers CORS itself. Older releases of vLLM let all pages in unless they are told otherwise.
        arguments.allowed_origins = []
        if arguments.tool_parser_plugin:
            ToolParserManager.import_tool_parser(arguments.tool_parser_plugin)
        if getattr(arguments, "reasoning_parser_plugin", ""):
            ReasoningParserManager.import_reasoning_parser(arguments.reasoning_parser_plugin)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--api-args: {error}".replace("Error: ", "")) from error
    return arguments


def check_flags(arguments: Namespace, usual: Namespace) -> None:
    """Raise ConfigError for flags that would have no effect here."""
    taken = {name for kind in FrontendArgs.__mro__ for name in getattr(kind, "__annotations__", {})}
    taken |= {"enable_log_requests", "reasoning_parser_plugin"}
    for name, value in vars(arguments).items():
        if value == getattr(usual, name, None):
            continue
        flag = f"--{name.replace('_', '-')}"
        if name in _OF_THE_HUB:
            raise ConfigError(f"--api-args: {flag} is a flag of omni serve for every API: give it {_OF_THE_HUB[name]}")
        if name in _NOT_HERE or name.startswith(_NOT_HERE_PREFIXES):
            raise ConfigError(f"--api-args: {flag} has no effect on a hub; leave it out")
        if name not in taken:
            raise ConfigError(f"--api-args: {flag} is the engine's: say it in the stage's engine_args")


class _ApiArgsParser(FlexibleArgumentParser):  # type: ignore[misc, unused-ignore]
    def error(self, message: str) -> Any:
        raise ConfigError(f"--api-args: {message}")
