"""A connector that holds one hand-off for every key, and keeps what it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stage_runtime.connectors.base import OmniConnectorBase


class RecordingConnector(OmniConnectorBase):
    """``holds`` is the hand-off, or the exception that each fetch raises; ``on_get`` is called before."""

    def __init__(self, holds: Any = None, on_get: Callable[[], None] = lambda: None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.holds = holds or {"x": 1}
        self.on_get = on_get
        self.inline = False

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        raise NotImplementedError

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        self.asked.append(metadata or {})
        self.on_get()
        if isinstance(self.holds, Exception):
            raise self.holds
        return self.holds, 1

    def is_inline(self, metadata: Mapping[str, Any]) -> bool:
        return self.inline

    def cancel(self, get_key: str) -> None:
        self.cancelled.append(get_key)

    def cleanup(self, request_id: str) -> None:
        raise NotImplementedError

    def health(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass
