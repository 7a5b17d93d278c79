"""A diffusers pipeline as a stage: text, a class label or the embeddings of an earlier stage in, one PNG out."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError
from stage_runtime.engines.base import Report, check_model_folder, checked_args
from stage_runtime.engines.pictures.drawer import PictureDrawer
from stage_runtime.engines.pictures.engine import PictureEngine


class DiffusersArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``engine_args`` of a diffusers pipeline. ``device`` empty: the GPU if there is one, else the CPU.

    ``dtype`` empty: bfloat16 on a GPU, float32 on the CPU. ``call_args`` go to the pipeline's call as they are.
    """

    capacity: Annotated[int, Meta(ge=1, le=256)] = 4
    device: str = ""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    #: Whether a model that is no local folder may be downloaded from the model hub.
    allow_download: bool = False
    revision: str | None = None
    leave_out: tuple[str, ...] = ()
    max_side_px: Annotated[int, Meta(ge=8, le=8192)] = 2048
    call_args: dict[str, Any] = {}


class DiffusersEngine(PictureEngine):
    """One pipeline, drawing one batch at a time. The constructor raises ConfigError for a model that can't be used."""

    def __init__(self, stage: StageConfig) -> None:
        super().__init__()
        self._stage = stage
        self._where = f"stage {stage.stage_id}"
        self._args = checked_args(stage, DiffusersArgs)
        if not check_model_folder(stage) and not self._args.allow_download:
            raise ConfigError(
                f"{self._where}: the model {stage.model!r} is not a folder on this machine; to have it fetched from the"
                " model hub, set engine_args.allow_download: true"
            )
        if importlib.util.find_spec("diffusers") is None:
            raise ConfigError(
                f"{self._where}: the model {stage.model!r} needs the package 'diffusers': "
                "pip install 'omni-discovery[diffusers]'"
            )

    @property
    def capacity(self) -> int:
        """See Engine. The largest batch, in pictures."""
        return self._args.capacity

    @property
    def takes_companions(self) -> bool:
        """See Engine. A companion is the negative prompt."""
        return self._traits is not None and self._traits.takes_negative

    def load(self, report: Report) -> None:
        """See Engine."""
        report("importing diffusers", 0.1)
        import torch

        from stage_runtime.engines.diffusers.pipeline import (
            Pipeline,
            PipelineSource,
            fetch,
            load,
            revision_of,
            traits_of,
        )

        device = self._args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        source = PipelineSource(
            where=self._where,
            model=self._stage.model,
            revision=self._args.revision,
            leave_out=self._args.leave_out,
            device=device,
            dtype=self._args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        )
        report("loading the model", 0.4)
        folder = fetch(source)
        pipe = load(folder, source)
        traits = traits_of(pipe, source, self._args.call_args, self._args.max_side_px)
        self.model_details = {"dtype": source.dtype, "revision": revision_of(folder)}
        pipeline = Pipeline(pipe, traits, source, self._args.call_args)
        self._begin(traits, PictureDrawer(self._args.capacity, pipeline.draw, pipeline.is_lost))
