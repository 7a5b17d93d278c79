"""POST /v1/images/edits: a form with pictures and a prompt in, pictures out, in the shapes of OpenAI's clients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hub.api.cross_origin import FORM
from hub.api.images.drawing import Drawing
from hub.api.images.schema import ImageEdit, parse_edit

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from hub.async_omni import AsyncOmni
    from omni_discovery.deploy.document import DeployConfig


class ImageEdits:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._drawing = Drawing(omni, deploy, "image_edit")

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        parse = partial(self._parse, request.headers.get("content-type", ""))
        return await self._drawing.route.answer(request, parse, self._drawing.respond, FORM)

    def _parse(self, content_type: str, body: bytes) -> ImageEdit:
        self._drawing.check_pipeline()
        return parse_edit(content_type, body)
