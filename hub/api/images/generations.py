"""POST /v1/images/generations: a prompt in, pictures out, in the shapes of OpenAI's clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hub.api.images.drawing import Drawing
from hub.api.images.schema import ImageRequest, parse_image

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from hub.async_omni import AsyncOmni
    from omni_discovery.deploy.document import DeployConfig


class ImageGenerations:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._drawing = Drawing(omni, deploy, "image_generation")

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        return await self._drawing.route.answer(request, self._parse, self._drawing.respond)

    def _parse(self, body: bytes) -> ImageRequest:
        self._drawing.check_pipeline()
        return parse_image(body)
