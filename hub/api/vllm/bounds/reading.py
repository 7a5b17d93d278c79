"""How long vLLM's parsers may read one streamed answer for its calls, in processor time of the hub's loop.

Most of them read all of the text again for each piece of it: an answer twice as long costs four times as much, and all
other clients wait meanwhile.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from hub.api.vllm.bounds.body import body_now
from hub.api.vllm.bounds.wrapping import wrapped_once
from hub.api.vllm.errors import as_vllm_error
from omni_discovery.errors import InvalidRequestError

#: For one answer, in seconds. A call of some 18 000 characters, four a piece, takes the parser ``pythonic`` as long.
MOST_S: Final = 10.0


def bound_parsers() -> None:
    """Have the parsers that vLLM's server finds from now on end an answer that they read for longer. Idempotent."""
    from vllm.parser.parser_manager import ParserManager

    parsers: Any = ParserManager
    parsers.get_parser = wrapped_once(parsers.get_parser, _finding_bounded)


def _finding_bounded(find: Callable[..., Any]) -> Callable[..., Any]:
    def get_parser(*args: Any, **kwargs: Any) -> Any:
        found = find(*args, **kwargs)
        return None if found is None else _bounded(found)

    return get_parser


def bound_tool_parser(name: str | None) -> None:
    """The same for the parser of that name alone, where a server asks it by itself. Idempotent."""
    from vllm.tool_parsers import ToolParserManager

    if name:
        parser: Any = ToolParserManager.get_tool_parser(name)
        parser.extract_tool_calls_streaming = wrapped_once(parser.extract_tool_calls_streaming, _counted)


def bound_required(server: Any) -> None:
    """The same for calls that an answer must have, which a module of vLLM-Omni's server reads by itself. Idempotent."""
    read = server.extract_required_tool_call_streaming
    server.extract_required_tool_call_streaming = wrapped_once(read, _counted_by_request)


def _counted_by_request(read: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads a piece, with its time counted by the HTTP request. A request has one answer there."""

    def read_bounded(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        made = read(*args, **kwargs)
        body = body_now()
        if body is not None:
            body.reading_s += time.thread_time() - began_s
            check_time(body.reading_s)
        return made

    return read_bounded


@functools.cache
def _bounded(parser: Any) -> Any:
    """A parser of the same name and kind that counts its time."""
    bounded: Any = type(parser.__name__, (parser,), {"__module__": parser.__module__, "__doc__": parser.__doc__})
    bounded.parse_delta = wrapped_once(bounded.parse_delta, _counted)
    return bounded


def _counted(read: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a parser that reads a piece, with its time counted. A parser reads one answer."""

    def read_bounded(parser: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        made = read(parser, *args, **kwargs)
        spent_s: float = getattr(parser, "omni_reading_s", 0.0) + time.thread_time() - began_s
        parser.omni_reading_s = spent_s
        check_time(spent_s)
        return made

    return read_bounded


def check_time(spent_s: float) -> None:
    """Raise VLLMError if an answer has been read for too long."""
    if spent_s > MOST_S:
        error = InvalidRequestError(
            f"the answer is too long to be read for tool calls while it is streamed: that has taken {MOST_S:g} s of"
            " processor time. Ask without 'stream', without 'tools', or for a shorter answer"
        )
        raise as_vllm_error(error) from error
