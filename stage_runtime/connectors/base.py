"""The connector API: moves a hand-off from the stage that made it to a stage that needs it.

Ownership: a stored hand-off belongs to its producer, which drops it at ``cleanup``, at ``close``, at the end of its
time to live, or after a fetch that consumed it. The memory of an object that ``get`` returned belongs to the consumer
until the last tensor in it is garbage-collected or ``release`` is called. What a killed process leaves is removed by
the next connector that starts on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from stage_runtime.connectors.serialization import deserialize, serialize

_producer: Final[ContextVar[str]] = ContextVar("producer", default="")


@contextmanager
def fetching_from(producer: str) -> Iterator[None]:
    """What this thread fetches meanwhile was handed over by the replica of this name; empty for an unknown one."""
    token = _producer.set(producer)
    try:
        yield
    finally:
        _producer.reset(token)


def current_producer() -> str:
    """The replica whose hand-off this thread fetches; empty if that is not known."""
    return _producer.get()


class OmniConnectorBase(ABC):
    """The transport of one edge. Its methods may be called from any thread."""

    #: Whether ``get`` may return raw bytes or buffers instead of an object.
    supports_raw_data: bool = False
    #: Why the last ``put`` answered False; empty before that.
    last_error: str = ""

    @abstractmethod
    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Store an object; return whether it is stored, its serialized size in bytes, and the metadata for ``get``.

        The object is copied, so the caller may change or drop it afterwards; of a ManagedBuffer a share is kept, and
        only releasing it is safe. An object under the same key is replaced.
        Storing that fails, for want of memory or beyond the edge's limits, returns ``(False, 0, None)`` and sets
        ``last_error``.
        """

    @abstractmethod
    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """The object and its serialized size in bytes; None if it is not stored any more.

        Consumes it, unless the metadata says ``consume: False``: then the producer keeps it for other consumers.
        ``timeout_s`` in the metadata bounds this one fetch. Raise SerializationError for content that is no hand-off,
        TransferTimeoutError past the bound, TransferCancelledError after ``cancel`` or ``close``, TransferError if the
        producer or the store can't be reached.
        """

    @abstractmethod
    def cleanup(self, request_id: str) -> None:
        """Drop the stored objects of a request: its id, or keys that begin or end with it and an underscore.

        Unknown requests are ignored.
        """

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """``status``, ``healthy`` or ``unhealthy``, a ``reason`` if it is the latter, and counters.

        Raise ConfigError if it can't become healthy without a change of its configuration.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop every stored object and end the fetches under way. Fetched objects stay valid. Idempotent."""

    def release(self, obj: Any) -> None:
        """Release the memory of an object that ``get`` returned now; its tensors must not be used any more.

        Without this call it is released with the last of the tensors. Any other object is ignored.
        """
        del obj

    def endpoint(self) -> dict[str, Any]:
        """Where consumers reach this producer, for the replica's record: text and numbers, nothing secret.

        Empty if consumers need nothing but the metadata of ``put``. Raise OSError if it can't listen.
        """
        return {}

    def is_inline(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a stored object is in these metadata of its ``put``, and so small that it is read at once.

        All others are fetched in a thread of their own.
        """
        del metadata
        return False

    def cancel(self, get_key: str) -> None:
        """End fetches of a key in other threads soon; they raise TransferCancelledError."""
        del get_key

    @staticmethod
    def serialize_obj(obj: Any) -> bytes:
        """An object as bytes. Raise SerializationError if it holds what can't be sent."""
        return serialize(obj)

    @staticmethod
    def deserialize_obj(data: bytes) -> Any:
        """The object that ``serialize_obj`` wrote. Raise SerializationError for any other bytes."""
        return deserialize(data)

    def __enter__(self) -> OmniConnectorBase:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
