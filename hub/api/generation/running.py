"""Generation: what one HTTP request asks of the pipeline, as one or several requests that run side by side.

They begin together, are read together, and end together: with the first error, or when the client closes its
connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from hub.api.cross_origin import check_content_type
from hub.api.errors import RetryConflictError, describe, error_response
from hub.api.exchange import Exchange, exchange_of
from hub.api.generation import idempotency, resumption
from hub.api.generation.body import read_body
from hub.api.generation.fields import RequestFields, check_model
from hub.api.generation.idempotency import IdempotencyKeys
from hub.api.generation.resumption import (
    NO_NONCE,
    NONCE_BYTES,
    SEED_BITS,
    Asker,
    Place,
    Progress,
    nonce_of,
    parse_place,
    place_of_new,
    seed_of_nonce,
)
from hub.api.generation.timings import server_timing
from hub.api.held_headers import headers_latest_s
from hub.api.long_bodies import long_body
from hub.api.protocols import cut_answer, piece_writer_of
from hub.json_memory import memory_of
from hub.orchestrator.tracing import trace_headers
from omni_discovery.errors import InvalidRequestError, OmniError, RequestError
from omni_discovery.text import MAX_LABEL, is_label

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig

logger = logging.getLogger(__name__)

_Fields = TypeVar("_Fields", bound=RequestFields)
#: Is given a function that writes bytes and an output, and returns whether it has written that; see GenerationStream.
Take: TypeAlias = "Callable[[Callable[[bytes], bool], OmniOutput], bool]"

_JSON: Final = "application/json"
#: nginx's status for a client that closed its connection before the answer.
_CLIENT_LEFT: Final = 499
#: Outputs of several requests that may wait for the one that reads them all.
_AHEAD: Final = 16


#: An output of the request with this number, its error, or None: it has ended.
_Queued = tuple[int, Any]


class Ask(msgspec.Struct, frozen=True):
    """One request to the pipeline; see ``AsyncOmni.generate``."""

    inputs: Mapping[str, Any]
    params: Mapping[int, Mapping[str, Any]]
    modalities: Sequence[str] | None = None
    companions: Mapping[str, Mapping[str, Any]] = {}


class Repeat:
    """What one HTTP request says of another that it repeats, or by which it may be repeated."""

    def __init__(self, place: Place | None = None, *, shows_token: bool = False) -> None:
        #: Where its answer begins; None for a request that will not be repeated.
        self._place = place
        self._shows_token = shows_token
        #: Ends the claim of its key, or frees the key again.
        self.end: Callable[[], None] = _nothing
        self.forget: Callable[[], None] = _nothing

    def seed_of(self, number: int) -> int | None:
        """The seed of the request with this number; None: each hub makes its own."""
        return None if self._place is None else (seed_of_nonce(self._place.nonce) + number) % (1 << SEED_BITS)

    def progress(self, *, can_resume: bool, most_choices: int = 1) -> Progress | None:
        """What is to be told of a streamed answer of so many choices; None where its client asks for nothing of it.

        Raise InvalidRequestError if the client wants it resumed and it can't be.
        """
        if self._shows_token and not can_resume:
            raise InvalidRequestError(
                f"{resumption.HEADER}: only a chat or a completion with 'stream': true, and without log probabilities "
                "or opus, is resumed: leave the header out"
            )
        return Progress(self._place, most_choices) if self._place is not None and can_resume else None


def _nothing() -> None:
    pass


class Came(msgspec.Struct, frozen=True):
    """An HTTP request whose body was read and checked."""

    request: Request
    exchange: Exchange
    #: When its last byte had come, on ``time.perf_counter``: a slow sender doesn't count as time in the hub.
    received_s: float
    repeat: Repeat = msgspec.field(default_factory=Repeat)
    size_bytes: int = 0


class Route:
    """What the routes share, over one AsyncOmni. ``prefix`` begins the ids of their requests."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig, prefix: str) -> None:
        self.omni = omni
        self.deploy = deploy
        self.model = deploy.served_name
        self._prefix = prefix
        self._idempotency_keys = IdempotencyKeys()

    async def answer(
        self,
        request: Request,
        parse: Callable[[bytes], _Fields],
        respond: Callable[[_Fields, Came], Awaitable[Response]],
        content_type: str = _JSON,
        *,
        can_repeat: bool = True,
    ) -> Response:
        """Read a body of this type, check it, and have it answered; an OmniError becomes an answer, too.

        ``can_repeat``: ``respond`` makes a Generation, whose end is that of the request's idempotency key.
        """
        exchange = exchange_of(request.scope)
        exchange.request_id = f"{self._prefix}-{exchange.request_id}"
        repeat = Repeat()
        try:
            with self.omni.rejections.counted():
                check_content_type(request, content_type)
                body = await read_body(request)
                received_s = time.perf_counter()
                await long_body(request.scope, len(body), memory_of(body))
                fields = parse(body)
                check_model(fields.model, self.model)
                self.omni.client_bounds.check_asked(fields.timeout, fields.priority)
                # A form is never the same twice: its boundary is drawn anew each time.
                can_repeat = can_repeat and content_type == _JSON
                repeat = self._repeat(request, exchange, body) if can_repeat else _no_repeat(request)
            return await respond(fields, Came(request, exchange, received_s, repeat, len(body)))
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except OmniError as error:
            repeat.forget()
            exchange.note_error(error)
            return error_response(error)
        except BaseException:
            repeat.forget()
            raise

    def _repeat(self, request: Request, exchange: Exchange, body: bytes) -> Repeat:
        """What the headers say of it. Raise InvalidRequestError, RetryConflictError."""
        key, shown = _only(request, idempotency.HEADER), _only(request, resumption.HEADER)
        if key is None and shown is None:
            return Repeat()
        asker = Asker(exchange.key_digest, request.url.path, body)
        if key is not None and not is_label(key):
            raise InvalidRequestError(f"{idempotency.HEADER} has 1 to {MAX_LABEL} printable ASCII characters")
        if shown is not None and shown != resumption.NEW:
            place = parse_place(shown, asker)
        else:
            nonce = secrets.token_bytes(NONCE_BYTES) if key is None else nonce_of(exchange.key_digest, key)
            place = place_of_new(nonce, asker)
        repeat = Repeat(place, shows_token=shown is not None)
        if key is not None:
            keys = self._idempotency_keys
            claim = keys.begin(exchange.key_digest, key, asker.digest(NO_NONCE), time.monotonic())
            repeat.end, repeat.forget = lambda: keys.end(claim, time.monotonic()), partial(keys.forget, claim)
        return repeat

    def generation(
        self, came: Came, fields: RequestFields, asks: Sequence[Ask], *, can_resume: bool = False
    ) -> Generation:
        """Begin these requests when the first output is asked for. Raise if its client has no room for so many.

        ``can_resume``: whether the answer is one that can be resumed; raise if its client wants another resumed.
        """
        with self.omni.rejections.counted():
            most_choices = len(asks) * len(self.deploy.stages)
            progress = came.repeat.progress(can_resume=can_resume, most_choices=most_choices)
            came.exchange.charge(sum(1 + len(ask.companions) for ask in asks) - 1)
        return Generation(self.omni, came, fields, asks, progress)

    async def streamed(
        self, generation: Generation, events: AsyncGenerator[bytes, None], take: Take | None = None
    ) -> Response:
        """A streamed answer. Its status is decided by the first output, or, where it is resumed, by the first event.

        ``take``: see GenerationStream.
        """
        await generation.begin()
        headers, progress, shown = stale_header(self.omni), generation.progress, events
        if progress is not None:
            headers[resumption.HEADER] = progress.token
            if progress.is_resumed:
                self.omni.hub_metrics.resumed.inc()
                shown = await generation.from_first_event(events)
        return GenerationStream(generation, shown, "text/event-stream", headers, take)

    def whole(self, body: bytes, received_at_s: float, timings_s: Mapping[str, float]) -> Response:
        """A whole answer with its timings. ``received_at_s``: when its last output came, on ``time.perf_counter``."""
        out_s = time.perf_counter() - received_at_s
        self.omni.hub_metrics.observe_out(out_s)
        headers = {"Server-Timing": server_timing({**timings_s, "hub_out": out_s}), **stale_header(self.omni)}
        return Response(body, media_type="application/json", headers=headers)


def _no_repeat(request: Request) -> Repeat:
    """The same for a request that can't be repeated. Raise InvalidRequestError if its client wants it resumed."""
    return Repeat(shows_token=_only(request, resumption.HEADER) is not None)


def _only(request: Request, name: str) -> str | None:
    """The value of a header that may be there once. Raise InvalidRequestError."""
    found = request.headers.getlist(name)
    if len(found) > 1:
        raise InvalidRequestError(f"{name} is there {len(found)} times: send it once")
    return found[0].strip() if found else None


class Generation:
    """The outputs of requests that run side by side, each with the number of its request. Close it."""

    def __init__(
        self,
        omni: AsyncOmni,
        came: Came,
        fields: RequestFields,
        asks: Sequence[Ask],
        progress: Progress | None = None,
    ) -> None:
        self._omni = omni
        self._repeat = came.repeat
        #: What the client has had of the answer; None where it can't be resumed, or nobody asks for that.
        self.progress = progress
        #: Whether an error is raised because nothing was sent yet; else it is an event.
        self._raises = False
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
                client=exchange.client,
                modalities=ask.modalities,
                params=ask.params,
                timeout_s=fields.timeout,
                received_s=came.received_s,
                priority=fields.priority,
                async_chunk=fields.async_chunk,
                companions=ask.companions,
                trace_headers=headers,
                seed=came.repeat.seed_of(number),
                taker=self._offer if len(asks) == 1 else None,
            )
            for number, (request_id, ask) in enumerate(zip(self._ids, asks, strict=True))
        ]
        self._merged = self._merge()
        #: The wait for the first output, where headers left before it came.
        self._awaiting: asyncio.Future[tuple[int, OmniOutput] | None] | None = None
        self._first: tuple[int, OmniOutput] | None = None
        self._headers_latest_s = headers_latest_s(came.request.scope)
        self._request, self._size_bytes = came.request, came.size_bytes
        #: Whether the client has closed its connection.
        self.has_left = False
        #: Is offered each output of a single request that is waited for here, see ``OutputQueue``; None: nobody.
        self.taker: Callable[[OmniOutput], bool] | None = None
        # It first runs when an output is waited for; AsyncOmni knows the request by then.
        self._watch = asyncio.create_task(self._watch_client(), name="ClientWatch")

    def __aiter__(self) -> AsyncGenerator[tuple[int, OmniOutput], None]:
        """The outputs. Raise RequestError."""
        return self._merged

    async def begin(self) -> None:
        """Wait for the first output, or until the headers leave without it.

        The first output decides the status: an error before it is raised here, and closes all.
        """
        try:
            if self._headers_latest_s is None:
                self._first = await self._next()
                return
            self._awaiting = asyncio.ensure_future(self._next())
            await asyncio.wait({self._awaiting}, timeout=max(0.0, self._headers_latest_s - time.monotonic()))
            if self._awaiting.done():
                self._first, self._awaiting = self._awaiting.result(), None
        except BaseException:
            await self.close()
            raise

    async def outputs(self) -> AsyncGenerator[tuple[int, OmniOutput], None]:
        """The outputs, after ``begin``. Raise RequestError."""
        first = self._first if self._awaiting is None else await self._awaiting
        if first is not None:
            yield first
            async for each in self._merged:
                yield each

    async def from_first_event(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The events, when the first is there; an error before it is raised here, and closes all.

        Where headers must not wait so long, all errors are events.
        """
        if self._headers_latest_s is not None:
            return events
        self._raises = True
        try:
            first = await anext(events)
        except BaseException:
            await self.close()
            raise
        finally:
            self._raises = False
        return _chained(first, events)

    def event_of_error(self, error: OmniError) -> bytes:
        """The event of an error that ends the stream. Raise it where nothing was sent yet."""
        if isinstance(error, RetryConflictError):
            self._omni.rejections.count(error)
        if self._raises:
            raise error
        self.exchange.note_error(error)
        return event_of(describe(error)[1])

    async def _next(self) -> tuple[int, OmniOutput] | None:
        first = await anext(self._merged, None)
        if first is not None:
            self.exchange.note_output(first[1])
        return first

    async def close(self) -> None:
        """End what still runs. Idempotent."""
        self._repeat.end()
        self._watch.cancel()
        if self._awaiting is not None:
            # It reads the outputs, which nobody else may close meanwhile.
            self._awaiting.cancel()
            await asyncio.gather(self._awaiting, return_exceptions=True)
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
                begun = asyncio.Event()
                pumps.append(asyncio.create_task(self._pump(number, each, queue, begun)))
                # A long prompt takes its time to check and to send: others get a turn between two of them.
                await begun.wait()
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

    async def _pump(
        self,
        number: int,
        outputs: AsyncGenerator[OmniOutput, None],
        queue: asyncio.Queue[_Queued],
        begun: asyncio.Event,
    ) -> None:
        end: Exception | None = None
        try:
            if number:
                # The first is part of the body's own turn.
                await long_body(self._request.scope, self._size_bytes)
            begun.set()
            async with aclosing(outputs):
                async for output in outputs:
                    await queue.put((number, output))
        except Exception as error:  # noqa: BLE001 - whoever reads raises it
            end = error
        begun.set()
        await queue.put((number, end))

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


async def _chained(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


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
        take: Take | None = None,
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
