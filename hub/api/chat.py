"""POST /v1/chat/completions: one choice for each final output, whole or as server-sent events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from hub.api.chat_answer import Answer, server_timing
from hub.api.chat_schema import (
    MAX_BODY_BYTES,
    MAX_DROPPED_BYTES,
    ChatRequest,
    parse_chat,
    refuse_adapter_paths,
    refuse_embeddings,
    refuse_logprobs,
)
from hub.api.errors import BodyTooLongError, check_model, describe, error_response
from hub.api.server import ClientLeftError, iterate_unless_left, run_unless_left
from hub.orchestrator.tracing import trace_headers
from omni_discovery.errors import InvalidRequestError, OmniError

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig

#: What nginx says when the client left before the answer; nobody reads it but the access log.
_CLIENT_LEFT = 499


class ChatCompletions:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._omni = omni
        self._deploy = deploy

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        answer = Answer(f"chatcmpl-{uuid.uuid4().hex}", self._deploy.served_name, int(time.time()))
        try:
            chat, received_s = await self._read(request)
            headers = trace_headers(request.headers) if self._omni.is_traced else None
            outputs = self._generate(chat, answer.request_id, received_s, headers)
            if chat.stream:
                return await self._streamed(request, chat, answer, outputs)
            return await run_unless_left(request, self._whole(chat, answer, outputs))
        except (ClientLeftError, ClientDisconnect):
            return Response(status_code=_CLIENT_LEFT)
        except OmniError as error:
            return error_response(error, answer.request_id)

    async def _read(self, request: Request) -> tuple[ChatRequest, float]:
        """What is asked, and when its last byte had come: a client that sends slowly takes none of the hub's time.

        Raise InvalidRequestError; the hub never hears of such a request otherwise.
        """
        try:
            body = await read_body(request)
            received_s = time.perf_counter()
            chat = parse_chat(body)
            check_model(chat.model, self._deploy.served_name)
            refuse_embeddings(self._deploy.stages, chat.modalities)
        except InvalidRequestError as error:
            self._omni.rejections.count(error)
            raise
        return chat, received_s

    def _generate(
        self, chat: ChatRequest, request_id: str, received_s: float, headers: Mapping[str, str] | None
    ) -> AsyncIterator[OmniOutput]:
        return self._omni.generate(
            {"messages": chat.messages},
            request_id=request_id,
            modalities=chat.modalities,
            params=stage_params(self._deploy, chat),
            timeout_s=chat.timeout,
            received_s=received_s,
            priority=chat.priority,
            async_chunk=chat.async_chunk,
            companions={
                role: {"messages": [{"role": "user", "content": text}]} for role, text in chat.companions.items()
            },
            trace_headers=headers,
        )

    async def _whole(self, chat: ChatRequest, answer: Answer, outputs: AsyncIterator[OmniOutput]) -> Response:
        async for output in outputs:
            answer.add(output)
        body = answer.completion(timings=chat.include_timings)
        out_s = time.perf_counter() - answer.received_at_s
        self._omni.hub_metrics.observe_out(out_s)
        timing = server_timing({**answer.timings_s, "hub_out": out_s})
        headers = {"x-request-id": answer.request_id, "Server-Timing": timing, **stale_header(self._omni)}
        return JSONResponse(body, headers=headers)

    async def _streamed(
        self, request: Request, chat: ChatRequest, answer: Answer, outputs: AsyncIterator[OmniOutput]
    ) -> Response:
        live = iterate_unless_left(request, outputs)
        # The first output decides the status: an error before it is an ordinary error answer.
        first = await anext(live, None)
        usage = chat.stream_options is not None and chat.stream_options.include_usage
        return StreamingResponse(
            _events(answer, first, live, usage=usage, timings=chat.include_timings),
            media_type="text/event-stream",
            headers={"x-request-id": answer.request_id, "Cache-Control": "no-cache", **stale_header(self._omni)},
        )


def stale_header(omni: AsyncOmni) -> dict[str, str]:
    """What tells the client that replicas were picked by a view that is not proved fresh; empty while it is."""
    stale_s = omni.view_stale_s
    return {} if stale_s is None else {"x-omni-view-stale-s": f"{stale_s:.1f}"}


def stage_params(deploy: DeployConfig, chat: ChatRequest) -> dict[int, dict[str, Any]]:
    """What the body asks of each stage: text sampling for text stages, the seed for all, then the explicit list."""
    explicit = chat.sampling_params_list or []
    refuse_logprobs(deploy.stages, explicit)
    refuse_adapter_paths(explicit)
    if len(explicit) > len(deploy.stages):
        raise InvalidRequestError(
            f"'sampling_params_list' has {len(explicit)} entries; the pipeline has {len(deploy.stages)} stages"
        )
    params: dict[int, dict[str, Any]] = {}
    for position, stage in enumerate(deploy.stages):
        asked = chat.text_params() if stage.final_output == "text" else {}
        if chat.seed is not None:
            asked["seed"] = chat.seed
        if position < len(explicit):
            asked.update(explicit[position])
        params[stage.stage_id] = asked
    return params


async def read_body(request: Request) -> bytes:
    """The whole body, bounded. Raise BodyTooLongError if it is longer."""
    limit = f"the body is longer than {MAX_BODY_BYTES} bytes"
    too_long = BodyTooLongError(f"{limit}: send less in one request, or smaller pictures")
    told, waits = request.headers.get("content-length", ""), "expect" in request.headers
    size_bytes = int(told[:20]) if told.isdecimal() else 0
    if size_bytes > MAX_DROPPED_BYTES or (waits and size_bytes > MAX_BODY_BYTES):
        raise too_long
    body, size_bytes = bytearray(), 0
    async for piece in request.stream():
        size_bytes += len(piece)
        if size_bytes <= MAX_BODY_BYTES:
            body += piece
        elif size_bytes > MAX_DROPPED_BYTES:
            break
    # Read to its end all the same: a client that is still sending would find its connection closed, and no answer.
    if size_bytes > MAX_BODY_BYTES:
        raise too_long
    return bytes(body)


async def _events(
    answer: Answer, first: OmniOutput | None, rest: AsyncIterator[OmniOutput], *, usage: bool, timings: bool
) -> AsyncIterator[bytes]:
    started: set[int] = set()
    output = first
    try:
        while output is not None:
            index = answer.add(output)
            if index is not None and (output.text or output.data or output.finish_reason is not None):
                yield _event(answer.chunk(output, index, first=index not in started))
                started.add(index)
            output = await anext(rest, None)
        if usage or timings:
            yield _event(answer.last_chunk(usage=usage, timings=timings))
    except ClientLeftError:
        return
    except OmniError as error:
        yield _event(describe(error)[1])
    yield b"data: [DONE]\n\n"


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
