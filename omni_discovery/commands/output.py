"""Output of the commands: answers on standard output, errors on standard error, and logging."""

from __future__ import annotations

import logging
import os
import sys


def say(text: str, *, error: bool = False) -> None:
    """Print one line on standard output, with ``error`` on standard error."""
    stream = sys.stderr if error else sys.stdout
    stream.write(f"omni: {text}\n" if error else f"{text}\n")
    stream.flush()


def configure_logging(*, verbose: bool = False) -> None:
    """Log to standard error, one line for each transition; ``verbose`` adds debug lines."""
    # gRPC's core writes a line of its own for each attempt that fails; ours says what is wrong, once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def quiet_logging() -> None:
    """Log only what needs an operator now, and never between the lines of an answer: for commands that print one."""
    logging.basicConfig(level=logging.ERROR, format="omni: %(message)s", stream=sys.stderr)
