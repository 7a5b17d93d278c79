"""A diffusers pipeline as a stage: text, a class label or the embeddings of an earlier stage in, one PNG out.

Requests for similar pictures are drawn as one batch, from its first step to its last, in a thread of the pipeline's
own; requests that come meanwhile wait for the next batch. The pictures of a failed batch are drawn again one by one, so
that only the request that caused the failure fails.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, check_model_folder, checked_args
from stage_runtime.engines.diffusers.batches import BatchQueue, Waiting
from stage_runtime.engines.diffusers.request import Embeds, Picture, Traits, read_picture
from stage_runtime.engines.diffusers.thread import (
    Batch,
    BatchDrawn,
    BatchFailed,
    BatchStepped,
    BatchStopped,
    Event,
    PipelineThread,
)

logger = logging.getLogger(__name__)

#: How long ``step`` waits for an event of the pipeline; new requests and aborts wait no longer than this.
_LISTEN_S: Final = 0.02


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


class DiffusersEngine:
    """One pipeline, drawing one batch at a time. The constructor raises ConfigError for a model that can't be used."""

    def __init__(self, stage: StageConfig) -> None:
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
        #: See DescribedEngine.
        self.model_details: dict[str, str] = {}
        self._traits: Traits | None = None
        self._thread: PipelineThread[Picture] | None = None
        self._queue: BatchQueue[Picture] = BatchQueue()
        self._batch: Batch[Picture] | None = None
        #: The requests of the batch; None in the place of one that was aborted.
        self._members: list[Waiting[Picture] | None] = []
        self._moved_at_s = 0.0
        self._due: list[EngineOutput] = []

    @property
    def capacity(self) -> int:
        """See Engine. The largest batch, in pictures."""
        return self._args.capacity

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
        self._traits = traits_of(pipe, source, self._args.call_args, self._args.max_side_px)
        self.model_details = {"dtype": source.dtype, "revision": revision_of(folder)}
        pipeline = Pipeline(pipe, self._traits, source, self._args.call_args)
        self._thread = PipelineThread(pipeline.draw, pipeline.is_lost)

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        if self._traits is None:
            raise RuntimeError("the engine is not loaded")
        running = {each.key for each in self._members if each is not None}
        if request.key in running or request.key in self._queue:
            raise InvalidRequestError("the request is running already")
        picture = read_picture(request, self._traits)
        self._queue.add(request.key, picture, picture.alike, request.priority)

    def update(self, request: StageRequest) -> None:
        """See SegmentEngine. Each segment is a picture of its own."""
        self.add(request)

    def abort(self, key: str) -> None:
        """See Engine. The batch goes on for its other requests; without any, it ends after its present step."""
        is_known = self._queue.remove(key)
        for place, member in enumerate(self._members):
            if member is not None and member.key == key:
                self._members[place], is_known = None, True
        if self._batch is not None and not any(self._members):
            self._batch.is_unwanted.set()
        if is_known:
            self._due.append(EngineOutput(key, finish_reason="abort"))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._due or self._queue) or self._batch is not None

    def moved_at_s(self) -> float:
        """See ThreadedEngine."""
        return time.monotonic() if self._batch is None else self._moved_at_s

    def step(self) -> list[EngineOutput]:
        """See Engine. Waits up to 20 ms for events of the pipeline."""
        outputs, self._due = self._due, []
        thread = self._start_batch()
        for event in thread.events(0.0 if outputs or self._batch is None else _LISTEN_S):
            self._moved_at_s = time.monotonic()
            outputs += self._outputs_of(event)
        self._start_batch()
        return outputs

    def close(self) -> None:
        """See Engine."""
        self._queue.clear()
        if self._batch is not None:
            self._batch.is_unwanted.set()
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _start_batch(self) -> PipelineThread[Picture]:
        """Start the next batch if none is being drawn."""
        if self._thread is None:
            raise RuntimeError("the engine is not loaded")
        if self._batch is None and len(self._queue):
            members = self._queue.pop_batch(self._args.capacity)
            self._members = [*members]
            self._batch, self._moved_at_s = Batch([member.item for member in members]), time.monotonic()
            self._thread.start(self._batch)
        return self._thread

    def _outputs_of(self, event: Event) -> list[EngineOutput]:
        """The outputs of an event, for the requests that were not aborted. Raise RuntimeError if the device is lost."""
        if isinstance(event, BatchStepped):
            usage = {"steps": event.steps}
            return [EngineOutput(member.key, usage=usage) for member in self._members if member is not None]
        members, self._members, self._batch = self._members, [], None
        present = [member for member in members if member is not None]
        match event:
            case BatchDrawn(pngs, steps):
                return [
                    EngineOutput(member.key, image_png=png, finish_reason="stop", usage={"steps": steps})
                    for member, png in zip(members, pngs, strict=True)
                    if member is not None
                ]
            case BatchStopped():
                return []
            case BatchFailed(is_lost=True):
                raise RuntimeError(f"{event.reason}; the device does not work any more")
            case BatchFailed() if len(members) > 1:
                # One picture, or their number, was too much; it may have been one that was aborted.
                logger.warning("diffusers.batch_failed pictures=%d reason=%s", len(members), event.reason)
                self._queue.requeue_alone(present)
                return []
            case BatchFailed():
                return [EngineOutput(member.key, error=(event.kind, _reason(event, member))) for member in present]


def _reason(event: BatchFailed, member: Waiting[Picture]) -> str:
    prompt = member.item.prompt
    shape = f", drawing embeddings of shape {tuple(prompt.rows.shape)}" if isinstance(prompt, Embeds) else ""
    return event.reason + shape
