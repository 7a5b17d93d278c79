"""Segments from a client's iterator to a request: one after the other, each when the one before has been taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import Any

from hub.active import UpdateRequest
from omni_discovery.errors import InvalidRequestError, RequestError

Inputs = Mapping[str, Any] | AsyncIterable[Mapping[str, Any]]


class Feed:
    """The input of one request, whole or from an iterator. ``stop`` it when the request has ended."""

    def __init__(self, inputs: Inputs) -> None:
        self._whole = inputs if isinstance(inputs, Mapping) else None
        self._segments = None if isinstance(inputs, Mapping) else aiter(inputs)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_segmented(self) -> bool:
        """Whether it comes from an iterator."""
        return self._segments is not None

    async def first(self) -> Mapping[str, Any]:
        """What the request begins with. Raise InvalidRequestError if there is nothing."""
        if self._segments is None:
            return self._whole or {}
        try:
            return _checked(await anext(self._segments))
        except StopAsyncIteration:
            raise InvalidRequestError("the input ended before its first segment") from None

    def start(
        self,
        update: Callable[[Mapping[str, Any] | None], Awaitable[None]],
        fail: Callable[[RequestError], None],
    ) -> None:
        """Give all that follows to ``update``, and None behind it; ``fail`` ends the request if that goes wrong."""
        if self._segments is not None:
            self._task = asyncio.create_task(self._run(update, fail))

    def stop(self) -> None:
        """Take no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(
        self,
        update: Callable[[Mapping[str, Any] | None], Awaitable[None]],
        fail: Callable[[RequestError], None],
    ) -> None:
        assert self._segments is not None  # noqa: S101 - it is not started otherwise
        try:
            async for segment in self._segments:
                await update(_checked(segment))
            await update(None)
        except RequestError as error:
            fail(error)
        except Exception as error:  # noqa: BLE001 - the client's own iterator may raise anything, at its own cost
            fail(InvalidRequestError(f"the input broke off: {type(error).__name__}: {error}"))


async def send_update(queue: asyncio.Queue[Any], request_id: str, inputs: Mapping[str, Any] | None) -> None:
    """Give the orchestrator a request's next segment, None behind the last; returns when the first stage has taken it.

    Raise InvalidRequestError if the request has ended, or takes no more.
    """
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    await queue.put(UpdateRequest(request_id, inputs, done))
    refusal = await done
    if refusal:
        raise InvalidRequestError(refusal)


def _checked(segment: object) -> Mapping[str, Any]:
    if not isinstance(segment, Mapping):
        raise InvalidRequestError(f"a segment is a mapping such as {{'prompt': ...}}, not {type(segment).__name__}")
    return segment
