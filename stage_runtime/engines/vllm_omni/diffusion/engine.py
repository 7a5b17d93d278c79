"""A diffusion stage of vLLM-Omni: text, or what a stage before hands over, in, one PNG out.

vLLM-Omni's worker and models draw, in a thread of their own; requests, batches and aborts are those of every engine of
pictures here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_discovery.deploy.document import StageConfig
from stage_runtime.engines.base import EngineOutput, Report, StageRequest
from stage_runtime.engines.pictures.drawer import PictureDrawer
from stage_runtime.engines.pictures.request import read_picture
from stage_runtime.engines.vllm_omni.args import check_versions
from stage_runtime.engines.vllm_omni.diffusion.args import split_diffusion_args
from stage_runtime.engines.vllm_omni.engine import OmniStage

if TYPE_CHECKING:
    from stage_runtime.engines.vllm_omni.diffusion.pipeline import OmniPipeline


def engine_for(stage: StageConfig) -> OmniStage | OmniDiffusion:
    """The engine of a stage, not loaded yet: one that draws if the stage shows pictures. Raise ConfigError."""
    return OmniDiffusion(stage) if stage.final_output == "image" else OmniStage(stage)


class OmniDiffusion:
    """See Engine. ``engine_args`` are described in ``args``."""

    def __init__(self, stage: StageConfig) -> None:
        self._stage = stage
        self._args, self._given = split_diffusion_args(stage)
        check_versions(stage)
        #: See DescribedEngine.
        self.model_details: dict[str, str] = {}
        self._pipeline: OmniPipeline | None = None
        self._drawer: PictureDrawer | None = None

    @property
    def capacity(self) -> int:
        """See Engine. ``max_num_seqs``: the largest batch, in pictures."""
        return int(self._given.get("max_num_seqs") or 1) if self._pipeline is None else self._pipeline.capacity

    @property
    def modality(self) -> str:
        """See Engine."""
        return "image"

    @property
    def not_resumable(self) -> None:
        """See Engine. A second attempt draws the picture again, from the same seed."""
        return None

    @property
    def takes_companions(self) -> bool:
        """See Engine. A companion is the negative prompt."""
        return True

    def load(self, report: Report) -> None:
        """See Engine."""
        report("importing vllm-omni", 0.05)
        from stage_runtime.engines.vllm_omni.diffusion.pipeline import load_pipeline

        report("loading the model", 0.4)
        self._pipeline = pipeline = load_pipeline(self._stage, self._args, self._given)
        self.model_details = {"dtype": pipeline.dtype}
        self._drawer = PictureDrawer(pipeline.capacity, pipeline.draw, pipeline.is_lost)

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if self._drawer is None or self._pipeline is None:
            raise RuntimeError("the stage is not loaded")
        self._drawer.add(request.key, read_picture(request, self._pipeline.traits), request.priority)

    def update(self, request: StageRequest) -> None:
        """See SegmentEngine. Each segment is a picture of its own."""
        self.add(request)

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
            raise RuntimeError("the stage is not loaded")
        return self._drawer.step()

    def close(self) -> None:
        """See Engine."""
        drawer, self._drawer = self._drawer, None
        pipeline, self._pipeline = self._pipeline, None
        if drawer is not None:
            drawer.close()
        if pipeline is not None:
            pipeline.close()
