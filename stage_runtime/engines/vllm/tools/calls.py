"""Reads calls of functions out of answers, by the parser of vLLM's that the stage's document names."""

from __future__ import annotations

import difflib
import logging
import re
import time
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.inputs.reading_time import ReadingTime, TookTooLongError
from omni_discovery.inputs.tools import PARSER_ARG, AskedTools, asked_tools
from omni_discovery.log_once import LogOnce
from omni_discovery.wire import ToolAnswer, ToolCall
from stage_runtime.engines.base import StageRequest, checked_args

if TYPE_CHECKING:
    from omni_discovery.deploy.document import StageConfig

logger = logging.getLogger(__name__)

#: Seconds between two log lines about answers that were not read to their end.
_LOG_EVERY_S: Final = 60.0
#: A template that has this word shows the tools.
_TOOLS: Final = re.compile(r"\btools\b")
_NO_PARSER: Final = (
    "tools: this stage does not read calls: the operator names vLLM's parser for its model in"
    f" engine_args.{PARSER_ARG}; or leave them out"
)


class ToolCalls:
    """The calls of one stage's answers."""

    def __init__(self, stage: StageConfig, arguments: dict[str, Any], *, is_split: bool) -> None:
        """Remove the name of the parser from a stage's arguments. Raise ConfigError."""
        self._where = f"stage {stage.stage_id}: engine_args.{PARSER_ARG}"
        self._name: str = checked_args(stage, str, arguments.pop(PARSER_ARG, None) or "", f"engine_args.{PARSER_ARG}")
        if self._name and is_split:
            raise ConfigError(f"{self._where}: a stage that is split into prefill and decode reads no calls")
        self._parser: Any = None
        self._tokenizer: Any = None
        #: What no reader is to see of an answer: all special tokens are in its text, for some are marks of calls.
        self._special: frozenset[str] = frozenset()
        self._time = ReadingTime()
        self._log_once = LogOnce(time.monotonic)

    def load(self, tokenizer: Any) -> None:
        """Load the parser. Raise ConfigError if vLLM has none of this name, or the model's template shows no tools."""
        if not self._name:
            return
        from vllm.tool_parsers import ToolParserManager

        known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
        if self._name not in known:
            near = difflib.get_close_matches(self._name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"{self._where}: vLLM has no parser {self._name!r}{hint}")
        if not _TOOLS.search(_templates_of(tokenizer)):
            raise ConfigError(
                f"{self._where}: the chat template of this model does not show tools; serve a model whose template"
                f" does, or leave {PARSER_ARG} out"
            )
        try:
            parser = ToolParserManager.get_tool_parser(self._name)
            parser(tokenizer)
        except Exception as error:
            # A parser may ask anything of a tokenizer.
            raise ConfigError(f"{self._where}: {self._name!r} does not fit this model: {error}") from error
        self._parser, self._tokenizer, self._special = parser, tokenizer, _special_tokens(tokenizer)

    def asked(self, request: StageRequest) -> AskedTools | None:
        """The functions that an answer may call; None without any. Raise InvalidRequestError."""
        if request.payloads or request.stream_from:
            # The prompt is what earlier stages have made.
            return None
        asked = asked_tools(request.inputs)
        if asked is None:
            return None
        if self._parser is None:
            raise InvalidRequestError(_NO_PARSER)
        if request.segment is not None:
            raise InvalidRequestError("tools: a request whose input comes in segments calls none")
        if request.stream_to:
            raise InvalidRequestError("tools: ask with async_chunk false; a call is not handed over to the next stages")
        return asked

    def params(self, asked: AskedTools) -> dict[str, Any]:
        """What the sampling parameters have to be for the calls to be read."""
        form = asked.form()
        if form is not None:
            return {"structured_outputs": {"json": form}}
        settled = self._made(asked)[1]
        # The marks of a call are special tokens of some models.
        return {} if settled.skip_special_tokens else {"skip_special_tokens": False}

    def called(self, asked: AskedTools, text: str) -> ToolAnswer | None:
        """The calls in an answer, and the words beside them; None if these are the text.

        An answer that takes too long to be read is text, too.
        """
        if asked.must_call:
            forced = (ToolCall(name=name, arguments=arguments) for name, arguments in asked.calls_in(text))
            return ToolAnswer(calls=tuple(forced))
        parser, settled = self._made(asked)
        calls: tuple[ToolCall, ...] = ()
        content = text
        try:
            found = self._time.read(text, lambda: parser.extract_tool_calls(text, request=settled))
            if found.tools_called:
                calls, content = tuple(map(_plain, found.tool_calls[: asked.most_calls])), found.content or ""
        except TookTooLongError as error:
            if self._log_once.should(every_s=_LOG_EVERY_S):
                logger.warning("engine.calls_not_read parser=%s: it took too long: %s", self._name, error)
        except Exception:
            # What a model writes may be anything: then it is text.
            logger.exception("engine.calls_not_read parser=%s", self._name)
        for token in self._special:
            content = content.replace(token, "")
        return ToolAnswer(calls=calls, content=content) if calls or content != text else None

    def _made(self, asked: AskedTools) -> tuple[Any, Any]:
        """A parser for one answer, and the request as it wants it. Raise InvalidRequestError."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            given = {"messages": [{"role": "user", "content": ""}], "tools": asked.shown(), "tool_choice": "auto"}
            request = ChatCompletionRequest.model_validate(given)
            parser = self._parser(self._tokenizer, request.tools)
            return parser, parser.adjust_request(request)
        except Exception as error:
            raise InvalidRequestError(f"tools: vLLM's parser {self._name!r} refuses them: {error}") from error


def _templates_of(tokenizer: Any) -> str:
    """All chat templates of a tokenizer; one that is for tools counts by its name."""
    template = getattr(tokenizer, "chat_template", None)
    return " ".join(str(each) for each in template.values()) if isinstance(template, dict) else str(template or "")


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset((*named, *(each.content for each in added if each.special)))


def _plain(call: Any) -> ToolCall:
    name, arguments = str(call.function.name), str(call.function.arguments)
    if not 0 < len(name) <= 256:
        raise ValueError(f"a name of {len(name)} characters")
    return ToolCall(name=name, arguments=arguments)
