"""A diffusers pipeline, loaded from safetensors only, that draws a batch with a seed of its own for each picture."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from omni_discovery.deploy.trust.vllm_args import is_revision
from omni_discovery.errors import ConfigError
from omni_discovery.text import one_line
from stage_runtime.engines.diffusers.partial_images import Expected, can_expect
from stage_runtime.engines.files import png_of
from stage_runtime.engines.pictures.partial_images import steps_shown
from stage_runtime.engines.pictures.request import Embeds, Picture, Traits
from stage_runtime.engines.pictures.steps import steps_heard
from stage_runtime.engines.pictures.thread import OnStep, UnfinishedPicture

INDEX: Final = "model_index.json"
#: Libraries whose classes a pipeline may be made of, besides the modules beside diffusers' own pipelines.
_LIBRARIES: Final = ("diffusers", "transformers")
#: Required arguments of a pipeline's call that a stage can give.
_GIVEN: Final = frozenset({"prompt", "class_labels"})
#: Arguments of the call that are this engine's own.
_OWN: Final = frozenset(
    {"generator", "output_type", "return_dict", "num_images_per_prompt", "callback_on_step_end", "callback"}
)


class PipelineSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pipeline comes from and which parts of it are loaded. ``where`` begins each error text."""

    where: str
    model: str
    revision: str | None = None
    #: Components that are not loaded.
    leave_out: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"


def fetch(source: PipelineSource) -> Path:
    """The pipeline's folder; downloaded from the model hub if it is not on this machine. Raise ConfigError."""
    folder = Path(source.model).expanduser()
    if folder.is_dir():
        return folder
    if not is_revision(source.revision):
        # The model hub's cache takes it for a path.
        raise ConfigError(f"{source.where}: revision {source.revision!r} is no branch, tag or commit")
    from diffusers import DiffusionPipeline

    try:
        found = DiffusionPipeline.download(
            source.model, revision=source.revision, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source.where}: {source.model} can't be had from the model hub: {error}") from error
    return Path(found)


def check_index(folder: Path, source: PipelineSource) -> list[str]:
    """Check a pipeline's index; return the components not to load. Raise ConfigError for a model with its own code."""
    where = f"{source.where}: {folder / INDEX}"
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ConfigError(f"{where}: _class_name must be a class of diffusers; a model's own code is not run")
    parts = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    from diffusers import pipelines

    for name, (library, _class_name) in parts.items():
        if library is None or library in _LIBRARIES:
            continue
        if not (isinstance(library, str) and library.isidentifier() and hasattr(pipelines, library)):
            raise ConfigError(f"{where}: {name} is of {library!r}; only diffusers and transformers are loaded")
    unknown = [name for name in source.leave_out if name not in parts]
    if unknown:
        raise ConfigError(f"{where} has no {unknown[0]!r} to leave out; it has {', '.join(sorted(parts))}")
    return [name for name, (library, _class_name) in parts.items() if library is None or name in source.leave_out]


def revision_of(folder: Path) -> str:
    """The commit of a folder of the model hub's cache; empty for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else ""


def load(folder: Path, source: PipelineSource) -> Any:
    """The pipeline, on its device. Raise ConfigError where the operator must act."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from safetensors import SafetensorError

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    absent: dict[str, Any] = dict.fromkeys(check_index(folder, source))
    pipelines: Any = DiffusionPipeline
    try:
        pipe = pipelines.from_pretrained(
            str(folder),
            dtype=getattr(torch, source.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **absent,
        )
    except (OSError, ValueError, TypeError, AttributeError, ImportError, SafetensorError) as error:
        text = one_line(str(error))
        raise ConfigError(
            f"{source.where}: {folder} can't be loaded as a pipeline (of weights, only safetensors are): {text:.500}"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(source.device)


def traits_of(pipe: Any, source: PipelineSource, call_args: Mapping[str, Any], max_side_px: int) -> Traits:
    """The inputs and limits of a pipeline. Raise ConfigError for unknown call_args, or if no stage can serve it."""
    name = type(pipe).__name__
    parameters = inspect.signature(pipe.__call__).parameters
    for argument in call_args:
        if argument not in parameters or argument in _OWN:
            raise ConfigError(f"{source.where}: engine_args.call_args.{argument}: {name} can't be given that")
    missing = [
        each.name
        for each in parameters.values()
        if each.default is each.empty and each.name not in {*_GIVEN, *call_args} and each.kind is not each.VAR_KEYWORD
    ]
    if missing or not {"prompt", "prompt_embeds", "class_labels"} & set(parameters):
        wanted = ", ".join(missing) or "no prompt of any kind"
        raise ConfigError(f"{source.where}: {name} takes {wanted}; stages draw prompts, prompt_embeds and class labels")
    scale = getattr(pipe, "vae_scale_factor", None)
    return Traits(
        name=name,
        parameters=frozenset(parameters),
        reads_text="prompt" in parameters and getattr(pipe, "text_encoder", None) is not None,
        # Twice: latents of the VAE are cut into patches of two by two.
        side_multiple=2 * scale if isinstance(scale, int) else 8,
        max_side_px=max_side_px,
        labels=dict(getattr(pipe, "labels", None) or {}),
        num_labels=int(pipe.transformer.config.num_embeds_ada_norm) if "class_labels" in parameters else 0,
        gives_partial_images="callback_on_step_end" in parameters and can_expect(pipe),
    )


class Pipeline:
    """A loaded pipeline; used by one thread."""

    def __init__(self, pipe: Any, traits: Traits, source: PipelineSource, call_args: Mapping[str, Any]) -> None:
        self._pipe = pipe
        self._traits = traits
        self._device = torch.device(source.device)
        self._dtype: torch.dtype = getattr(torch, source.dtype)
        self._call_args = dict(call_args)

    def draw(self, pictures: Sequence[Picture], on_step: OnStep) -> list[bytes]:
        """Draw pictures that are alike; one PNG each. ``on_step`` is called after each step; it may raise to end it."""
        call = {**self._call_args, **self._arguments(pictures), **pictures[0].params}
        # Drawn on the CPU whatever the model runs on: a seed means the same noise everywhere.
        generators = [torch.Generator("cpu").manual_seed(picture.seed) for picture in pictures]
        with self._shown_steps(pictures, on_step) as shown_step, self._step_callback(shown_step) as more:
            images = self._pipe(**call, **more, generator=generators, output_type="pil").images
        if len(images) != len(pictures):
            raise RuntimeError(f"{self._traits.name} drew {len(images)} pictures, asked for {len(pictures)}")
        return [png_of(image) for image in images]

    def is_lost(self) -> bool:
        """Whether the device can't compute any more. Returns unused memory of the allocator to the device."""
        if self._device.type != "cuda":
            return False
        try:
            torch.cuda.empty_cache()
            torch.zeros(1, device=self._device).add_(1).item()
        except torch.OutOfMemoryError:
            return False
        except RuntimeError:
            return True
        return False

    def _arguments(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """The prompts and negative prompts of a batch. They are alike, so the first one shows of which kind."""
        prompts, negatives = [each.prompt for each in pictures], [each.negative for each in pictures]
        arguments = {**self._rows("", prompts), **self._rows("negative_", negatives)}
        if negatives[0] is None and self._traits.needs_negative:
            # Guidance would need a negative prompt that the pipeline can't read.
            arguments["guidance_scale"] = 1.0
        return arguments

    def _rows(self, prefix: str, prompts: Sequence[str | int | Embeds | None]) -> dict[str, Any]:
        first = prompts[0]
        if first is None:
            return {}
        if isinstance(first, int):
            return {"class_labels": list(prompts)}
        if isinstance(first, str):
            return {f"{prefix}prompt": list(prompts)}
        embeds = [each for each in prompts if isinstance(each, Embeds)]
        # Some pipelines default to an empty text, and refuse a text beside embeddings.
        rows: dict[str, Any] = {f"{prefix}prompt": None} if f"{prefix}prompt" in self._traits.parameters else {}
        rows[f"{prefix}prompt_embeds"] = torch.stack([each.rows for each in embeds]).to(self._device, self._dtype)
        if self._traits.mask_name:
            masks = torch.stack([each.mask for each in embeds])
            rows[prefix + self._traits.mask_name] = masks.to(self._device)
        if first.pooled is not None:
            pooled = torch.stack([each.pooled for each in embeds])
            rows[f"{prefix}pooled_prompt_embeds"] = pooled.to(self._device, self._dtype)
        return rows

    @contextlib.contextmanager
    def _shown_steps(self, pictures: Sequence[Picture], on_step: OnStep) -> Iterator[Callable[[int], None]]:
        """``on_step``, with the unfinished pictures that are to be shown behind a step."""
        if not any(picture.partial_images for picture in pictures):
            yield on_step
            return
        params = pictures[0].params
        expected = Expected(self._pipe, params.get("height"), params.get("width"))

        def show_step(steps: int) -> None:
            count = len(self._pipe.scheduler.timesteps)
            numbers = [_number_at(steps, steps_shown(count, picture.partial_images)) for picture in pictures]
            places = [place for place, number in enumerate(numbers) if number is not None]
            drawn = zip(places, expected.pictures(places) if places else (), strict=True)
            on_step(steps, [UnfinishedPicture(place, numbers[place] or 0, png_of(image)) for place, image in drawn])

        with expected.followed():
            yield show_step

    @contextlib.contextmanager
    def _step_callback(self, on_step: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        """Have ``on_step`` called after each step; yields the arguments that the pipeline takes for that."""
        if "callback_on_step_end" in self._traits.parameters:

            def at_step_end(_pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                on_step(step + 1)
                return tensors

            yield {"callback_on_step_end": at_step_end, "callback_on_step_end_tensor_inputs": []}
            return
        # Older pipelines have no callback, or none that may raise.
        with steps_heard(self._pipe.scheduler, on_step):
            yield {}


def _number_at(steps: int, shown_at: Sequence[int]) -> int | None:
    """The number of the unfinished picture that is shown behind so many steps; None if none is."""
    return shown_at.index(steps) if steps in shown_at else None
