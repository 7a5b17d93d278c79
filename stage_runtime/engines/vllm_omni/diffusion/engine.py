"""A diffusion stage of vLLM-Omni: text, or what a stage before hands over, in, one PNG out.

vLLM-Omni's worker and models draw, in a thread of their own; requests, batches and aborts are those of every engine of
pictures here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.engines.base import Report
from stage_runtime.engines.pictures.drawer import PictureDrawer
from stage_runtime.engines.pictures.engine import PictureEngine
from stage_runtime.engines.vllm_omni.args import check_versions
from stage_runtime.engines.vllm_omni.diffusion.args import split_diffusion_args
from stage_runtime.engines.vllm_omni.engine import OmniStage

if TYPE_CHECKING:
    from stage_runtime.engines.vllm_omni.diffusion.pipeline import OmniPipeline


def engine_for(stage: StageConfig) -> OmniStage | OmniDiffusion:
    """The engine of a stage, not loaded yet: one that draws if the stage shows pictures. Raise ConfigError."""
    if stage.final_output == "video":
        raise ConfigError(
            f"stage {stage.stage_id}: final_output is video, which engine 'vllm-omni' does not make yet; engine 'torch'"
            " does"
        )
    return OmniDiffusion(stage) if stage.final_output == "image" else OmniStage(stage)


class OmniDiffusion(PictureEngine):
    """See Engine. ``engine_args`` are described in ``args``."""

    def __init__(self, stage: StageConfig) -> None:
        super().__init__()
        self._stage = stage
        self._args, self._given = split_diffusion_args(stage)
        check_versions(stage)
        self._pipeline: OmniPipeline | None = None

    @property
    def capacity(self) -> int:
        """See Engine. ``max_num_seqs``: the largest batch, in pictures."""
        return int(self._given.get("max_num_seqs") or 1) if self._pipeline is None else self._pipeline.capacity

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
        self._begin(pipeline.traits, PictureDrawer(pipeline.capacity, pipeline.draw, pipeline.is_lost))

    def close(self) -> None:
        """See Engine."""
        super().close()
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
