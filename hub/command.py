"""The sub-command ``omni serve``: a hub with its local stages, or (``--headless``) only replicas of one stage."""

from __future__ import annotations

import argparse


class ServeCommand:
    """``omni serve [MODEL]``."""

    summary = "serve a pipeline: a hub with its local stages, or only replicas with --headless"

    unknown_flag_hint = (
        """; an argument of a newer vLLM goes into engine_args: --stage-overrides '{"N": {"engine_args": {...}}}'"""
        " with the stage's id in place of N"
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See omni_discovery.commands.main.Command."""
        from hub.serve.flags import add_serve_options

        add_serve_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """See omni_discovery.commands.main.Command."""
        from hub.cli import serve

        return serve(arguments)
