"""What the commands write: answers and complaints, and the log of those that serve."""

from __future__ import annotations

import logging
import os
import sys


def say(text: str, *, error: bool = False) -> None:
    """Print one line: of an answer on standard output, with ``error`` a complaint on standard error."""
    stream = sys.stderr if error else sys.stdout
    stream.write(f"omni: {text}\n" if error else f"{text}\n")
    stream.flush()


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
