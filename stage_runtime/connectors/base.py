"""The connector API: what moves a hand-off from the stage that made it to the stage that wants it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from stage_runtime.connectors.serialization import deserialize, serialize


class OmniConnectorBase(ABC):
    """One edge's transport. An instance is used by one thread."""

    #: Whether ``get`` may return raw bytes or buffers instead of an object.
    supports_raw_data: bool = False

    @abstractmethod
    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Store an object; return whether that went well, its serialized size in bytes, and metadata for ``get``."""

    @abstractmethod
    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """The object and its serialized size in bytes; None if it is not there."""

    @abstractmethod
    def cleanup(self, request_id: str) -> None:
        """Drop what was put for a request and not fetched. Unknown requests are fine."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Whether it works, and counters; ``status`` is ``healthy`` or ``unhealthy``."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything, what nobody fetched included. Idempotent."""

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
