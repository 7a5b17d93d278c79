"""WebSocket /v1/stream: one request whose input comes segment by segment, answered as it comes. JSON, a frame each.

In:   {"type": "segment", "prompt": "...", "last": false}, and {"type": "end"} where no segment was the last one.
Out:  {"type": "delta"}, {"type": "segment_end"}, {"type": "stage_end"}, one {"type": "done"} or {"type": "error"}.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from starlette.websockets import WebSocketDisconnect

from hub.api.chat.messages import check_messages
from hub.api.door.guard import still_opens
from hub.api.errors import UnauthorizedError, describe
from hub.api.exchange import Exchange, exchange_of
from hub.api.generation.fields import check_model, refuse_adapter_paths, refuse_logprobs
from hub.api.generation.timings import shown_timings
from hub.api.long_bodies import hold_messages, long_body
from hub.api.protocols import input_wait_of
from hub.json_memory import memory_of
from omni_discovery.data_urls import file_parts
from omni_discovery.errors import DeadlineExceededError, InvalidRequestError, OmniError, OverloadedError, RequestError
from omni_discovery.inputs.containers import check_text
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
    """A segment of the input; ``last``: no other follows. The other fields belong to the first segment only."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None
    last: bool = False
    model: str = ""
    modalities: Annotated[list[str], msgspec.Meta(min_length=1, max_length=8)] | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0

    def inputs(self) -> dict[str, Any]:
        """The input for the stages: one of ``prompt``, ``messages`` and ``prompt_token_ids``."""
        inputs = {"prompt": self.prompt, "messages": self.messages, "prompt_token_ids": self.prompt_token_ids}
        return {name: value for name, value in inputs.items() if value is not None}

    def check_later(self) -> None:
        """Raise InvalidRequestError for a field that belongs to the first segment."""
        first_only = {
            "model": self.model,
            "modalities": self.modalities,
            "sampling_params_list": self.sampling_params_list,
            "timeout": self.timeout,
            "priority": self.priority,
        }
        late = [name for name, value in first_only.items() if value]
        if late:
            raise InvalidRequestError(f"'{late[0]}' belongs to the first segment; the request has begun")


class EndFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="end"):
    """The end of the input, after a segment that was not ``last``."""


_decoder: msgspec.json.Decoder[SegmentFrame | EndFrame] = msgspec.json.Decoder(SegmentFrame | EndFrame)


def parse_frame(text: str | None) -> SegmentFrame | EndFrame:
    """Read and check a frame; ``text`` None: it was binary. Raise InvalidRequestError that names the field."""
    if text is None:
        raise InvalidRequestError("a frame is JSON text, not binary")
    check_text(text.encode("utf-8", "surrogatepass"))
    try:
        frame = _decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the frame can't be used: {error}".replace("`", "'")) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"the frame is not JSON: {error}") from error
    if isinstance(frame, SegmentFrame) and len(frame.inputs()) != 1:
        raise InvalidRequestError("a segment holds one of 'prompt', 'messages' and 'prompt_token_ids'")
    if isinstance(frame, SegmentFrame) and frame.messages is not None:
        if file_parts(frame.messages):
            raise InvalidRequestError("files come whole, not in segments: send them to POST /v1/chat/completions")
        check_messages(frame.messages)
    return frame


#: How long a client may take for its first segment.
_FIRST_S: Final = 30.0
#: Frames and bytes that a client may send ahead of the answers.
_MAX_AHEAD: Final = 64
_MAX_AHEAD_BYTES: Final = 4 << 20
#: Frames behind the last segment that are forgiven, such as an ``end`` that was not needed.
_MAX_BEHIND: Final = 8
#: How often it is looked whether the client's key was taken back while it sends nothing.
_KEY_CHECK_S: Final = 1.0
#: WebSocket close codes: normal, policy violation (the client's mistake), try again later, internal error.
_OK, _MISTAKE, _LATER, _FAILURE = 1000, 1008, 1013, 1011
#: How long the last frame may take to be sent to a client that does not read.
_CLOSE_S: Final = 5.0


class Stream:
    """The endpoint, over one AsyncOmni: one request for each connection, which end together."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._omni = omni
        self._stages, self._model = deploy.stages, deploy.served_name

    async def respond(self, websocket: WebSocket) -> None:
        """Serve one connection."""
        exchange = exchange_of(websocket.scope)
        exchange.request_id = f"stream-{exchange.request_id}"
        await websocket.accept()
        frames = _Frames(websocket)
        # The reader runs as long as the connection, so that a client that leaves is noticed at once.
        reading = asyncio.create_task(frames.read())
        serving = asyncio.create_task(self._serve(websocket, frames, exchange))
        checking = asyncio.create_task(_check_key(websocket, exchange))
        tasks = (reading, serving, checking)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        failure = next((end for end in ends if isinstance(end, Exception)), None)
        if isinstance(failure, OmniError):
            exchange.note_error(failure)
        # A client that has left gets no last frame: its reader has ended, and nothing has failed.
        if failure is not None or not serving.cancelled():
            await _close(websocket, failure)

    async def _serve(self, websocket: WebSocket, frames: _Frames, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(_FIRST_S):
                first = await frames.next_frame()
        except TimeoutError:
            raise DeadlineExceededError(f"no segment came within {_FIRST_S:.0f} s") from None
        if isinstance(first, EndFrame):
            raise InvalidRequestError("the input ended before its first segment")
        check_model(first.model, self._model)
        self._omni.client_bounds.check_asked(first.timeout, first.priority)
        refuse_logprobs(self._stages, first.sampling_params_list)
        refuse_adapter_paths(first.sampling_params_list)
        outputs = self._omni.generate(
            frames.segments(first),
            request_id=exchange.request_id,
            label=exchange.label,
            key=exchange.key,
            client=exchange.client,
            modalities=first.modalities,
            sampling_params_list=first.sampling_params_list,
            timeout_s=first.timeout,
            received_s=time.perf_counter(),
            priority=first.priority,
            on_input_wait=input_wait_of(websocket.scope),
        )
        async with aclosing(outputs):
            async for output in outputs:
                exchange.note_output(output)
                await _send(websocket, frame_of(output))


async def _check_key(websocket: WebSocket, exchange: Exchange) -> None:
    """Wait until the client's key is taken back. Raise UnauthorizedError then."""
    while True:
        if not still_opens(websocket.scope):
            logger.warning("stream.key_taken_back request=%s key=%s", exchange.request_id, exchange.key)
            raise UnauthorizedError(is_missing=False)
        await asyncio.sleep(_KEY_CHECK_S)


class _Frames:
    """The frames of one client, read ahead within bounds."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        #: The frames that were read ahead, each with its size and its memory in bytes.
        self._waiting: asyncio.Queue[tuple[SegmentFrame | EndFrame, int, int]] = asyncio.Queue()
        self._size_bytes = self._memory_bytes = 0
        self._is_over = False
        self._behind = 0

    async def read(self) -> None:
        """Read frames until the client leaves; a few behind its last segment are dropped.

        Raise OmniError for a wrong frame: it ends the request at once, whatever frames wait.
        """
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            if self._is_over:
                self._behind += 1
                if self._behind > _MAX_BEHIND:
                    raise InvalidRequestError("frames came behind the last segment: send nothing after it")
                continue
            text = message.get("text")
            size_bytes = len(text or "")
            if self._waiting.qsize() >= _MAX_AHEAD or self._size_bytes + size_bytes > _MAX_AHEAD_BYTES:
                raise OverloadedError("segments came faster than they were answered: wait for each 'segment_end'")
            await long_body(self._websocket.scope, size_bytes)
            memory_bytes = memory_of(text or "")
            hold_messages(self._websocket.scope, self._memory_bytes + memory_bytes)
            frame = parse_frame(text)
            self._is_over = not isinstance(frame, SegmentFrame) or frame.last
            self._size_bytes += size_bytes
            self._memory_bytes += memory_bytes
            self._waiting.put_nowait((frame, size_bytes, memory_bytes))

    async def next_frame(self) -> SegmentFrame | EndFrame:
        """Wait for the next frame."""
        frame, size_bytes, memory_bytes = await self._waiting.get()
        self._size_bytes -= size_bytes
        self._memory_bytes -= memory_bytes
        return frame

    async def segments(self, first: SegmentFrame) -> AsyncIterator[Mapping[str, Any]]:
        """The inputs of all segments. Raise InvalidRequestError."""
        frame: SegmentFrame | EndFrame = first
        while isinstance(frame, SegmentFrame):
            yield frame.inputs()
            if frame.last:
                return
            frame = await self.next_frame()
            if isinstance(frame, SegmentFrame):
                frame.check_later()


def frame_of(output: OmniOutput) -> dict[str, Any]:
    """The frame of an output."""
    if output.is_summary:
        return {"type": "done", "request_id": output.request_id, "timings_s": shown_timings(output.timings_s)}
    head: dict[str, Any] = {
        "stage_id": output.stage_id,
        "segment": output.segment,
        "modality": output.modality,
    }
    if output.segment_end is not None:
        return {"type": "segment_end", **head, "finish_reason": output.segment_end, "usage": dict(output.usage)}
    if output.finish_reason is not None:
        return {"type": "stage_end", **head, "finish_reason": output.finish_reason, "usage": dict(output.usage)}
    if output.data:
        data = base64.b64encode(output.data).decode()
        unfinished = {} if output.partial_image is None else {"partial_image_index": output.partial_image}
        return {"type": "delta", **head, "data": data, "mime": output.mime, **unfinished}
    return {"type": "delta", **head, "text": output.text, "token_ids": list(output.token_ids)}


async def _close(websocket: WebSocket, error: Exception | None) -> None:
    """Send an error, if any, and close the connection, within 5 s: the client may not read any more."""
    code = _OK
    if error is not None and not isinstance(error, OmniError | WebSocketDisconnect):
        logger.error("stream.bug", exc_info=error)
        error = RequestError(f"an internal error: {type(error).__name__}")
    with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
        async with asyncio.timeout(_CLOSE_S):
            if isinstance(error, OmniError):
                status, body = describe(error)
                code = _LATER if status in (429, 503) else _MISTAKE if status < 500 else _FAILURE
                await _send(websocket, {"type": "error", "status": status, **body})
            await websocket.close(code)


async def _send(websocket: WebSocket, frame: Mapping[str, Any]) -> None:
    await websocket.send_text(msgspec.json.encode(frame).decode())
