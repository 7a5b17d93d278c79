"""WebSocket /v1/stream: one request whose input comes segment by segment, answered as it comes. JSON, a frame each.

In:   {"type": "segment", "prompt": "...", "last": false}, and {"type": "end"} where no segment was the last one.
Out:  {"type": "delta"}, {"type": "segment_end"}, {"type": "stage_end"}, one {"type": "done"} or {"type": "error"}.

What the frames of /v1/stream may hold, checked at the door.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from starlette.websockets import WebSocketDisconnect

from hub.api.chat_answer import shown_timings
from hub.api.chat_schema import refuse_adapter_paths, refuse_logprobs
from hub.api.errors import check_model, describe
from omni_discovery.data_urls import picture_parts
from omni_discovery.errors import DeadlineExceededError, InvalidRequestError, OmniError, OverloadedError, RequestError
from omni_discovery.wire import MAX_PRIORITY

if TYPE_CHECKING:
    from starlette.websockets import WebSocket

    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig

logger = logging.getLogger(__name__)


class SegmentFrame(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="segment"
):
    """A piece of the input; ``last``: no other follows. All but the input and ``last`` belong to the first one only."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None
    last: bool = False
    model: str = ""
    modalities: Annotated[list[str], msgspec.Meta(min_length=1, max_length=8)] | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0

    def inputs(self) -> dict[str, Any]:
        """What the stages get of it."""
        given = {"prompt": self.prompt, "messages": self.messages, "prompt_token_ids": self.prompt_token_ids}
        return {name: value for name, value in given.items() if value is not None}

    def check_later(self) -> None:
        """Raise InvalidRequestError if it says of the request what only the first segment can say."""
        told = {
            "model": self.model,
            "modalities": self.modalities,
            "sampling_params_list": self.sampling_params_list,
            "timeout": self.timeout,
            "priority": self.priority,
        }
        late = [name for name, value in told.items() if value]
        if late:
            raise InvalidRequestError(f"'{late[0]}' belongs to the first segment; the request has begun")


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="end"):
    """No segment follows."""


_decoder: msgspec.json.Decoder[SegmentFrame | End] = msgspec.json.Decoder(SegmentFrame | End)


def parse_frame(text: str | None) -> SegmentFrame | End:
    """Read and check a frame; None: it was not text. Raise InvalidRequestError that names the field."""
    if text is None:
        raise InvalidRequestError("a frame is JSON text, not binary")
    try:
        frame = _decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the frame can't be used: {error}".replace("`", "'")) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"the frame is not JSON: {error}") from error
    if isinstance(frame, SegmentFrame) and len(frame.inputs()) != 1:
        raise InvalidRequestError("a segment holds one of 'prompt', 'messages' and 'prompt_token_ids'")
    if isinstance(frame, SegmentFrame) and picture_parts(frame.messages):
        raise InvalidRequestError("pictures come whole, not in segments: send them to POST /v1/chat/completions")
    return frame


#: How long a client may take for its first segment.
_FIRST_S: Final = 30.0
#: What a client may have sent ahead of the answers: frames, and bytes.
_MAX_AHEAD: Final = 64
_MAX_AHEAD_BYTES: Final = 4 << 20
#: How the connection is closed: as agreed, for a mistake of the client's, for now, for a failure of ours.
_OK, _MISTAKE, _LATER, _FAILURE = 1000, 1008, 1013, 1011
#: How long the last words may take to reach a client that does not read.
_LAST_WORDS_S: Final = 5.0


class Stream:
    """The endpoint, over one AsyncOmni. The connection ends with its request, and the request with the connection."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._omni = omni
        self._deploy = deploy

    async def respond(self, websocket: WebSocket) -> None:
        """Serve one connection."""
        await websocket.accept()
        frames = _Frames(websocket)
        # It reads as long as the connection stands, so that a client that leaves is noticed at once.
        reading, serving = asyncio.create_task(frames.read()), asyncio.create_task(self._serve(websocket, frames))
        try:
            await asyncio.wait({reading, serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, serving):
                task.cancel()
            ends = await asyncio.gather(reading, serving, return_exceptions=True)
        failure = next((end for end in ends if isinstance(end, Exception)), None)
        # A client that has left gets no last word: its reader ended, and nothing had failed.
        if failure is not None or not serving.cancelled():
            await _close(websocket, failure)

    async def _serve(self, websocket: WebSocket, frames: _Frames) -> None:
        try:
            async with asyncio.timeout(_FIRST_S):
                first = await frames.next()
        except TimeoutError:
            raise DeadlineExceededError(f"no segment came within {_FIRST_S:.0f} s") from None
        if isinstance(first, End):
            raise InvalidRequestError("the input ended before its first segment")
        check_model(first.model, self._deploy.served_name)
        refuse_logprobs(self._deploy.stages, first.sampling_params_list)
        refuse_adapter_paths(first.sampling_params_list)
        outputs = self._omni.generate(
            frames.segments(first),
            request_id=f"stream-{uuid.uuid4().hex}",
            modalities=first.modalities,
            sampling_params_list=first.sampling_params_list,
            timeout_s=first.timeout,
            received_s=time.perf_counter(),
            priority=first.priority,
        )
        async with aclosing(outputs):
            async for output in outputs:
                await _send(websocket, frame_of(output))


class _Frames:
    """What one client sends."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        #: What has come and was not taken, with its size.
        self._waiting: asyncio.Queue[tuple[SegmentFrame | End, int]] = asyncio.Queue()
        self._size_bytes = 0
        self._is_over = False

    async def read(self) -> None:
        """Take in frames until the client leaves. Behind its last segment nothing counts any more.

        Raise OmniError for a frame that can't be taken: it ends the request at once, whatever else waits.
        """
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            if self._is_over:
                continue
            text = message.get("text")
            size_bytes = len(text or "")
            if self._waiting.qsize() >= _MAX_AHEAD or self._size_bytes + size_bytes > _MAX_AHEAD_BYTES:
                raise OverloadedError("segments came faster than they were answered: wait for each 'segment_end'")
            frame = parse_frame(text)
            self._is_over = not isinstance(frame, SegmentFrame) or frame.last
            self._size_bytes += size_bytes
            self._waiting.put_nowait((frame, size_bytes))

    async def next(self) -> SegmentFrame | End:
        """The next frame."""
        frame, size_bytes = await self._waiting.get()
        self._size_bytes -= size_bytes
        return frame

    async def segments(self, first: SegmentFrame) -> AsyncIterator[Mapping[str, Any]]:
        """The inputs of all segments."""
        frame: SegmentFrame | End = first
        while isinstance(frame, SegmentFrame):
            yield frame.inputs()
            if frame.last:
                return
            frame = await self.next()
            if isinstance(frame, SegmentFrame):
                frame.check_later()


def frame_of(output: OmniOutput) -> dict[str, Any]:
    """An output as the client sees it."""
    if output.is_summary:
        return {"type": "done", "request_id": output.request_id, "timings_s": shown_timings(output.timings_s)}
    about: dict[str, Any] = {
        "stage_id": output.stage_id,
        "segment": output.segment,
        "modality": output.modality,
    }
    if output.segment_end is not None:
        return {"type": "segment_end", **about, "finish_reason": output.segment_end, "usage": dict(output.usage)}
    if output.finish_reason is not None:
        return {"type": "stage_end", **about, "finish_reason": output.finish_reason, "usage": dict(output.usage)}
    if output.data:
        data = base64.b64encode(output.data).decode()
        return {"type": "delta", **about, "data": data, "mime": output.mime}
    return {"type": "delta", **about, "text": output.text, "token_ids": list(output.token_ids)}


async def _close(websocket: WebSocket, error: Exception | None) -> None:
    """Say the last word, within bounds: the client may not read any more, or be gone."""
    code = _OK
    if error is not None and not isinstance(error, OmniError | WebSocketDisconnect):
        logger.error("stream.bug", exc_info=error)
        error = RequestError(f"an internal error: {type(error).__name__}")
    with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
        async with asyncio.timeout(_LAST_WORDS_S):
            if isinstance(error, OmniError):
                status, body = describe(error)
                code = _LATER if status in (429, 503) else _MISTAKE if status < 500 else _FAILURE
                await _send(websocket, {"type": "error", "status": status, **body})
            await websocket.close(code)


async def _send(websocket: WebSocket, frame: Mapping[str, Any]) -> None:
    await websocket.send_text(msgspec.json.encode(frame).decode())
