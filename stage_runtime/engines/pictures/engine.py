"""What all engines of pictures share, whichever library draws: requests, batches and aborts."""

from __future__ import annotations

import time

from stage_runtime.engines.base import EngineOutput, StageRequest
from stage_runtime.engines.pictures.drawer import PictureDrawer
from stage_runtime.engines.pictures.output import PictureOutput
from stage_runtime.engines.pictures.request import Traits, read_picture


class PictureEngine(PictureOutput):
    """See Engine. One pipeline, drawing one batch at a time; a subclass loads it and calls ``_begin``."""

    def __init__(self) -> None:
        #: See DescribedEngine.
        self.model_details: dict[str, str] = {}
        self._traits: Traits | None = None
        self._drawer: PictureDrawer | None = None

    @property
    def gives_partial_images(self) -> bool:
        """See PartialImageEngine."""
        return self._traits is not None and self._traits.gives_partial_images

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if self._drawer is None or self._traits is None:
            raise RuntimeError("the engine is not loaded")
        self._drawer.add(request.key, read_picture(request, self._traits), request.priority)

    def abort(self, key: str) -> None:
        """See Engine. The batch goes on for its other requests; without any, it ends after its present step."""
        if self._drawer is not None:
            self._drawer.abort(key)

    def has_unfinished(self) -> bool:
        """See Engine."""
        return self._drawer is not None and self._drawer.has_unfinished()

    def moved_at_s(self) -> float:
        """See ThreadedEngine."""
        return time.monotonic() if self._drawer is None else self._drawer.moved_at_s()

    def step(self) -> list[EngineOutput]:
        """See Engine. Waits up to 20 ms for events of the pipeline."""
        if self._drawer is None:
            raise RuntimeError("the engine is not loaded")
        return self._drawer.step()

    def close(self) -> None:
        """See Engine."""
        drawer, self._drawer = self._drawer, None
        if drawer is not None:
            drawer.close()

    def _begin(self, traits: Traits, drawer: PictureDrawer) -> None:
        """Take requests for a loaded pipeline."""
        self._traits, self._drawer = traits, drawer
