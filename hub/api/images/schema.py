"""The bodies of the routes that draw: their fields and their checks. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from hub.api.chat.messages import MAX_PICTURES
from hub.api.errors import BodyTooLongError
from hub.api.generation.body import MAX_BODY_BYTES, decode_body
from hub.api.generation.fields import RequestFields, check_neutral
from hub.api.images.form import Part, read_form
from omni_discovery.errors import InvalidRequestError
from omni_discovery.wire import MAX_PARTIAL_IMAGES

#: The parameters that stages which draw get as they are, by diffusers' and vLLM-Omni's names.
_PASSED: Final = ("negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale")


class ImageFields(RequestFields, frozen=True, kw_only=True):
    """The fields of all routes that draw."""

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16, examples=["26 plus 48"])]
    n: Annotated[int, msgspec.Meta(ge=1, le=10)] | None = None
    #: Width and height in pixels, or ``auto``.
    size: Annotated[str, msgspec.Meta(pattern=r"\A(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})\Z")] | None = None
    negative_prompt: Annotated[str, msgspec.Meta(max_length=1 << 16)] | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    stream: bool | None = None
    #: At most so many unfinished pictures are sent before each; of engines that can give some.
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None

    # Not served here: `check_neutral` checks that they ask for nothing else than what there is.
    background: Any = None
    output_compression: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    output_format: Any = None
    quality: Any = None
    response_format: Any = None

    def image_params(self) -> dict[str, Any]:
        """The parameters of a picture, by the names that a stage takes."""
        params = {name: getattr(self, name) for name in _PASSED}
        if self.size not in {None, "auto"}:
            width, _, height = str(self.size).partition("x")
            params |= {"width": int(width), "height": int(height)}
        # It needs 'stream'; 0 is what every engine does unasked.
        params["partial_images"] = self.partial_images or None
        return {name: value for name, value in params.items() if value is not None}

    def content(self) -> str | list[dict[str, Any]]:
        """What the first stage gets, as the content of a message."""
        return self.prompt


class ImageRequest(ImageFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/images/generations."""

    moderation: Any = None
    style: Any = None


class ImageEdit(ImageFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form of POST /v1/images/edits. Its files have become ``data:`` URLs."""

    image: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PICTURES)]
    mask: str | None = None

    # Not served here, as above.
    input_fidelity: Any = None

    def image_params(self) -> dict[str, Any]:
        """See ImageFields. A stage that draws gets the mask as a parameter."""
        return super().image_params() | ({} if self.mask is None else {"mask": self.mask})

    def content(self) -> list[dict[str, Any]]:
        """See ImageFields."""
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.image]
        return [{"type": "text", "text": self.prompt}, *shown]


#: The neutral values of each field, in addition to null.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "background": ("auto", "opaque"),
    "output_compression": (100,),
    "output_format": ("png",),
    "quality": ("auto", "standard"),
    "response_format": ("b64_json",),
}
NEUTRAL_DRAWN: Final = _NEUTRAL | {"moderation": ("auto",), "style": ()}
NEUTRAL_EDITED: Final = _NEUTRAL | {"input_fidelity": ("low",)}

_decoder = msgspec.json.Decoder(ImageRequest)

#: Fields of a form that hold files, and those that hold JSON.
_FILES: Final = {"image": "image", "image[]": "image", "mask": "mask"}
_JSON: Final = ("sampling_params_list", "metadata")


def parse_image(body: bytes) -> ImageRequest:
    """Read and check a request body. Raise InvalidRequestError that names the field."""
    request = decode_body(_decoder, body)
    _check(request, NEUTRAL_DRAWN)
    return request


def parse_edit(content_type: str, body: bytes) -> ImageEdit:
    """Read and check a form. Raise InvalidRequestError that names the field."""
    fields, urls = _read_fields(read_form(content_type, body))
    if not urls.get("image"):
        raise InvalidRequestError("'image' is missing: send the picture's file as a part of this name")
    if len(urls.get("mask", ())) > 1:
        raise InvalidRequestError("'mask' is there twice")
    if sum(len(url) for each in urls.values() for url in each) + len(fields.get("prompt", "")) > MAX_BODY_BYTES:
        raise BodyTooLongError(f"the files have more than {MAX_BODY_BYTES * 3 // 4} bytes: send smaller pictures")
    files = {"image": urls["image"], **({"mask": urls["mask"][0]} if "mask" in urls else {})}
    try:
        request = msgspec.convert({**fields, **files}, ImageEdit, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the form can't be used: {error}".replace("`", "'")) from error
    # The conversion takes the text "null" for nothing.
    if nothing := [name for name in fields if getattr(request, name) is None]:
        raise InvalidRequestError(f"'{nothing[0]}' is 'null', which a form can't say: leave it out")
    _check(request, NEUTRAL_EDITED)
    return request


def _read_fields(parts: Sequence[Part]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The fields of a form, and the ``data:`` URLs of its files by field."""
    fields: dict[str, Any] = {}
    urls: dict[str, list[str]] = {}
    for part in parts:
        if part.name in _FILES:
            urls.setdefault(_FILES[part.name], []).append(url_of_part(part))
        elif part.is_file:
            raise InvalidRequestError(f"'{part.name}' is a file; there are files 'image' and 'mask'")
        elif part.name in fields:
            raise InvalidRequestError(f"'{part.name}' is there twice")
        # Clients send an empty text for a field that they leave out.
        elif part.content or part.name == "prompt":
            fields[part.name] = _json_of(part) if part.name in _JSON else part.text
    return fields, urls


def _check(request: ImageFields, neutral: dict[str, tuple[Any, ...]]) -> None:
    if request.response_format == "url":
        raise InvalidRequestError("'response_format': pictures come as 'b64_json'; nothing is kept to be fetched")
    check_neutral(request, neutral)
    if not request.prompt.strip():
        raise InvalidRequestError("'prompt' is empty; send what is to be drawn")
    if request.partial_images and not request.stream:
        raise InvalidRequestError("'partial_images' needs 'stream': true")


def url_of_part(part: Part) -> str:
    """The file of a picture as a ``data:`` URL; its first bytes say its kind, whatever the client has called it."""
    if not part.is_file:
        raise InvalidRequestError(
            f"'{part.name}' is a file (curl -F image=@cat.png), not a text or URL; nothing is fetched"
        )
    kind = kind_of(bytes(part.content[:12]))
    if not kind or (part.name == "mask" and kind != "png"):
        wanted = "a PNG" if part.name == "mask" else "a PNG, JPEG, WEBP or GIF"
        raise InvalidRequestError(f"'{part.name}' is no picture that can be read here: send the file of {wanted}")
    return f"data:image/{kind};base64,{base64.b64encode(part.content).decode()}"


def kind_of(head: bytes) -> str:
    """The kind of a picture's file by its first bytes; empty for any other file."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    begins = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}
    return next((kind for begin, kind in begins.items() if head.startswith(begin)), "")


def _json_of(part: Part) -> Any:
    try:
        return decode_body(msgspec.json.Decoder(), bytes(part.content))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"'{part.name}': {error}") from error
