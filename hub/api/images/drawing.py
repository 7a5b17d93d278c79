"""What the routes that draw have in common: the requests to the pipeline, and the pictures in the shapes of OpenAI."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from hub.api.errors import describe
from hub.api.generation.body import AnswerSize
from hub.api.generation.fields import stage_params, with_seed
from hub.api.generation.running import Ask, Came, Generation, GenerationStream, Route, stale_header
from hub.api.generation.usage import Usage
from hub.api.images.turns import PictureTurns
from omni_discovery.errors import InvalidRequestError, OmniError

if TYPE_CHECKING:
    from hub.api.images.schema import ImageFields
    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig

_PNG: Final = b"\x89PNG\r\n\x1a\n"


class Drawing:
    """Draws for one route. ``event`` begins the names of its events."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig, event: str) -> None:
        self.route = Route(omni, deploy, "img")
        self._event = event
        self._drawing = [stage.stage_id for stage in deploy.stages if stage.final_output == "image"]

    def check_pipeline(self) -> None:
        """Raise InvalidRequestError for a pipeline that draws nothing."""
        if not self._drawing:
            raise InvalidRequestError("this pipeline draws nothing: no stage of it has final_output: image")

    async def respond(self, asked: ImageFields, came: Came) -> Response:
        """The answer to a request. Raise OmniError."""
        with self.route.omni.rejections.counted():
            more = dict.fromkeys(self._drawing, asked.image_params())
            params = stage_params(self.route.deploy, asked, {}, more)
        inputs = {"messages": [{"role": "user", "content": asked.content()}]}
        asks = [Ask(inputs, with_seed(params, number), ("image",)) for number in range(asked.n or 1)]
        usage = Usage([stage.stage_id for stage in self.route.deploy.stages], len(asks))
        generation = self.route.generation(came, asked, asks)
        headers = stale_header(self.route.omni)
        if asked.stream:
            await generation.begin()
            shown = _ShownPictures(self._event, usage, asked.partial_images or 0)
            events = self._events(generation, shown)
            return GenerationStream(generation, events, "text/event-stream", headers)
        drawn = await _whole(generation, usage)
        if generation.has_left:
            return generation.left_response
        if not drawn:
            raise _nothing()
        # In a thread: pictures may be large, and the hub's loop must go on.
        body = await asyncio.to_thread(_body, drawn, usage)
        return Response(body, media_type="application/json", headers=headers)

    async def _events(self, generation: Generation, shown: _ShownPictures) -> AsyncIterator[bytes]:
        try:
            async for number, output in generation.outputs():
                generation.exchange.note_output(output)
                for event in await shown.events_of(number, output):
                    yield event
            if not shown.count and not generation.has_left:
                raise _nothing()
        except OmniError as error:
            generation.exchange.note_error(error)
            for event in shown.turns.rest():
                yield event
            yield _event("error", describe(error)[1])


class _ShownPictures:
    """Makes the events of a stream: each picture as it is done, and before it at most ``partial_images`` unfinished.

    The counts of an event are those since the one before.
    """

    def __init__(self, event: str, usage: Usage, partial_images: int) -> None:
        self._event = event
        self._usage = usage
        self._counts = dict.fromkeys(usage.shown_as_input(), 0)
        self._partial_images = partial_images
        self.turns = PictureTurns(are_kept=partial_images > 0)
        #: By request: a picture whose counts, which come behind it, are not there yet.
        self._waiting: dict[int, bytes] = {}
        #: The finished pictures so far.
        self.count = 0

    async def events_of(self, number: int, output: OmniOutput) -> list[bytes]:
        """The events that are sent when this output of the request with this number has come."""
        self._usage.add(number, output)
        events: list[bytes] = []
        if number in self._waiting and (output.data or output.finish_reason):
            events += self.turns.finished(number, await self._completed(self._waiting.pop(number)))
        if output.data and output.partial_image is None:
            self._waiting[number] = output.data
        elif output.partial_image is not None and self._is_wanted(number, output.partial_image):
            # In a thread, as all of them: pictures may be large.
            events.append(await asyncio.to_thread(_partial, self._event, output.data, output.partial_image))
        if output.is_summary:
            events += self.turns.request_over(number)
        return events

    def _is_wanted(self, number: int, index: int) -> bool:
        return index < self._partial_images and self.turns.is_turn_of(number)

    async def _completed(self, picture: bytes) -> bytes:
        counts = self._usage.shown_as_input()
        since = {name: max(0, counts[name] - self._counts[name]) for name in counts}
        self._counts, self.count = counts, self.count + 1
        return await asyncio.to_thread(_completed, self._event, picture, since)


async def _whole(generation: Generation, usage: Usage) -> list[bytes]:
    """All pictures, in the order of the requests for them."""
    pictures: dict[int, list[bytes]] = {}
    size = AnswerSize("a smaller 'n' or 'size'")
    try:
        async for number, output in generation:
            generation.exchange.note_output(output)
            if output.partial_image is not None:
                continue
            usage.add(number, output)
            size.add(4 * len(output.data) // 3)
            if output.data:
                pictures.setdefault(number, []).append(output.data)
    finally:
        await generation.close()
    return [each for _, listed in sorted(pictures.items()) for each in listed]


def _nothing() -> InvalidRequestError:
    return InvalidRequestError("nothing was drawn: the stages before have made nothing of this prompt", 422)


def _body(pictures: list[bytes], usage: Usage) -> bytes:
    shown: dict[str, Any] = {
        "created": int(time.time()),
        "data": [{"b64_json": base64.b64encode(each).decode(), "revised_prompt": None} for each in pictures],
        "output_format": "png",
        "usage": _shown_counts(usage.shown_as_input()),
    }
    if size := size_of(pictures[0]):
        shown["size"] = size
    return msgspec.json.encode(shown)


def _completed(name: str, picture: bytes, counts: dict[str, int]) -> bytes:
    return _event(f"{name}.completed", {**_shown_picture(picture), "usage": _shown_counts(counts)})


def _partial(name: str, picture: bytes, index: int) -> bytes:
    return _event(f"{name}.partial_image", {**_shown_picture(picture), "partial_image_index": index})


def _shown_picture(picture: bytes) -> dict[str, Any]:
    return {
        "b64_json": base64.b64encode(picture).decode(),
        "background": "auto",
        "created_at": int(time.time()),
        "output_format": "png",
        "quality": "auto",
        "size": size_of(picture) or "auto",
    }


def _shown_counts(counts: dict[str, int]) -> dict[str, Any]:
    return {**counts, "input_tokens_details": {"text_tokens": counts["input_tokens"], "image_tokens": 0}}


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **body}))


def size_of(picture: bytes) -> str:
    """Width and height of a PNG, as OpenAI writes them; empty for any other file."""
    if not picture.startswith(_PNG) or len(picture) < 24:
        return ""
    width, height = struct.unpack(">II", picture[16:24])
    return f"{width}x{height}"
