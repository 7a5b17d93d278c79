"""Pooled answers of vLLM's server, written as they are sent.

That server makes a Python number of each, and JSON of all of them, with the interpreter held: thirteen seconds and 1.2
GB for ten thousand texts with 1024 numbers each. Here arrays stay what they are, and become JSON some at a time, in a
thread, as the client takes them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import StreamingResponse

from hub.api.vllm.bounds.wrapping import wrapped_once

if TYPE_CHECKING:
    from starlette.datastructures import State

#: Numbers that become JSON at once, some 5 ms of a thread.
AT_ONCE: Final = 1 << 14
#: An answer of no more is written in the loop: to ask the thread takes longer.
_FEW: Final = 1024
#: Bytes that are sent together.
_SENT_AT_ONCE: Final = 256 << 10
#: Numbers of an answer that the server has to make lists of: those of Cohere's types, and of classes.
MOST_LISTED: Final = 1 << 20
_thread: Final = ThreadPoolExecutor(1, "PooledAnswers")


class NumbersResponse(StreamingResponse):
    """JSON whose ``data`` has arrays."""

    def __init__(self, content: dict[str, Any], *given: Any, **more: Any) -> None:
        super().__init__(_sent(content), *given, **{"media_type": "application/json", **more})


# vLLM's server gives arrays to a response of this name only.
NumbersResponse.__name__ = "ORJSONResponse"


def write_numbers(state: State) -> None:
    """Have the servers of an application answer as above. Idempotent."""
    embeds, pools, classifies = (
        getattr(state, name, None) for name in ("serving_embedding", "serving_pooling", "serving_classification")
    )
    for server in (embeds, pools):
        if server is not None:
            server.json_response_cls = NumbersResponse
    # Not each version has each of these methods.
    kind: Any = type(pools)
    if hasattr(kind, "request_output_to_pooling_json_response"):
        made = kind.request_output_to_pooling_json_response
        kind.request_output_to_pooling_json_response = wrapped_once(made, _with_arrays)
    kind = type(embeds)
    if hasattr(kind, "_build_cohere_response_from_ctx"):
        made = kind._build_cohere_response_from_ctx  # noqa: SLF001
        kind._build_cohere_response_from_ctx = wrapped_once(made, _bounded)  # noqa: SLF001
    kind = type(classifies)
    if hasattr(kind, "_build_response"):
        kind._build_response = wrapped_once(kind._build_response, _bounded)  # noqa: SLF001


def _with_arrays(make: Any) -> Callable[..., Any]:
    """Answer to /pooling with the arrays themselves, where numbers are asked for."""

    def make_with_arrays(
        self: Any,
        outputs: Sequence[Any],
        request_id: str,
        created_s: int,
        model: str,
        encoding: str,
        *given: Any,
        **more: Any,
    ) -> Any:
        if encoding != "float":
            return make(self, outputs, request_id, created_s, model, encoding, *given, **more)
        server: Any = sys.modules[make.__module__]
        usage = server.get_pooling_usage(outputs)
        whole = server.PoolingResponse(id=request_id, created=created_s, model=model, data=[], usage=usage).model_dump()
        whole["data"] = [
            server.PoolingResponseData(index=index, data=[]).model_dump() | {"data": output.outputs.data.numpy()}
            for index, output in enumerate(outputs)
        ]
        return NumbersResponse(whole)

    return make_with_arrays


def _bounded(make: Any) -> Callable[..., Any]:
    """Refuse what would be lists of too many numbers."""

    def make_bounded(self: Any, ctx: Any) -> Any:
        count = sum(output.outputs.data.numel() for output in ctx.final_res_batch)
        if count > MOST_LISTED:
            # What vLLM's server answers with 400.
            raise ValueError(
                f"{count} numbers are more than the {MOST_LISTED} of one answer: send fewer texts in one request"
            )
        return make(self, ctx)

    return make_bounded


async def _sent(content: dict[str, Any]) -> AsyncIterator[bytes]:
    pieces = _object(content)
    items = content.get("data")
    if isinstance(items, list) and _count(items) <= _FEW:
        yield b"".join(pieces)
        return
    loop = asyncio.get_running_loop()
    while part := await loop.run_in_executor(_thread, _some, pieces):
        yield part


def _count(items: list[Any]) -> int:
    """About how many numbers, and characters of texts, are in the items of an answer."""
    return sum(
        getattr(value, "size", 0) or (len(value) if isinstance(value, str | list) else 1)
        for item in items
        for value in (item.values() if isinstance(item, dict) else ())
    )


def _some(pieces: Iterator[bytes]) -> bytes:
    """The next pieces together; nothing behind the last."""
    found, size_bytes = [], 0
    for piece in pieces:
        found.append(piece)
        size_bytes += len(piece)
        if size_bytes >= _SENT_AT_ONCE:
            break
    return b"".join(found)


def _object(fields: dict[str, Any]) -> Iterator[bytes]:
    """The pieces of an object, of whose values arrays and lists of lists or objects are pieces of their own."""
    between = b"{"
    for name, value in fields.items():
        yield between + msgspec.json.encode(name) + b":"
        between = b","
        yield from _value(value)
    yield b"}" if fields else b"{}"


def _value(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield from _object(value)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        yield from _list(map(_value, value))
    elif hasattr(value, "tolist"):
        yield from _array(value)
    else:
        yield msgspec.json.encode(value)


def _list(items: Iterator[Iterator[bytes]]) -> Iterator[bytes]:
    between = b"["
    for item in items:
        yield between
        between = b","
        yield from item
    yield b"]"


def _array(numbers: Any) -> Iterator[bytes]:
    """The pieces of an array of numbers, of any shape but that of one number."""
    each = numbers.size // max(1, len(numbers))
    if numbers.ndim > 1 and each > AT_ONCE:
        yield from _list(map(_array, numbers))
        return
    step = max(1, AT_ONCE // max(1, each))
    between = b"["
    for start in range(0, len(numbers), step):
        yield between + msgspec.json.encode(numbers[start : start + step].tolist())[1:-1]
        between = b","
    yield b"]" if len(numbers) else b"[]"
