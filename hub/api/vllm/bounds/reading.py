"""How long vLLM's parsers may read one answer for its calls, in processor time of the hub's loop.

Most of them read all of a streamed text again for each piece of it: an answer twice as long costs four times as much,
and all other clients wait meanwhile. Some take the square of the length of a whole answer.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from hub.api.vllm.bounds.body import body_now
from hub.api.vllm.bounds.wrapping import wrapped_once
from hub.api.vllm.errors import as_vllm_error
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.reading_time import ReadingTime, TookTooLongError
from omni_discovery.log_once import LogOnce

logger = logging.getLogger(__name__)

#: For one streamed answer, in seconds. A call of some 18 000 characters, in pieces of four, takes the parser
#: ``pythonic`` as long.
MOST_S: Final = 10.0
#: For one piece of it.
MOST_AT_ONCE_S: Final = 1.0
_time: Final = ReadingTime()
_log_once: Final = LogOnce(time.monotonic)
#: Seconds between two log lines about answers that were not read to their end.
_LOG_EVERY_S: Final = 60.0


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
        parser.extract_tool_calls = wrapped_once(parser.extract_tool_calls, _found_in_time)


def bound_required(server: Any) -> None:
    """The same for calls that an answer must have, which a module of vLLM-Omni's server reads by itself. Idempotent."""
    read = server.extract_required_tool_call_streaming
    server.extract_required_tool_call_streaming = wrapped_once(read, _counted_by_request)


def bound_custom_calls() -> None:
    """The same for calls of custom tools: for each piece, ``/v1/responses`` decodes all that has come. Idempotent."""
    from vllm.entrypoints.openai.responses import streaming_events

    server: Any = streaming_events
    # Not in each version.
    if hasattr(server, "decode_custom_tool_input_prefix"):
        decode = server.decode_custom_tool_input_prefix
        server.decode_custom_tool_input_prefix = wrapped_once(decode, _decoding_fast)


def _decoding_fast(decode: Callable[[str], str]) -> Callable[[str], str]:
    """A function that closes the input where the text ends within it; vLLM's goes through it by single characters."""

    def decode_fast(arguments: str) -> str:
        try:
            made = json.loads(arguments + '"}').get("input")
        except (ValueError, RecursionError):
            made = None
        # The first half of a character is no text yet.
        is_text = isinstance(made, str) and not "\ud800" <= made[-1:] <= "\udbff"
        return made if is_text else decode(arguments)

    return _counted_by_request(decode_fast)


def _counted_by_request(read: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads a piece, with its time counted by the HTTP request. A request has one answer there."""

    def read_bounded(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        made = _at_once(lambda: read(*args, **kwargs))
        body = body_now()
        if body is not None:
            body.reading_s += time.thread_time() - began_s
            _check_time(body.reading_s)
        return made

    return read_bounded


@functools.cache
def _bounded(parser: Any) -> Any:
    """A parser of the same name and kind that counts its time."""
    bounded: Any = type(parser.__name__, (parser,), {"__module__": parser.__module__, "__doc__": parser.__doc__})
    bounded.parse_delta = wrapped_once(bounded.parse_delta, _counted)
    bounded.parse = wrapped_once(bounded.parse, _parsed_in_time)
    return bounded


def _parsed_in_time(parse: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads a whole answer; one that takes too long has neither reasoning nor calls."""

    def parse_bounded(parser: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        return _read_whole(parser, text, lambda: parse(parser, text, *args, **kwargs), lambda: (None, text, []))

    return parse_bounded


def _found_in_time(extract: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a method that finds the calls alone."""

    def extract_bounded(parser: Any, text: str, *args: Any, **kwargs: Any) -> Any:
        return _read_whole(parser, text, lambda: extract(parser, text, *args, **kwargs), lambda: _no_calls(text))

    return extract_bounded


def _no_calls(text: str) -> Any:
    from vllm.entrypoints.openai.engine.protocol import ExtractedToolCallInformation

    return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=text)


def _read_whole(parser: Any, text: str, read: Callable[[], Any], as_text: Callable[[], Any]) -> Any:
    try:
        return _time.read(text, read)
    except TookTooLongError as error:
        if _log_once.should(every_s=_LOG_EVERY_S):
            logger.warning("api.calls_not_read parser=%s: it took too long: %s", type(parser).__name__, error)
        return as_text()


def _counted(read: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a parser that reads a piece, with its time counted. A parser reads one answer."""

    def read_bounded(parser: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        made = _at_once(lambda: read(parser, *args, **kwargs))
        spent_s: float = getattr(parser, "omni_reading_s", 0.0) + time.thread_time() - began_s
        parser.omni_reading_s = spent_s
        _check_time(spent_s)
        return made

    return read_bounded


def _at_once(read: Callable[[], Any]) -> Any:
    """Read a piece. Raise VLLMError once that alone takes too long."""
    try:
        return _time.read_within(MOST_AT_ONCE_S, read)
    except TookTooLongError:
        error = _too_long(MOST_AT_ONCE_S)
        raise as_vllm_error(error) from error


def _check_time(spent_s: float) -> None:
    """Raise VLLMError if an answer has been read for too long."""
    if spent_s > MOST_S:
        error = _too_long(MOST_S)
        raise as_vllm_error(error) from error


def _too_long(spent_s: float) -> InvalidRequestError:
    return InvalidRequestError(
        f"the answer is too long to be read for tool calls while it is streamed: that has taken {spent_s:g} s of"
        " processor time. Ask without 'stream', without 'tools', or for a shorter answer"
    )
