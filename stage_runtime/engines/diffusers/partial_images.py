"""Unfinished pictures of pipelines that match flows: what a step leads to, decoded as the finished picture is."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

#: Pipelines whose latents are decoded here as they do it themselves, each by a test; by the names of their classes.
_KNOWN: Final = ("QwenImagePipeline",)
_SCHEDULER: Final = "FlowMatchEulerDiscreteScheduler"


def can_expect(pipe: Any) -> bool:
    """Whether unfinished pictures of a pipeline can be made."""
    return type(pipe).__name__ in _KNOWN and type(pipe.scheduler).__name__ == _SCHEDULER


class Expected:
    """The latents that the last step of a pipeline leads to."""

    def __init__(self, pipe: Any, height: int | None, width: int | None) -> None:
        self._pipe = pipe
        side_px = pipe.default_sample_size * pipe.vae_scale_factor
        self._size = height or side_px, width or side_px
        self._latents: Any = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Look at each step of the pipeline's scheduler, while the pipeline draws."""
        scheduler = self._pipe.scheduler
        step_of_class = scheduler.step

        @functools.wraps(step_of_class)
        def step(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            made = step_of_class(model_output, timestep, sample, *args, **kwargs)
            # It has counted the step. What is left of the noise goes along the velocity that the model has given.
            sigma = scheduler.sigmas[scheduler.step_index - 1]
            self._latents = sample.float() - sigma * model_output.float()
            return made

        scheduler.step = step
        try:
            yield
        finally:
            del scheduler.step

    def pictures(self, places: Sequence[int]) -> list[Any]:
        """What the pictures at these places of the batch would be."""
        pipe, vae = self._pipe, self._pipe.vae
        latents = pipe._unpack_latents(self._latents[list(places)], *self._size, pipe.vae_scale_factor)  # noqa: SLF001
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        decoded = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0][:, :, 0]
        return list(pipe.image_processor.postprocess(decoded, output_type="pil"))
