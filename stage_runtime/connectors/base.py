"""The connector API: what moves a hand-off from the stage that made it to the stage that wants it.

Who owns what: a stored hand-off is its producer's until it drops it (``cleanup``, ``close``, the end of its time to
live, a fetch that consumed it); the memory of an object that ``get`` returned is the consumer's until the last tensor
in it is garbage-collected or ``release`` is called; what a process leaves when it is killed is the next connector's to
sweep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from stage_runtime.connectors.serialization import deserialize, serialize


class OmniConnectorBase(ABC):
    """One edge's transport. Its methods may be called from any thread."""

    #: Whether ``get`` may return raw bytes or buffers instead of an object.
    supports_raw_data: bool = False
    #: Why the last ``put`` answered False; empty before that.
    last_error: str = ""

    @abstractmethod
    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Store an object; return whether that went well, its serialized size in bytes, and metadata for ``get``."""

    @abstractmethod
    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """The object and its serialized size in bytes; None if it is not there.

        Consumes it, unless the metadata says ``consume: False``. ``timeout_s`` in the metadata bounds this one fetch.
        Raise SerializationError for content that is no hand-off, TransferError if it can't be reached in time.
        """

    @abstractmethod
    def cleanup(self, request_id: str) -> None:
        """Drop what was put for a request and not fetched. Unknown requests are fine."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Whether it works, and counters; ``status`` is ``healthy`` or ``unhealthy``."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything, what nobody fetched included. Idempotent."""

    def release(self, obj: Any) -> None:
        """Give the memory of an object that ``get`` returned back now; its tensors must not be used any more.

        Without this call it goes back with the last of them. Any other object is fine.
        """
        del obj

    def endpoint(self) -> dict[str, Any]:
        """Where consumers reach this producer, for the replica's record: text and numbers, nothing secret.

        Empty where they need nothing but the metadata of ``put``. Raise OSError if it can't be reached at all.
        """
        return {}

    def cancel(self, get_key: str) -> None:
        """Have fetches of that key that other threads are in end soon, with TransferCancelledError."""
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
