"""Commands in files and pages, as ``omni serve`` itself reads them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hub.command import ServeCommand
from hub.serve.flags import check_flags

ETCD = ("--etcd-endpoints", "etcd:2379")


def parsed(words: Sequence[str], *more: str) -> argparse.Namespace:
    """What follows ``omni``, accepted by the product's own parser and checks; raises, or exits, if it is not."""
    assert words[0] == "serve"
    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    arguments = parser.parse_args([*words[1:], *more])
    check_flags(arguments)
    return arguments
