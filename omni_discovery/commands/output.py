"""Output of the commands: answers on standard output, errors on standard error, and logging."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_discovery.logs.setup import LogOptions

logger = logging.getLogger(__name__)


def say(text: str, *, error: bool = False) -> None:
    """Print one line on standard output, with ``error`` on standard error.

    What a terminal might obey, since it comes from the registry or a peer, is shown as underscores.
    """
    from omni_discovery.text import harmless

    text = harmless(text)
    if error:
        from omni_discovery.logs.setup import logs_json

        if logs_json():
            logger.error("omni.error: %s", text)
            return
    stream = sys.stderr if error else sys.stdout
    stream.write(f"omni: {text}\n" if error else f"{text}\n")
    stream.flush()


def configure_logging(options: LogOptions | None = None) -> None:
    """Log to standard error, one line for each transition."""
    from omni_discovery.logs.setup import LogOptions, set_up_logging

    options = options or LogOptions()
    # gRPC's core writes a line of its own for each attempt that fails; ours says what is wrong, once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # vLLM, and vLLM-Omni with it, would print its lines where answers go, apart from ours.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if options.is_json:
        # vLLM would print text of its own; its records come to our handler instead, from the level that it was given.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
        logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    set_up_logging(options)


def quiet_logging(*, silent: bool = False) -> None:
    """Log only what needs an operator now, and never between the lines of an answer: for commands that print one.

    ``silent``: log nothing but what breaks down, for commands whose answer says itself what is wrong.
    """
    from omni_discovery.logs.setup import TextFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter("omni: %(message)s"))
    logging.basicConfig(level=logging.CRITICAL if silent else logging.ERROR, handlers=[handler])
