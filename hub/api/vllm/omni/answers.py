"""The hub's part of every answer of vLLM-Omni's server: its statuses and headers, and the bounds of what is asked.

The server answers most errors of its engine with 500, and a stream with 200 before it knows of any. So the begin of an
answer is held back until there is some of it; where a request to a replica has failed by then, the hub's error goes
out.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import MutableHeaders

from hub.api.door.guard import still_opens
from hub.api.errors import NotServedError, UnauthorizedError, error_response
from hub.api.generation.running import stale_header
from hub.api.protocols import input_wait_of
from hub.api.vllm.bounds import fan_out, texts
from hub.api.vllm.bounds.body import Body, check_body, checked_aside
from hub.api.vllm.omni.errors import AnswerOutcome, begin_outcome
from hub.api.vllm.omni.media import CHATS, split_files
from hub.api.vllm.omni.unserved import decoded, refusal_of_chat, refusal_of_path, refusal_of_request
from omni_discovery.errors import InvalidRequestError, OmniError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from hub.api.vllm.omni.pipeline import ServedPipeline
    from hub.async_omni import AsyncOmni
    from omni_discovery.inputs.media_links import MediaLinks


class HubAnswers:
    """ASGI middleware around vLLM-Omni's server. ``root_path`` is that of the server, if it has one."""

    def __init__(self, app: ASGIApp, omni: AsyncOmni, pipeline: ServedPipeline, root_path: str = "") -> None:
        self._app = app
        self._omni = omni
        self._pipeline = pipeline
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        outcome = begin_outcome()
        is_websocket = scope["type"] == "websocket"
        fan_out.start_http_request(is_websocket=is_websocket)
        asked = texts.start_http_request(self._pipeline.most_tokens, is_websocket=is_websocket)
        path = scope["path"].removeprefix(self._root_path)
        pipeline = self._pipeline
        reads_tokens = pipeline.input_processor is not None
        if reason := refusal_of_path(scope.get("method", "GET"), path, pipeline.outputs, reads_tokens=reads_tokens):
            await _refuse(NotServedError(f"{path}: {reason}"), scope, receive, send)
        elif scope["type"] == "websocket":
            frames = _CheckedFrames(scope, receive, send)
            await self._app(scope, frames.receive, frames.send)
        else:
            await self._serve(outcome, self._body(outcome, path, scope, receive), asked, scope, send)

    def _body(self, outcome: AnswerOutcome, path: str, scope: Scope, receive: Receive) -> Body:
        if path == CHATS and self._pipeline.reads_messages:
            return _ChatBody(scope, receive, outcome, self._pipeline.links)
        return _TextOnly(scope, receive, is_chat=path.startswith(CHATS))

    async def _serve(
        self, outcome: AnswerOutcome, body: Body, asked: texts.RequestTexts, scope: Scope, send: Send
    ) -> None:
        answer = _HeldAnswer(send, body, outcome, asked, stale_header(self._omni))
        body.enter()
        try:
            await self._app(scope, body.receive, answer.send)
        except Exception:
            # The server lets the error of a stream through that has not begun.
            if answer.has_begun or answer.error is None:
                raise
        if not answer.has_begun and (error := answer.error) is not None:
            await error_response(error)(scope, body.receive, send)


async def _refuse(error: OmniError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
    else:
        await error_response(error)(scope, receive, send)


class _TextOnly(Body):
    """A body that brings neither files nor links along."""

    def __init__(self, scope: Scope, receive: Receive, *, is_chat: bool) -> None:
        super().__init__(scope, receive)
        self._is_chat = is_chat

    def check(self, whole: bytes) -> None:
        """See Body. Raise NotServedError for one that does, and for a chat that can't be served as it is asked."""
        super().check(whole)
        asked = decoded(whole)
        if reason := refusal_of_request(asked) or (refusal_of_chat(asked) if self._is_chat else ""):
            raise NotServedError(reason)


class _ChatBody(Body):
    """The body of a chat, of which the server gets all but the files in its messages; those go to the first stage."""

    def __init__(self, scope: Scope, receive: Receive, outcome: AnswerOutcome, links: MediaLinks) -> None:
        super().__init__(scope, receive)
        self._outcome, self._links = outcome, links
        #: What the server gets, once the whole has come.
        self._passed: bytes | None = None

    async def receive(self) -> Message:
        """See ASGI."""
        while True:
            was_passed = self._passed is not None
            message = await super().receive()
            if message["type"] != "http.request" or was_passed:
                return message
            if self._passed is not None:
                return {"type": "http.request", "body": self._passed, "more_body": False}

    def check(self, whole: bytes) -> None:
        """See Body. Raise NotServedError for files elsewhere, and for what can't be asked together with files."""
        super().check(whole)
        asked, self._outcome.chat = split_files(decoded(whole), self._links)
        if reason := refusal_of_request(asked) or refusal_of_chat(asked):
            raise NotServedError(reason)
        self._passed = json.dumps(asked).encode() if self._outcome.chat else whole


#: Characters of one text to be spoken that comes piece by piece, where each piece counts for some more: the server
#: keeps all of them until the text's end, and may go through them again with each.
MAX_SPOKEN: Final = 64 << 10
_PIECE_CHARACTERS: Final = 4
#: Marks of punctuation in a row at the end of what has come of it: the server goes through them again with each piece.
MAX_MARKS: Final = 1024
_PIECE: Final = "input.text"
_END: Final = "input.done"


class _CheckedFrames:
    """What comes over a WebSocket: frames that would cost too much, bring files along, or come with a key that was
    taken back meanwhile, end it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        #: What has come of the text that is being sent, and how many marks of punctuation it ends with.
        self._spoken = self._marks = 0
        self._input_wait = input_wait_of(scope) or (lambda _waits: None)
        #: Whether the server waits for the client.
        self._is_waiting = False

    async def send(self, message: Message) -> None:
        """See ASGI. What the server sends while it waits for the client makes that wait begin anew."""
        await self._send(message)
        if self._is_waiting:
            self._input_wait(False)
            self._input_wait(True)

    async def receive(self) -> Message:
        """See ASGI."""
        self._is_waiting = True
        self._input_wait(True)
        try:
            message = await self._receive()
        finally:
            self._is_waiting = False
            self._input_wait(False)
        if message["type"] != "websocket.receive" or not (refused := await self._refusal(message.get("text"))):
            return message
        # A reason is at most 123 bytes.
        end = {"code": 1008, "reason": refused.encode()[:120].decode(errors="ignore")}
        await self._send({"type": "websocket.close", **end})
        return {"type": "websocket.disconnect", **end}

    async def _refusal(self, frame: str | None) -> str:
        """Why a frame is refused; empty if it is not. None is one of bytes."""
        try:
            if not still_opens(self._scope):
                raise UnauthorizedError(is_missing=False)
            if frame is None:
                return ""
            whole = frame.encode()
            await checked_aside(check_body, whole, self._scope)
            asked = decoded(whole)
        except (InvalidRequestError, OverloadedError) as error:
            return str(error)
        return refusal_of_request(asked) or self._refusal_of_length(asked)

    def _refusal_of_length(self, asked: Mapping[str, Any]) -> str:
        kind, given = asked.get("type"), asked.get("text")
        text = given if isinstance(given, str) else ""
        if kind == _END:
            self._spoken = self._marks = 0
        elif kind == _PIECE:
            self._spoken += _PIECE_CHARACTERS + len(text)
            if self._spoken <= MAX_SPOKEN:
                marks = sum(1 for _ in itertools.takewhile(_is_mark, reversed(text)))
                self._marks = marks + (self._marks if marks == len(text) else 0)
        if self._marks > MAX_MARKS:
            return f"one text to be spoken may have {MAX_MARKS} marks of punctuation in a row"
        return f"one text to be spoken may have {MAX_SPOKEN} characters" if self._spoken > MAX_SPOKEN else ""


def _is_mark(sign: str) -> bool:
    return unicodedata.category(sign).startswith("P")


class _HeldAnswer:
    """The answer of the server to one request, from which the hub's own may still be made."""

    def __init__(
        self, send: Send, body: Body, outcome: AnswerOutcome, asked: texts.RequestTexts, headers: dict[str, str]
    ) -> None:
        self._send = send
        self._body = body
        self._outcome = outcome
        self._asked = asked
        self._headers = headers
        self._start: dict[str, Any] | None = None
        #: Whether something of it has gone to the client.
        self.has_begun = False

    @property
    def error(self) -> OmniError | None:
        """The hub's error to answer with in place of the server's; None to let its answer pass."""
        if self._body.refusal is not None:
            return self._body.refusal
        status = HTTPStatus.INTERNAL_SERVER_ERROR if self._start is None else self._start["status"]
        replaces = status >= HTTPStatus.BAD_REQUEST or not self._outcome.has_output
        return self._outcome.failure if replaces else None

    async def send(self, message: Message) -> None:
        """See ASGI."""
        if self.has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._start = dict(message)
            self._asked.has_failed = message["status"] >= HTTPStatus.BAD_REQUEST
        elif self.error is None:
            self.has_begun = True
            if self._start is not None:
                MutableHeaders(scope=self._start).update(self._headers)
                await self._send(self._start)
            await self._send(message)
