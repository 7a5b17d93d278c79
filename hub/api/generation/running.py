"""Generation: what one HTTP request asks of the pipeline, as one or several requests that run side by side.

They begin together, are read together, and end together: with the first error, or when the client closes its
connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from hub.api.cross_origin import check_content_type
from hub.api.errors import error_response
from hub.api.exchange import Exchange, exchange_of
from hub.api.generation.body import read_body
from hub.api.generation.fields import RequestFields, check_model
from hub.api.generation.timings import server_timing
from hub.api.protocols import cut_answer, piece_writer_of
from hub.orchestrator.tracing import trace_headers
from omni_discovery.errors import OmniError, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig

logger = logging.getLogger(__name__)

_Fields = TypeVar("_Fields", bound=RequestFields)

#: nginx's status for a client that closed its connection before the answer.
_CLIENT_LEFT: Final = 499
#: Outputs of several requests that may wait for the one that reads them all.
_AHEAD: Final = 16


#: An output of the request with this number, its error, or None: it has ended.
_Queued = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to the pipeline; see ``AsyncOmni.generate``."""

    inputs: Mapping[str, Any]
    params: Mapping[int, Mapping[str, Any]]
    modalities: Sequence[str] | None = None
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Came:
    """An HTTP request whose body was read and checked."""

    request: Request
    exchange: Exchange
    #: When its last byte had come, on ``time.perf_counter``: a slow sender doesn't count as time in the hub.
    received_s: float


class Route:
    """What the routes share, over one AsyncOmni. ``prefix`` begins the ids of their requests."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig, prefix: str) -> None:
        self.omni = omni
        self.deploy = deploy
        self.model = deploy.served_name
        self._prefix = prefix

    async def answer(
        self,
        request: Request,
        parse: Callable[[bytes], _Fields],
        respond: Callable[[_Fields, Came], Awaitable[Response]],
        content_type: str = "application/json",
    ) -> Response:
        """Read a body of this type, check it, and have it answered; an OmniError becomes an answer, too."""
        exchange = exchange_of(request.scope)
        exchange.request_id = f"{self._prefix}-{exchange.request_id}"
        try:
            with self.omni.rejections.counted():
                check_content_type(request, content_type)
                body = await read_body(request)
                received_s = time.perf_counter()
                fields = parse(body)
                check_model(fields.model, self.model)
                self.omni.client_bounds.check_asked(fields.timeout, fields.priority)
            return await respond(fields, Came(request, exchange, received_s))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except OmniError as error:
            exchange.note_error(error)
            return error_response(error)

    def generation(self, came: Came, fields: RequestFields, asks: Sequence[Ask]) -> Generation:
        """Begin these requests when the first output is asked for. Raise if its client has no room for so many."""
        with self.omni.rejections.counted():
            came.exchange.charge(sum(1 + len(ask.companions) for ask in asks) - 1)
        return Generation(self.omni, came, fields, asks)

    def whole(self, body: bytes, received_at_s: float, timings_s: Mapping[str, float]) -> Response:
        """A whole answer with its timings. ``received_at_s``: when its last output came, on ``time.perf_counter``."""
        out_s = time.perf_counter() - received_at_s
        self.omni.hub_metrics.observe_out(out_s)
        headers = {"Server-Timing": server_timing({**timings_s, "hub_out": out_s}), **stale_header(self.omni)}
        return Response(body, media_type="application/json", headers=headers)


class Generation:
    """The outputs of requests that run side by side, each with the number of its request. Close it."""

    def __init__(self, omni: AsyncOmni, came: Came, fields: RequestFields, asks: Sequence[Ask]) -> None:
        self._omni = omni
        self.exchange = exchange = came.exchange
        name = exchange.request_id
        self._ids = [name] if len(asks) == 1 else [f"{name}-{number}" for number in range(len(asks))]
        headers = trace_headers(came.request.headers)
        self._outputs = [
            omni.generate(
                ask.inputs,
                request_id=request_id,
                label=exchange.label,
                key=exchange.key,
                modalities=ask.modalities,
                params=ask.params,
                timeout_s=fields.timeout,
                received_s=came.received_s,
                priority=fields.priority,
                async_chunk=fields.async_chunk,
                companions=ask.companions,
                trace_headers=headers,
                taker=self._offer if len(asks) == 1 else None,
            )
            for request_id, ask in zip(self._ids, asks, strict=True)
        ]
        self._merged = self._merge()
        self._request = came.request
        #: Whether the client has closed its connection.
        self.has_left = False
        #: Is offered each output of a single request that is waited for here, see ``OutputQueue``; None: nobody.
        self.taker: Callable[[OmniOutput], bool] | None = None
        # It first runs when an output is waited for; AsyncOmni knows the request by then.
        self._watch = asyncio.create_task(self._watch_client(), name="ClientWatch")

    def __aiter__(self) -> AsyncGenerator[tuple[int, OmniOutput], None]:
        """The outputs. Raise RequestError."""
        return self._merged

    async def first(self) -> tuple[int, OmniOutput] | None:
        """The first output, or None if there is none; an error before it is raised here, and closes all."""
        try:
            first = await anext(self._merged, None)
            if first is not None:
                self.exchange.note_output(first[1])
        except BaseException:
            await self.close()
            raise
        return first

    async def from_first(self, first: tuple[int, OmniOutput] | None) -> AsyncGenerator[tuple[int, OmniOutput], None]:
        """The output that ``first`` has returned, and all after it. Raise RequestError."""
        if first is not None:
            yield first
            async for each in self._merged:
                yield each

    async def close(self) -> None:
        """End what still runs. Idempotent."""
        self._watch.cancel()
        await self._merged.aclose()

    @property
    def left_response(self) -> Response:
        """The answer for the log of a client that has left."""
        return Response(status_code=_CLIENT_LEFT)

    def _offer(self, output: OmniOutput) -> bool:
        return self.taker is not None and self.taker(output)

    async def _merge(self) -> AsyncGenerator[tuple[int, OmniOutput], None]:
        if len(self._outputs) == 1:
            async with aclosing(self._outputs[0]) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[_Queued] = asyncio.Queue(_AHEAD)
        pumps: list[asyncio.Task[None]] = []
        try:
            for number, each in enumerate(self._outputs):
                pumps.append(asyncio.create_task(_pump(number, each, queue)))
                # A long prompt takes its time to check and to send: others get a turn between two of them.
                await asyncio.sleep(0)
            left = len(pumps)
            # A client that left before the requests were known has aborted none of them.
            while left and not self.has_left:
                number, came = await queue.get()
                if isinstance(came, Exception):
                    raise came
                if came is None:
                    left -= 1
                else:
                    yield number, came
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _watch_client(self) -> None:
        """Abort when the client closes its connection: no stage may work for an answer that is not read."""
        try:
            while (await self._request.receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            # The end, by ``close``. As an error of this task it would lead back here by its traceback, and keep all of
            # the answer until the collector looks for such rings.
            return
        self.has_left = True
        try:
            await self._omni.abort(self._ids)
        except RequestError as error:
            # Nobody waits for the answer any more, and a silent replica has lines of its own.
            logger.debug("request.abort_unconfirmed request=%s: %s", self.exchange.request_id, error)


async def _pump(
    number: int,
    outputs: AsyncGenerator[OmniOutput, None],
    queue: asyncio.Queue[_Queued],
) -> None:
    end: Exception | None = None
    try:
        async with aclosing(outputs):
            async for output in outputs:
                await queue.put((number, output))
    except Exception as error:  # noqa: BLE001 - whoever reads raises it
        end = error
    await queue.put((number, end))


class CutShortError(OmniError):
    """A streamed answer that has no place for an error has failed: it is to be cut, and not to be ended."""


class GenerationStream(StreamingResponse):
    """A streamed answer that closes its generation, also if the client leaves before anything was sent.

    ``take`` is given a function that sends bytes behind those before, or can't now and returns False, and offered each
    output that ``content`` waits for: what it takes (True) is not in ``content``.
    """

    def __init__(
        self,
        generation: Generation,
        content: AsyncIterable[bytes],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        take: Callable[[Callable[[bytes], bool], OmniOutput], bool] | None = None,
    ) -> None:
        super().__init__(content, media_type=media_type, headers={"Cache-Control": "no-cache", **(headers or {})})
        self._generation = generation
        self._take = take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        take, write = self._take, piece_writer_of(scope)
        if take is not None and write is not None:
            self._generation.taker = partial(take, write)
        try:
            await super().__call__(scope, receive, send)
        except CutShortError:
            cut_answer(scope)
        finally:
            await self._generation.close()


def event_of(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"".join((b"data: ", msgspec.json.encode(body), b"\n\n"))


def stale_header(omni: AsyncOmni) -> dict[str, str]:
    """The header of an answer by replicas that were picked from a stale view; empty while the view is fresh."""
    stale_s = omni.view_stale_s
    return {} if stale_s is None else {"x-omni-view-stale-s": f"{stale_s:.1f}"}
