"""The prompt of a vLLM stage, from a client's inputs or from the hand-offs of earlier stages.

Pictures for a multimodal model come with the request, in messages or beside the prompt; nothing is fetched.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.data_urls import MAX_PIXELS, PICTURE_FORMATS, read_picture
from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.prompts import check_unread, read_prompt
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.sampling_params import check_prompt

if TYPE_CHECKING:
    from PIL.Image import Image

#: The input that holds pictures beside a prompt with placeholders for them.
IMAGES: Final = "images"


def take_pictures(inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any] | None]:
    """The inputs with each ``image_url`` part of ``messages`` as ``{"type": "image"}``, and the pictures as items.

    A ``prompt``, or ``prompt_token_ids``, may have pictures in a list ``images`` beside it, as the bytes of their files
    or as ``data:`` URLs. The items are None without pictures. Raise InvalidRequestError for a picture that can't be
    read, and for pictures of more than ``MAX_PIXELS`` together.
    """
    messages, beside = inputs.get("messages"), inputs.get(IMAGES)
    pictures: list[Image] = []
    if beside is not None:
        if messages is not None or not isinstance(beside, list | tuple):
            raise InvalidRequestError(f"{IMAGES}: a list of pictures, beside a prompt; messages hold theirs in parts")
        kept = {name: value for name, value in inputs.items() if name != IMAGES}
        for each in beside:
            pictures.append(_picture(each, pictures))
        return kept, ({"image": pictures} if beside else None)
    if not isinstance(messages, list):
        return inputs, None
    rendered = [_without_pictures(message, pictures) for message in messages]
    return ({**inputs, "messages": rendered}, {"image": pictures}) if pictures else (inputs, None)


def _without_pictures(message: Any, pictures: list[Image]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            pictures.append(_picture(part.get("image_url"), pictures))
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _picture(given: Any, others: Sequence[Image]) -> Image:
    from PIL import Image, UnidentifiedImageError

    file = given if isinstance(given, bytes) else read_picture(given)[1]
    try:
        picture = Image.open(io.BytesIO(file), formats=PICTURE_FORMATS)
        is_small = sum(each.width * each.height for each in (*others, picture)) <= MAX_PIXELS
        pixels = _as_seen(picture) if is_small else None
    except UnidentifiedImageError as error:
        formats = " or ".join(PICTURE_FORMATS)
        raise InvalidRequestError(f"image_url: the picture can't be read: it is no {formats}") from error
    except Exception as error:
        # Decoders raise anything over a malformed file, and every replica would raise it again: the client's mistake.
        raise InvalidRequestError(
            f"image_url: the picture can't be read: {str(error) or type(error).__name__}"
        ) from error
    if pixels is None:
        behind = f" behind {len(others)} others" if others else ""
        size = f"{picture.width} x {picture.height}"
        raise InvalidRequestError(f"image_url: a picture of {size}{behind} is too large; show fewer or smaller ones")
    return pixels


def _as_seen(picture: Image) -> Image:
    """The picture upright, in RGB, on white where it is transparent: as vLLM's own server gives pictures to models."""
    from PIL import Image, ImageOps

    picture.load()
    # EXIF data may be malformed in any way.
    with suppress(Exception):
        picture = ImageOps.exif_transpose(picture)
    is_opaque = "A" not in picture.getbands() and "transparency" not in picture.info
    if picture.mode == "RGB" or is_opaque:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    seen = Image.new("RGB", layer.size, "white")
    seen.paste(layer, mask=layer.getchannel("A"))
    return seen


#: Names in a hand-off that hold a prompt; the first that is there counts. Embeds only with ``enable_prompt_embeds``.
_EMBEDS: Final = ("prompt_embeds", "hidden_states")
_IDS: Final = ("prompt_token_ids", "token_ids")
_ITEMS: Final = "multi_modal_data"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, or in their place ``embeds``, a tensor of floats with the shape (tokens, hidden size).

    ``items`` are pictures, sound and other inputs of the model, in the form of vLLM's ``multi_modal_data``; vLLM puts
    them in place of the placeholder tokens. The prefix cache is shared by prompts with the same ``salt``.
    """

    token_ids: Sequence[int] = field(default_factory=list)
    embeds: Any = None
    items: Mapping[str, Any] | None = None
    salt: str = ""

    def __len__(self) -> int:
        return len(self.token_ids) if self.embeds is None else int(self.embeds.shape[0])

    def with_answer(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The prompt as vLLM takes it, followed by the answer so far. Nothing can follow embeds."""
        prompt: dict[str, Any] = {"cache_salt": self.salt} if self.salt else {}
        if self.embeds is not None:
            return {**prompt, "prompt_embeds": self.embeds}
        prompt["prompt_token_ids"] = [*self.token_ids, *token_ids]
        return prompt if self.items is None else {**prompt, _ITEMS: self.items}


def salt_of(request: StageRequest) -> str:
    """The request's ``cache_salt``; empty if it has none."""
    return str(request.params.get("cache_salt") or "")


def read_request(request: StageRequest, model: Model, earlier: Sequence[int]) -> Prompt:
    """The prompt of a request whose hand-offs are complete; ``earlier`` are the token ids of its earlier segments.

    Raise InvalidRequestError for inputs, or a hand-off, that are no prompt of this model.
    """
    if _ITEMS in request.inputs:
        raise InvalidRequestError(f"{_ITEMS}: give pictures as image_url parts of messages, to a stage that takes them")
    if IMAGES in request.inputs and not model.takes_items:
        raise InvalidRequestError(f"{IMAGES}: this stage's model takes no pictures")
    if request.payloads:
        prompt = read_handed(request.payloads.values(), model)
    else:
        check_unread(request.inputs)
        inputs, items = take_pictures(request.inputs) if model.takes_items else (request.inputs, None)
        prompt = Prompt(read_prompt(model.tokenizer, inputs, begins=not earlier, images=items is not None), items=items)
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty")
    if request.segment is not None and (prompt.embeds is not None or prompt.items is not None):
        raise InvalidRequestError("input in segments is tokens or text; embeds and pictures come whole")
    whole = replace(prompt, token_ids=[*earlier, *prompt.token_ids], salt=salt_of(request))
    return checked_prompt(whole, model)


def checked_prompt(prompt: Prompt, model: Model) -> Prompt:
    """The prompt itself. Raise InvalidRequestError if it is empty, too long, or has ids beyond the vocabulary."""
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty")
    # Of embeds only the length is checked.
    token_ids = prompt.token_ids if prompt.embeds is None else [0] * len(prompt)
    check_prompt(token_ids, model.max_model_len, model.vocab_size, model.least_answer)
    return prompt


def read_handed(handed: Iterable[Mapping[str, Any]], model: Model) -> Prompt:
    """The prompt in these hand-offs, or pieces of one, concatenated. Raise InvalidRequestError if they hold none."""
    parts = [part for each in handed for part in each.get("pieces", (each,))]
    if not parts:
        return Prompt()
    items = _items(parts, model)
    if model.embeds_size and items is None:
        for name in _EMBEDS:
            if all(name in part for part in parts):
                return Prompt(embeds=_joined_embeds([part[name] for part in parts], name, model))
    for name in _IDS:
        if all(name in part for part in parts):
            return Prompt([token_id for part in parts for token_id in _ids(part[name], name)], items=items)
    if all(isinstance(part.get("text"), str) for part in parts):
        return Prompt(list(model.tokenizer.encode("".join(part["text"] for part in parts))), items=items)
    names = ", ".join(sorted({name for part in parts for name in part})) or "nothing"
    hint = "" if model.embeds_size else "; prompt_embeds are taken where engine_args.enable_prompt_embeds is true"
    raise InvalidRequestError(
        f"the hand-off has no token_ids, prompt_token_ids or text for a prompt, but {names}{hint}"
    )


def _items(parts: Sequence[Mapping[str, Any]], model: Model) -> Mapping[str, Any] | None:
    items = [part[_ITEMS] for part in parts if _ITEMS in part]
    if not items:
        return None
    if not model.takes_items:
        raise InvalidRequestError(f"the hand-off holds {_ITEMS}, and this stage's model takes none")
    if len(items) > 1 or not isinstance(items[0], Mapping):
        raise InvalidRequestError(f"{_ITEMS} must come once in a hand-off, as a mapping from its kind to the items")
    return dict(items[0])


def _ids(value: Any, name: str) -> list[int]:
    given = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(given, list | tuple) or not all(type(each) is int for each in given):
        raise InvalidRequestError(f"the hand-off's {name} must be whole numbers in one row")
    return list(given)


def _joined_embeds(parts: Sequence[Any], name: str, model: Model) -> Any:
    import torch

    for part in parts:
        if not isinstance(part, torch.Tensor) or part.ndim != 2 or not part.is_floating_point():
            raise InvalidRequestError(
                f"the hand-off's {name} must be a tensor of floats with the shape (tokens, hidden size)"
            )
        if part.shape[1] != model.embeds_size:
            raise InvalidRequestError(
                f"the hand-off's {name} has {part.shape[1]} numbers a token; the model, {model.embeds_size}"
            )
    return torch.cat(list(parts)).to(model.dtype)
