"""What every engine says that puts out pictures, whatever draws them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from stage_runtime.engines.base import StageRequest


class PictureOutput(ABC):
    """The base of such an engine."""

    @property
    def modality(self) -> str:
        """See Engine."""
        return "image"

    @property
    def not_resumable(self) -> None:
        """See Engine. A second attempt draws the picture again, from the same seed."""
        return None

    @abstractmethod
    def add(self, request: StageRequest) -> None:
        """See Engine."""

    def update(self, request: StageRequest) -> None:
        """See SegmentEngine. Each segment is a picture of its own."""
        self.add(request)
