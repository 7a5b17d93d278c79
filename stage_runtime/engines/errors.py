"""Classify an engine's exception: the failure kind of its request, and whether memory was short. Pure.

Errors of libraries that may be absent are recognised by class name and message.
"""

from __future__ import annotations

from typing import Final

from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import FailureKind
from stage_runtime.config import NotResumableError, PayloadError

#: Out-of-memory errors of torch, by class name.
_MEMORY_TYPES: Final = frozenset({"OutOfMemoryError"})
#: Messages of torch, CUDA, HIP, CANN and vLLM for memory that is short at the moment; vLLM's error is a plain
#: ValueError. vLLM's messages for memory that can never suffice for the engine_args are none of these.
_MEMORY_WORDS: Final = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "available memory on node",
    "free memory on device",
)


#: A panic of a library in Rust, by module and name: no Exception, so that Python programs end by it.
_PANIC: Final = ("pyo3_runtime", "PanicException")


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up what it was asked for. The process and its other work are unharmed."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == _PANIC


def failure_kind(error: BaseException) -> FailureKind:
    """The kind of failure to report for a request whose ``add``, ``update``, ``feed`` or ``pause`` raised ``error``."""
    match error:
        case InvalidRequestError():
            return FailureKind.INVALID
        case PayloadError():
            return FailureKind.PAYLOAD
        case NotResumableError():
            return FailureKind.NOT_RESUMABLE
        case _:
            return FailureKind.ENGINE


def error_of(error: BaseException) -> tuple[FailureKind, str, int]:
    """The ``error`` of an EngineOutput for a request that ``error`` has ended."""
    kind = failure_kind(error)
    status = error.status if isinstance(error, InvalidRequestError) else 400
    return kind, f"{type(error).__name__}: {error}" if kind is FailureKind.ENGINE else str(error), status


def lacks_memory(error: BaseException) -> bool:
    """Whether there was too little memory, in the host or on a device, for what the engine was to do."""
    if isinstance(error, MemoryError) or type(error).__name__ in _MEMORY_TYPES:
        return True
    text = str(error).lower()
    return any(words in text for words in _MEMORY_WORDS)
