"""POST /v1/chat/completions: one choice for each final output, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from hub.api.chat_answer import Answer, event_of, server_timing
from hub.api.chat_schema import (
    MAX_BODY_BYTES,
    MAX_DROPPED_BYTES,
    ChatRequest,
    check_model,
    parse_chat,
    refuse_adapter_paths,
    refuse_embeddings,
    refuse_logprobs,
)
from hub.api.cross_origin import check_content_type
from hub.api.errors import BodyTooLongError, describe, error_response
from hub.api.exchange import Exchange, exchange_of
from hub.orchestrator.tracing import trace_headers
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig

logger = logging.getLogger(__name__)

#: nginx's status for a client that closed its connection before the answer.
_CLIENT_LEFT = 499


class _ClientWatch:
    """Aborts a request when its client closes the connection: no stage may work for an answer that is not read.

    Its task first runs when the caller waits for an output; AsyncOmni knows the request by then.
    """

    def __init__(self, omni: AsyncOmni, request: Request, request_id: str) -> None:
        self._omni = omni
        self._request = request
        self._request_id = request_id
        self.has_left = False
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """End the watch. Idempotent."""
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        try:
            await self._omni.abort(self._request_id)
        except RequestError as error:
            # Nobody waits for the answer any more, and a silent replica has lines of its own.
            logger.debug("request.abort_unconfirmed request=%s: %s", self._request_id, error)


class ChatCompletions:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig) -> None:
        self._omni = omni
        self._deploy = deploy
        self._model = deploy.served_name

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        exchange = exchange_of(request.scope)
        exchange.request_id = f"chatcmpl-{exchange.request_id}"
        try:
            chat, received_s = await self._read(request)
            answer = Answer(exchange, self._model, int(time.time()), is_streamed=bool(chat.stream))
            headers = trace_headers(request.headers) if self._omni.is_traced else None
            outputs = self._generate(chat, exchange, received_s, headers)
            respond = self._streamed if chat.stream else self._whole
            return await respond(chat, answer, outputs, _ClientWatch(self._omni, request, answer.request_id))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except OmniError as error:
            exchange.note_error(error)
            return error_response(error)

    async def _read(self, request: Request) -> tuple[ChatRequest, float]:
        """The request and when its last byte had come (a slow sender doesn't count as time in the hub).

        Raise InvalidRequestError, which is counted here: such a request never reaches the orchestrator.
        """
        try:
            check_content_type(request)
            body = await read_body(request)
            received_s = time.perf_counter()
            chat = parse_chat(body)
            check_model(chat.model, self._model)
            self._omni.client_bounds.check_asked(chat.timeout, chat.priority)
            refuse_embeddings(self._deploy.stages, chat.modalities)
        except InvalidRequestError as error:
            self._omni.rejections.count(error)
            raise
        return chat, received_s

    def _generate(
        self, chat: ChatRequest, exchange: Exchange, received_s: float, headers: Mapping[str, str] | None
    ) -> AsyncGenerator[OmniOutput, None]:
        return self._omni.generate(
            {"messages": chat.messages},
            request_id=exchange.request_id,
            label=exchange.label,
            key=exchange.key,
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

    async def _whole(
        self, chat: ChatRequest, answer: Answer, outputs: AsyncGenerator[OmniOutput, None], watch: _ClientWatch
    ) -> Response:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    answer.add(output)
        finally:
            watch.stop()
        if watch.has_left:
            return Response(status_code=_CLIENT_LEFT)
        body = await answer.body(timings=chat.include_timings)
        out_s = time.perf_counter() - answer.received_at_s
        self._omni.hub_metrics.observe_out(out_s)
        timing = server_timing({**answer.timings_s, "hub_out": out_s})
        headers = {"Server-Timing": timing, **stale_header(self._omni)}
        return Response(body, media_type="application/json", headers=headers)

    async def _streamed(
        self, chat: ChatRequest, answer: Answer, outputs: AsyncGenerator[OmniOutput, None], watch: _ClientWatch
    ) -> Response:
        try:
            # The first output decides the status: an error before it is an ordinary error answer.
            first = await anext(outputs, None)
            if first is not None:
                # The headers leave now.
                answer.exchange.note_output(first)
        except BaseException:
            watch.stop()
            raise
        usage = chat.stream_options is not None and chat.stream_options.include_usage
        return StreamingResponse(
            _events(answer, first, outputs, watch, usage=usage, timings=chat.include_timings),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", **stale_header(self._omni)},
        )


def stale_header(omni: AsyncOmni) -> dict[str, str]:
    """The header of an answer by replicas that were picked from a stale view; empty while the view is fresh."""
    stale_s = omni.view_stale_s
    return {} if stale_s is None else {"x-omni-view-stale-s": f"{stale_s:.1f}"}


def stage_params(deploy: DeployConfig, chat: ChatRequest) -> dict[int, dict[str, Any]]:
    """The parameters of each stage: text sampling for text stages, the seed for all, then ``sampling_params_list``.

    Raise InvalidRequestError.
    """
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
            asked.update(explicit[position] or {})
        params[stage.stage_id] = asked
    return params


async def read_body(request: Request) -> bytes:
    """The whole body, of at most MAX_BODY_BYTES. Raise BodyTooLongError if it is longer."""
    limit = f"the body is longer than {MAX_BODY_BYTES} bytes"
    too_long = BodyTooLongError(f"{limit}: send less in one request, or smaller pictures")
    length, waits = request.headers.get("content-length", ""), "expect" in request.headers
    size_bytes = int(length[:20]) if length.isdecimal() else 0
    if size_bytes > MAX_DROPPED_BYTES or (waits and size_bytes > MAX_BODY_BYTES):
        raise too_long
    body, size_bytes = bytearray(), 0
    async for piece in request.stream():
        size_bytes += len(piece)
        if size_bytes <= MAX_BODY_BYTES:
            body += piece
        elif size_bytes > MAX_DROPPED_BYTES:
            break
    # It was read to its end all the same: a client that is still sending would get no answer from a closed connection.
    if size_bytes > MAX_BODY_BYTES:
        raise too_long
    return bytes(body)


async def _events(
    answer: Answer,
    first: OmniOutput | None,
    rest: AsyncGenerator[OmniOutput, None],
    watch: _ClientWatch,
    *,
    usage: bool,
    timings: bool,
) -> AsyncIterator[bytes]:
    started: set[int] = set()
    output = first
    try:
        async with aclosing(rest):
            while output is not None:
                index = answer.add(output)
                if index is not None and (output.text or output.data or output.finish_reason is not None):
                    yield await answer.event(output, index, first=index not in started)
                    started.add(index)
                output = await anext(rest, None)
        if usage or timings:
            yield event_of(answer.last_chunk(usage=usage, timings=timings))
    except OmniError as error:
        answer.exchange.note_error(error)
        yield event_of(describe(error)[1])
    finally:
        watch.stop()
    yield b"data: [DONE]\n\n"
