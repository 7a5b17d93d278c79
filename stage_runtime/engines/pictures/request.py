"""A request for a diffusers pipeline, checked before the pipeline gets it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.seeds import seed_of
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.companions import NEGATIVE, negative_of
from stage_runtime.engines.handoffs import are_sound, check_sound, count_listed, joined
from stage_runtime.engines.pictures.partial_images import PartialImages
from stage_runtime.engines.prompts import LONGEST_DRAWN, prompt_text
from stage_runtime.engines.sampling import Seed, checked

#: Names in a hand-off that hold a prompt's embeddings; the first that is there counts.
_EMBEDS: Final = ("prompt_embeds", "hidden_states")
#: Names of the mask of valid embeddings. Pipelines with the second name also want the negative prompt's embeddings to
#: be as many as the prompt's.
MASK, EQUAL_MASK = "prompt_embeds_mask", "prompt_attention_mask"
#: The most tokens of a table of embeddings, or numbers in one row, by the dimensions; and numbers in all.
_MOST_ROWS: Final = {2: 4096, 1: 65_536}
_MOST_NUMBERS: Final = 1 << 25
#: Numbers of a table, or of a row, that may come as lists.
_MOST_LISTED: Final = 1 << 20

_Side = Annotated[int, Meta(ge=8, le=8192)]


class PipelineParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The parameters of a picture, by diffusers' own names. None means the pipeline's default.

    Without a seed, it is made of the request's id, so that a second attempt draws the same picture.
    """

    seed: Seed | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    height: _Side | None = None
    width: _Side | None = None
    negative_prompt: Annotated[str, Meta(max_length=LONGEST_DRAWN)] | None = None
    partial_images: PartialImages | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """The inputs and limits of a loaded pipeline."""

    name: str
    #: The names of the parameters of the pipeline's call.
    parameters: frozenset[str]
    #: Whether it has what it needs to read text.
    reads_text: bool
    #: Sides of its pictures are multiples of this, in pixels, and at most ``max_side_px``.
    side_multiple: int
    max_side_px: int
    #: Of a pipeline that draws classes: the names of the classes, if it has them, and their number.
    labels: Mapping[str, int] = field(default_factory=dict)
    num_labels: int = 0
    #: Whether unfinished pictures can be made.
    gives_partial_images: bool = False

    @property
    def takes_embeds(self) -> bool:
        """Whether it draws from embeddings instead of text."""
        return "prompt_embeds" in self.parameters

    @property
    def takes_negative(self) -> bool:
        """Whether it takes a negative prompt."""
        return bool({"negative_prompt_embeds", "negative_prompt"} & self.parameters)

    @property
    def mask_name(self) -> str:
        """The name of the parameter for the mask of the embeddings; empty if the pipeline has none."""
        return next((name for name in (MASK, EQUAL_MASK) if name in self.parameters), "")

    @property
    def needs_negative(self) -> bool:
        """Whether guidance works only with a negative prompt that was handed over as embeddings."""
        is_distilled = "true_cfg_scale" in self.parameters
        return not self.reads_text and "negative_prompt_embeds" in self.parameters and not is_distilled


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """A prompt as numbers: ``rows`` of shape (tokens, size), ``mask`` of (tokens,), ``pooled`` of (size,) if given."""

    rows: Any
    mask: Any
    pooled: Any = None

    @property
    def shape(self) -> Hashable:
        """Equal for embeddings that may share a batch, where each gives the same picture as alone."""
        pooled = None if self.pooled is None else tuple(self.pooled.shape)
        return tuple(self.rows.shape), bool(self.mask.all()), pooled


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One picture to draw. The prompt is text, a class label or embeddings."""

    seed: int
    params: Mapping[str, Any]
    prompt: str | int | Embeds
    negative: str | Embeds | None = None
    #: How many unfinished ones are shown before it.
    partial_images: int = 0

    @property
    def alike(self) -> Hashable:
        """Equal for pictures that can be drawn in one batch."""
        return tuple(sorted(self.params.items())), _shape_of(self.prompt), _shape_of(self.negative)


def read_picture(request: StageRequest, traits: Traits) -> Picture:
    """The picture that a request asks for. Raise InvalidRequestError that names what is wrong."""
    given = {name: value for name, value in request.params.items() if value is not None}
    params = msgspec.structs.asdict(checked(given, PipelineParams))
    asked = {name: value for name, value in params.items() if value is not None and name != "seed"}
    negative = _negative(request, asked.pop("negative_prompt", None), traits)
    partial_images = asked.pop("partial_images", 0) if traits.gives_partial_images else 0
    _check(asked, negative, traits)
    seed = seed_of(request.request_id) if params["seed"] is None else params["seed"]
    prompt = _prompt(request, traits)
    if isinstance(negative, Embeds) and not isinstance(prompt, Embeds):
        raise InvalidRequestError(f"companion {NEGATIVE!r}: embeddings were handed over for it, and the prompt is text")
    if isinstance(prompt, Embeds) and isinstance(negative, Embeds) and EQUAL_MASK in traits.parameters:
        length = max(len(prompt.mask), len(negative.mask))
        prompt, negative = _padded(prompt, length), _padded(negative, length)
    return Picture(seed, asked, prompt, negative, partial_images)


def _check(asked: Mapping[str, Any], negative: str | Embeds | None, traits: Traits) -> None:
    for name in asked:
        if name not in traits.parameters:
            raise InvalidRequestError(f"{name}: {traits.name} takes no such parameter")
    for name in ("height", "width"):
        side_px = asked.get(name)
        if side_px is not None and side_px > traits.max_side_px:
            raise InvalidRequestError(f"{name}: this stage draws at most {traits.max_side_px} pixels, not {side_px}")
        if side_px is not None and side_px % traits.side_multiple:
            raise InvalidRequestError(f"{name}: {side_px} is no multiple of {traits.side_multiple} pixels")
    if negative is None and traits.needs_negative and asked.get("guidance_scale", 0) > 1:
        raise InvalidRequestError(f"guidance_scale: above 1 only with a companion {NEGATIVE!r} to guide away from")


def _prompt(request: StageRequest, traits: Traits) -> str | int | Embeds:
    if request.payloads:
        return _handed(_of_stages(request.payloads), traits, "the hand-off")
    if traits.num_labels:
        return _label(prompt_text(request.inputs), traits)
    if not traits.reads_text:
        raise InvalidRequestError(f"{traits.name} here reads no text: a stage before must hand prompt_embeds over")
    return prompt_text(request.inputs)


def _negative(request: StageRequest, text: str | None, traits: Traits) -> str | Embeds | None:
    by_stage = negative_of(request)
    if by_stage is None and text is None:
        return None
    if not traits.takes_negative:
        raise InvalidRequestError(f"negative_prompt: {traits.name} takes none")
    if by_stage is None and not traits.reads_text:
        raise InvalidRequestError(f"negative_prompt: {traits.name} here reads no text; give a companion {NEGATIVE!r}")
    if by_stage is None:
        return text
    if text is not None:
        raise InvalidRequestError(f"negative_prompt: the companion {NEGATIVE!r} says it already; give one of them")
    found = _handed(_of_stages(by_stage), traits, f"the hand-off of companion {NEGATIVE!r}")
    if isinstance(found, int):
        raise InvalidRequestError(f"companion {NEGATIVE!r}: {traits.name} draws classes and takes none")
    return found


def _of_stages(by_stage: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first hand-off of several earlier stages that holds embeddings or text."""
    whole = [joined(handed) for handed in by_stage.values()]
    drawable = (handed for handed in whole if any(handed.get(name) is not None for name in (*_EMBEDS, "text")))
    return next(drawable, whole[0])


def _handed(handed: Mapping[str, Any], traits: Traits, whose: str) -> str | int | Embeds:
    """The prompt in a hand-off: embeddings if the pipeline takes them, else text. Raise InvalidRequestError."""
    name = next((name for name in _EMBEDS if handed.get(name) is not None), "")
    if name and traits.takes_embeds:
        return _embeds(handed, name, whose)
    text = handed.get("text")
    if isinstance(text, str) and len(text) > LONGEST_DRAWN:
        raise InvalidRequestError(f"{whose} has a text of {len(text)} characters; at most {LONGEST_DRAWN} are drawn")
    if isinstance(text, str) and text.strip():
        if traits.num_labels:
            return _label(text, traits)
        if traits.reads_text:
            return text
    wanted = [*(_EMBEDS if traits.takes_embeds else ()), *(("text",) if traits.reads_text or traits.num_labels else ())]
    found = ", ".join(sorted(map(str, handed))) or "nothing"
    raise InvalidRequestError(f"{whose} holds {found}; {traits.name} here draws {' or '.join(wanted)}")


def _label(text: str, traits: Traits) -> int:
    word = text.strip()
    label = int(word) if word.isdecimal() and len(word) < 10 else traits.labels.get(word, -1)
    if not 0 <= label < traits.num_labels:
        names = " or its name" if traits.labels else ""
        raise InvalidRequestError(
            f"prompt: {traits.name} draws classes; give a number from 0 to {traits.num_labels - 1}{names}"
        )
    return label


def _embeds(handed: Mapping[str, Any], name: str, whose: str) -> Embeds:
    import torch

    rows = _tensor(handed, name, 2, whose)
    if rows.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or not len(rows):
        raise InvalidRequestError(f"{name} in {whose} must hold a float for each token and place")
    check_sound(rows, f"{name} in {whose}")
    given = next((each for each in (MASK, EQUAL_MASK) if handed.get(each) is not None), "")
    mask = _tensor(handed, given, 1, whose).to(torch.int64) if given else torch.ones(len(rows), dtype=torch.int64)
    if len(mask) != len(rows):
        raise InvalidRequestError(f"{given} in {whose} is for {len(mask)} tokens, {name} has {len(rows)}")
    pooled = None if handed.get("pooled_prompt_embeds") is None else _tensor(handed, "pooled_prompt_embeds", 1, whose)
    if pooled is not None and not (pooled.is_floating_point() and are_sound(pooled)):
        raise InvalidRequestError(f"pooled_prompt_embeds in {whose} must hold floats that are numbers")
    return Embeds(rows, mask, pooled)


def _tensor(handed: Mapping[str, Any], name: str, dimensions: int, whose: str) -> Any:
    import torch

    if count_listed(handed[name], _MOST_LISTED) > _MOST_LISTED:
        raise InvalidRequestError(f"{name} in {whose} is longer than {_MOST_LISTED} values: hand it over as a tensor")
    try:
        tensor = torch.as_tensor(handed[name])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"{name} in {whose} can't be read: {error}") from error
    if tensor.ndim == dimensions + 1 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.numel() > _MOST_NUMBERS or (tensor.ndim and len(tensor) > _MOST_ROWS[dimensions]):
        raise InvalidRequestError(f"{name} in {whose} has the shape {tuple(tensor.shape)}, more than a prompt can be")
    if tensor.ndim != dimensions:
        wanted = "(tokens, size)" if dimensions == 2 else "one row"
        raise InvalidRequestError(f"{name} in {whose} has the shape {tuple(tensor.shape)}, not {wanted}")
    return tensor


def _padded(embeds: Embeds, length: int) -> Embeds:
    import torch

    missing = length - len(embeds.rows)
    rows = torch.nn.functional.pad(embeds.rows, (0, 0, 0, missing))
    return Embeds(rows, torch.nn.functional.pad(embeds.mask, (0, missing)), embeds.pooled)


def _shape_of(prompt: str | int | Embeds | None) -> Hashable:
    return prompt.shape if isinstance(prompt, Embeds) else type(prompt).__name__
