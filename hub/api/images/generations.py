"""POST /v1/images/generations: a prompt in, pictures out, in the shapes of OpenAI's clients."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from starlette.responses import Response

from hub.api.generation.body import AnswerSize, decode_body
from hub.api.generation.fields import RequestFields, check_neutral, stage_params, with_seed
from hub.api.generation.running import Ask, Came, Route, stale_header
from hub.api.generation.usage import Usage
from omni_discovery.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni
    from omni_discovery.deploy.document import DeployConfig

_PNG: Final = b"\x89PNG\r\n\x1a\n"
#: The parameters that stages which draw get as they are, by diffusers' and vLLM-Omni's names.
_PASSED: Final = ("negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale")


class ImageRequest(RequestFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/images/generations."""

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16)]
    n: Annotated[int, msgspec.Meta(ge=1, le=10)] | None = None
    #: Width and height in pixels, or ``auto``.
    size: Annotated[str, msgspec.Meta(pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$")] | None = None
    negative_prompt: Annotated[str, msgspec.Meta(max_length=1 << 16)] | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None

    # Not served here: `check_neutral` checks that they ask for nothing else than what there is.
    background: Any = None
    moderation: Any = None
    output_compression: Any = None
    output_format: Any = None
    partial_images: Any = None
    quality: Any = None
    response_format: Any = None
    stream: Any = None
    style: Any = None

    def image_params(self) -> dict[str, Any]:
        """The parameters of a picture, by the names that a stage takes."""
        params = {name: getattr(self, name) for name in _PASSED}
        if self.size not in {None, "auto"}:
            width, _, height = str(self.size).partition("x")
            params |= {"width": int(width), "height": int(height)}
        return {name: value for name, value in params.items() if value is not None}


#: The neutral values of each field, in addition to null.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "background": ("auto", "opaque"),
    "moderation": ("auto",),
    "output_compression": (100,),
    "output_format": ("png",),
    "partial_images": (0,),
    "quality": ("auto", "standard"),
    "response_format": ("b64_json",),
    "stream": (False,),
    "style": (),
}

_decoder = msgspec.json.Decoder(ImageRequest)


def parse_image(body: bytes) -> ImageRequest:
    """Read and check a request body. Raise InvalidRequestError that names the field."""
    request = decode_body(_decoder, body)
    if request.response_format == "url":
        raise InvalidRequestError("'response_format': pictures come as 'b64_json'; nothing is kept to be fetched")
    check_neutral(request, _NEUTRAL)
    if not request.prompt.strip():
        raise InvalidRequestError("'prompt' is empty; send what is to be drawn")
    return request


class ImageGenerations:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._route = Route(omni, deploy, "img")
        self._omni, self._deploy = omni, deploy

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        return await self._route.answer(request, self._parse, self._answer)

    def _parse(self, body: bytes) -> ImageRequest:
        if not any(stage.final_output == "image" for stage in self._deploy.stages):
            raise InvalidRequestError("this pipeline draws nothing: no stage of it has final_output: image")
        return parse_image(body)

    async def _answer(self, asked: ImageRequest, came: Came) -> Response:
        drawing = [stage.stage_id for stage in self._deploy.stages if stage.final_output == "image"]
        with self._omni.rejections.counted():
            more = dict.fromkeys(drawing, asked.image_params())
            params = stage_params(self._deploy, asked, {}, more)
        inputs = {"messages": [{"role": "user", "content": asked.prompt}]}
        asks = [Ask(inputs, with_seed(params, number), ("image",)) for number in range(asked.n or 1)]
        usage = Usage([stage.stage_id for stage in self._deploy.stages], len(asks))
        pictures: dict[int, list[bytes]] = {number: [] for number in range(len(asks))}
        size = AnswerSize("a smaller 'n' or 'size'")
        generation = self._route.generation(came, asked, asks)
        try:
            async for number, output in generation:
                came.exchange.note_output(output)
                usage.add(number, output)
                size.add(4 * len(output.data) // 3)
                if output.data:
                    pictures[number].append(output.data)
        finally:
            await generation.close()
        if generation.has_left:
            return generation.left_response
        drawn = [each for listed in pictures.values() for each in listed]
        if not drawn:
            raise InvalidRequestError("nothing was drawn: the stages before have made nothing of this prompt", 422)
        # In a thread: pictures may be large, and the hub's loop must go on.
        body = await asyncio.to_thread(_body, drawn, usage)
        return Response(body, media_type="application/json", headers=stale_header(self._omni))


def _body(pictures: list[bytes], usage: Usage) -> bytes:
    counts = usage.shown_as_input()
    details = {"text_tokens": counts["input_tokens"], "image_tokens": 0}
    shown: dict[str, Any] = {
        "created": int(time.time()),
        "data": [{"b64_json": base64.b64encode(each).decode(), "revised_prompt": None} for each in pictures],
        "output_format": "png",
        "usage": {**counts, "input_tokens_details": details},
    }
    if size := size_of(pictures[0]):
        shown["size"] = size
    return msgspec.json.encode(shown)


def size_of(picture: bytes) -> str:
    """Width and height of a PNG, as OpenAI writes them; empty for any other file."""
    if not picture.startswith(_PNG) or len(picture) < 24:
        return ""
    width, height = struct.unpack(">II", picture[16:24])
    return f"{width}x{height}"
