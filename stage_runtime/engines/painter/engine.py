"""``engine: diffusion``: the choice between a diffusers pipeline and the demo's diffusion transformer, and the latter.

Token ids in, one PNG out. All running pictures take one denoising step together per ``step``, each with its own seed,
number of steps and guidance, so that requests come and go between two steps. The digits of a companion ``negative``
are what guidance leads away from. Unfinished pictures show what the model takes the digits to become.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from omni_discovery.deploy.document import StageConfig
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.inputs.seeds import seed_of
from omni_discovery.wire import FailureKind
from stage_runtime.engines.base import EngineOutput, Report, StageRequest, check_model_folder, checked_args
from stage_runtime.engines.companions import NEGATIVE, negative_of
from stage_runtime.engines.files import png_of
from stage_runtime.engines.handoffs import count_listed, joined
from stage_runtime.engines.pictures.output import PictureOutput
from stage_runtime.engines.pictures.partial_images import PartialImages, steps_shown
from stage_runtime.engines.sampling import Seed, checked

if TYPE_CHECKING:
    from stage_runtime.engines.diffusers.engine import DiffusersEngine
    from stage_runtime.engines.painter.dit import Canvas, DigitPainter

#: A file that every folder of a diffusers pipeline holds.
_PIPELINE_INDEX: Final = "model_index.json"
#: Token ids of one hand-off: more than any answer has.
_MOST_IDS: Final = 1 << 16


def engine_for(stage: StageConfig) -> DiffusionEngine | DiffusersEngine:
    """The engine of an image stage, not loaded yet. Raise ConfigError.

    DiffusersEngine for a folder with a pipeline and for a name on a model hub, else DiffusionEngine.
    """
    if check_model_folder(stage) and not (Path(stage.model).expanduser() / _PIPELINE_INDEX).is_file():
        return DiffusionEngine(stage)
    from stage_runtime.engines.diffusers.engine import DiffusersEngine

    return DiffusersEngine(stage)


class DiffusionArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``engine_args`` of the diffusion engine. ``device`` empty: the GPU if there is one, else the CPU."""

    capacity: Annotated[int, Meta(ge=1, le=4096)] = 8
    device: str = ""
    height_px: Annotated[int, Meta(ge=16, le=2048)] = 128


class PictureParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a picture. Without a seed, it is made of the request's id: a second attempt draws the same."""

    seed: Seed | None = None
    steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=20)] | None = None
    partial_images: PartialImages | None = None


@dataclass(frozen=True, slots=True)
class _Drawing:
    """One picture under way, and behind which of its steps it is shown unfinished."""

    canvas: Canvas
    shown_at: tuple[int, ...]


class DiffusionEngine(PictureOutput):
    """Draws the digits of a hand-off's ``token_ids``; a hand-off without digits ends without a picture."""

    def __init__(self, stage: StageConfig) -> None:
        self._stage = stage
        self._args = checked_args(stage, DiffusionArgs)
        self._model: DigitPainter | None = None
        #: Pictures by request key, oldest first; the first ``capacity`` are drawn, the others wait.
        self._drawings: dict[str, _Drawing] = {}
        self._due: list[EngineOutput] = []

    @property
    def capacity(self) -> int:
        """See Engine."""
        return self._args.capacity

    @property
    def takes_companions(self) -> bool:
        """See CompanionEngine. The digits of a companion ``negative`` are what guidance leads away from."""
        return True

    @property
    def gives_partial_images(self) -> bool:
        """See PartialImageEngine."""
        return True

    def load(self, report: Report) -> None:
        """See Engine."""
        report("importing torch", 0.1)
        import torch

        from stage_runtime.engines.painter.dit import advance, load_painter, new_canvas

        report("loading the model", 0.7)
        device = self._args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self._model = load_painter(Path(self._stage.model), device)
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(
                f"stage {self._stage.stage_id}: {self._stage.model} is no diffusers pipeline (no {_PIPELINE_INDEX})"
                f" and no painter: {error!r}"
            ) from error
        report("warming up", 0.9)
        advance(self._model, [new_canvas(self._model, [0], seed=0, steps=1)])

    def add(self, request: StageRequest) -> None:
        """See Engine."""
        from stage_runtime.engines.painter.dit import digits_from_tokens, new_canvas

        model = self._loaded()
        if request.key in self._drawings:
            raise InvalidRequestError("the request is running already")
        params = checked({name: value for name, value in request.params.items() if value is not None}, PictureParams)
        token_ids, avoided_ids = _token_ids(request), _avoided_ids(request)
        try:
            digits = digits_from_tokens(token_ids, model.config)
            avoided = [] if avoided_ids is None else digits_from_tokens(avoided_ids, model.config)
        except ValueError as error:
            # The earlier stage's mistake, not the client's.
            reason = f"what the stage before handed over can't be drawn: {error}"
            self._due.append(EngineOutput(request.key, error=(FailureKind.ENGINE, reason)))
            return
        if not digits:
            self._due.append(EngineOutput(request.key, finish_reason="stop"))
            return
        seed = seed_of(request.request_id) if params.seed is None else params.seed
        canvas = new_canvas(model, digits, seed, params.steps, params.guidance_scale, avoided)
        self._drawings[request.key] = _Drawing(canvas, steps_shown(canvas.steps, params.partial_images or 0))

    def abort(self, key: str) -> None:
        """See Engine."""
        if self._drawings.pop(key, None) is not None:
            self._due.append(EngineOutput(key, finish_reason="abort"))

    def has_unfinished(self) -> bool:
        """See Engine."""
        return bool(self._drawings or self._due)

    def step(self) -> list[EngineOutput]:
        """See Engine."""
        from stage_runtime.engines.painter.dit import advance

        outputs, self._due = self._due, []
        keys = list(self._drawings)[: self._args.capacity]
        advanced = advance(self._loaded(), [self._drawings[key].canvas for key in keys])
        for key, canvas in zip(keys, advanced, strict=True):
            if canvas.done:
                del self._drawings[key]
                outputs.append(EngineOutput(key, image_png=self._png(canvas), finish_reason="stop"))
                continue
            drawing = self._drawings[key] = replace(self._drawings[key], canvas=canvas)
            if canvas.step in drawing.shown_at:
                number = drawing.shown_at.index(canvas.step)
                outputs.append(EngineOutput(key, image_png=self._png(canvas), partial_image=number))
        return outputs

    def close(self) -> None:
        """See Engine."""
        self._drawings.clear()
        self._model = None

    def _loaded(self) -> DigitPainter:
        if self._model is None:
            raise RuntimeError("the engine is not loaded")
        return self._model

    def _png(self, canvas: Canvas) -> bytes:
        from stage_runtime.engines.painter.dit import compose_image

        return png_of(compose_image(canvas.ink(), self._args.height_px))


def _token_ids(request: StageRequest) -> Any:
    source: Mapping[str, Any] | None = None if request.payload is None else joined(request.payload)
    given = source.get("token_ids") if source is not None else request.inputs.get("prompt_token_ids")
    if given is None:
        raise InvalidRequestError("this stage draws what the stage before handed over, and nothing was")
    return _as_ids(given)


def _avoided_ids(request: StageRequest) -> Any:
    """The token ids of the companion ``negative``, None without one. Raise InvalidRequestError."""
    by_stage = negative_of(request)
    if by_stage is None:
        return None
    whole = [joined(handed) for handed in by_stage.values()]
    given = next((handed["token_ids"] for handed in whole if handed.get("token_ids") is not None), None)
    if given is None:
        raise InvalidRequestError(f"companion {NEGATIVE!r}: no token ids were handed over for it")
    return _as_ids(given)


def _as_ids(given: Any) -> Any:
    import torch

    has_length = hasattr(given, "__len__") and getattr(given, "ndim", 1) != 0
    count = max(len(given) if has_length else 0, count_listed(given, _MOST_IDS))
    if count > _MOST_IDS:
        raise InvalidRequestError(f"{count} token ids were handed over; at most {_MOST_IDS} are read")
    try:
        return torch.as_tensor(given, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"the token ids can't be read: {error}") from error
