"""Fan-out of one HTTP request into many requests to replicas: how many, how many at once, how large, and merged.

vLLM's server sends all texts, or prompts, of a request to its engine at the same time, and has the engine queue them. A
hub would refuse those beyond its bounds, and with them the whole request, however often it is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hub.api.exchange import current_exchange
from hub.api.generation.body import MOST_ANSWER_BYTES, AnswerSize
from hub.api.vllm.bounds.wrapping import wrapped_once
from omni_discovery.errors import InvalidRequestError

if TYPE_CHECKING:
    from types import ModuleType

#: Requests to replicas that one HTTP request may have in flight; an idle hub admits as many.
MAX_AT_ONCE: Final = 1024
#: Of those, what begins in one turn of the hub's loop, some 1 ms each.
_BEGUN_AT_ONCE: Final = 32
#: Requests of one HTTP request in all: those that wait take memory, too.
MAX_IN_ALL: Final = 16384


@dataclass(slots=True)
class _Budget:
    free: asyncio.Semaphore
    #: What is kept of the answer; None for a WebSocket, where many answers come one after the other.
    size: AnswerSize | None
    #: Requests that were announced and have not ended.
    announced: int = 0
    begins: asyncio.Lock = field(default_factory=asyncio.Lock)


_budget: Final[ContextVar[_Budget | None]] = ContextVar("budget", default=None)


def start_http_request(*, is_websocket: bool = False) -> None:
    """Give the current context, that of one HTTP request, a budget of its own, within the cap of its client."""
    most = current_exchange().most_answers or MAX_AT_ONCE
    size = None if is_websocket else _new_size()
    _budget.set(_Budget(asyncio.Semaphore(min(MAX_AT_ONCE, most)), size))


def answer_size(*, is_streamed: bool) -> AnswerSize:
    """The size of what is kept for one answer: of an HTTP request all answers together, unless they are streamed."""
    budget = _budget.get()
    return _new_size() if is_streamed or budget is None or budget.size is None else budget.size


def count_pooled(size_bytes: int) -> None:
    """Count what a stage has pooled for one text. Raise InvalidRequestError if that is too much for one request."""
    budget = _budget.get()
    if budget is None or budget.size is None:
        return
    budget.size.size_bytes += size_bytes
    if not budget.size.has_room(0):
        raise InvalidRequestError(
            f"the numbers of this request's texts take more than {MOST_ANSWER_BYTES >> 20} MiB, of 4 bytes each: send"
            " fewer texts in one"
        )


def _new_size() -> AnswerSize:
    return AnswerSize("'stream': true, or for less in one request")


def announce(requests: int) -> None:
    """Announce requests to replicas. Raise InvalidRequestError if the HTTP request then has too many in all."""
    budget = _budget.get()
    if budget is not None:
        budget.announced += requests
        if budget.announced > MAX_IN_ALL:
            raise InvalidRequestError(
                f"one request may come to {MAX_IN_ALL} texts, or prompts with 'n' answers each; send several requests"
            )


@asynccontextmanager
async def one_at_a_time() -> AsyncIterator[None]:
    """Wait until no other request of the HTTP request begins; the loop serves others between two of them."""
    budget = _budget.get()
    if budget is None:
        yield
        return
    async with budget.begins:
        await asyncio.sleep(0)
        yield


@asynccontextmanager
async def in_flight() -> AsyncIterator[None]:
    """Wait until one more announced request may be sent; hold this while it is in flight."""
    budget = _budget.get()
    if budget is None:
        yield
        return
    try:
        async with budget.free:
            yield
    finally:
        budget.announced -= 1


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


async def merged(streams: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[tuple[int, _Item], None]:
    """Yield the items of all streams as they come, each with its stream's position.

    The first error ends all streams, and so does closing this generator. A slow reader holds the streams back.
    """
    items: asyncio.Queue[tuple[int, _Item] | _End] = asyncio.Queue(2 * len(streams))
    tasks: list[asyncio.Task[None]] = []
    left = len(streams)
    try:
        for position, stream in enumerate(streams):
            tasks.append(asyncio.create_task(_pump(position, stream, items)))
            if len(tasks) % _BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)
        while left:
            item = await items.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def merge_in(modules: Iterable[ModuleType]) -> None:
    """Have modules of vLLM's server merge answers as ``merged`` does: theirs looks at all streams for each item."""
    for module in modules:
        server: Any = module
        server.merge_async_iterators = _merged


def _merged(*streams: AsyncGenerator[_Item, None]) -> AsyncGenerator[tuple[int, _Item], None]:
    return merged(streams)


def begin_by_turns(*servers: type) -> None:
    """Have classes of vLLM's servers leave the loop to others before they ask their engine for the next prompt.

    They ask for all prompts of a request one after the other, and wait for nothing between two of them but for a method
    that looks for a trace in the headers. Which of their bases has it differs between versions of vLLM.
    """
    for server in servers:
        kind: Any = next(each for each in server.__mro__ if "_get_trace_headers" in vars(each))
        # The one such step that is awaited.
        kind._get_trace_headers = wrapped_once(kind._get_trace_headers, _after_a_turn)  # noqa: SLF001


def _after_a_turn(looks: Any) -> Any:
    async def look(self: Any, headers: Any) -> Any:
        await asyncio.sleep(0)
        return await looks(self, headers)

    return look


async def _pump(
    position: int, stream: AsyncGenerator[_Item, None], items: asyncio.Queue[tuple[int, _Item] | _End]
) -> None:
    error: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                await items.put((position, item))
    except Exception as caught:  # noqa: BLE001 - it is raised where the items are read
        error = caught
    await items.put(_End(error))
