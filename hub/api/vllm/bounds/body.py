"""The body of a request to vLLM's server, checked before that server decodes it: it would read any, at any cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from hub.api.client_quota import client_of
from hub.api.errors import BodyTooLongError
from hub.api.long_bodies import ClientTurns, long_body
from hub.api.vllm.bounds.fan_out import MAX_IN_ALL
from hub.json_memory import memory_of
from omni_discovery.errors import InvalidRequestError, OverloadedError, RequestError
from omni_discovery.inputs.answer_form import FormBudget, check_answer_form, check_schema
from omni_discovery.inputs.containers import (
    check_arguments,
    check_few_values,
    check_item_objects,
    check_message_values,
    check_objects,
    check_text,
    check_values,
    decode_any,
)
from omni_discovery.inputs.tools import MAX_TOOLS, MAX_TOOLS_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Message, Receive, Scope

#: Longest body: the pictures of a request (MAX_PICTURES_BYTES) take 4 MiB of it, in base64.
MAX_BYTES: Final = 8 << 20
#: Conversations of one batch of chats: the loop renders them one after the other, for some 2 ms each.
MAX_CONVERSATIONS: Final = 256
#: Fields whose names vLLM's server looks at one by one, for some 10 us each, in the one thread that renders chats.
_NAMED: Final = ("chat_template_kwargs", "mm_processor_kwargs")
MAX_NAMES: Final = 64
#: The power of an answer's length by which beams are compared: beyond, it is no number any more.
MAX_LENGTH_PENALTY: Final = 10.0
#: Fields of which no stage takes thousands of values; the server would read any number first, on the hub's loop.
_FEW: Final = frozenset(
    {"stop", "stop_sequences", "stop_token_ids", "bad_words", "logit_bias", "vllm_xargs", "include", "metadata"}
)
#: Lists of texts, or of prompts, by the routes that read them. A tokenizer begins with each, however short it is.
_LISTS: Final = frozenset({"input", "inputs", "prompt", "texts", "text_1", "text_2", "data_1", "data_2"}) | frozenset(
    {"queries", "documents", "items", "images"}
)
#: Tokens of texts that are made longer, to the model's context, in one request: an entry of a list for each.
MAX_PADDED_TOKENS: Final = 4 << 20
#: Fields that make up the prompts; all others are said of each answer to each of them.
_PROMPTS: Final = frozenset({"prompt", "messages", "input"})
#: Fields of messages; and routes whose ``input`` is of them, too.
_OF_MESSAGES: Final = frozenset({"messages", "system"})
_ROUTES_OF_ITEMS: Final = frozenset({"/v1/responses", "/v1/responses/render", "/invocations"})
#: The route whose prompts the server makes into requests one after the other, in one turn of the hub's loop.
_RENDERED: Final = "/v1/completions/render"
MAX_RENDERED: Final = 16
#: Bytes of what is said of each answer, times how many answers there are: the server reads it anew for each, in the
#: hub's loop, and each request to a replica has it.
MAX_REPEATED_BYTES: Final = 32 << 20
#: Fields by which the server shows the prompt in each answer.
_SHOW_PROMPTS: Final = ("echo", "return_token_ids")
#: Inputs of ``/inference/v1/generate`` that no stage takes; the server would unpack them first, whatever their size.
_NOT_TAKEN: Final = ("features", "content_parts")
#: From so many bytes on a body is checked in a thread: what it asks for may take a fifth of a second to look through.
#: With forms or tools in it, 1 KiB may take 5 ms.
_LARGE_BYTES: Final = 16 << 10
_LARGE_FORM_BYTES: Final = 1 << 10
#: One of these is in each body with forms or tools: their names, or what any name may be written with.
_FORM_SIGNS: Final = (b"structured_outputs", b"response_format", b'"text"', b"output_config", b'"tools"', b"\\u")
#: One of these is in each prompt with earlier calls.
_ARGUMENTS_SIGNS: Final = (b'"arguments"', b"\\u")
#: Where large bodies are checked, so that the hub's loop goes on meanwhile. A single one: two would take the loop's
#: time from it twice as often.
_thread: Final = ThreadPoolExecutor(1, "BodyCheck")
_turns: Final = ClientTurns(1)


class _Forms(msgspec.Struct, frozen=True):
    """The fields of a body from which vLLM's server makes grammars, some of them while it reads the body."""

    structured_outputs: Any = None
    response_format: Any = None
    text: Any = None
    output_config: Any = None
    tools: Any = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for, as far as the bounds of its answers need it."""

    has_tools: bool = False
    #: Prompts of a list of prompts, or conversations of a batch: each is a request of its own to the engine.
    prompts: int = 1
    #: Whether the prompt is shown in each answer to it.
    shows_prompts: bool = False
    #: Of a list of texts, or of prompts, how many it has; and whether each is made as long as the model's context.
    texts: int = 1
    is_padded: bool = False


_NOTHING: Final = Asked()
_decoder: Final = msgspec.json.Decoder(_Forms)
_parts_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])
#: Fields that have bounds of their own; a text is the prompt of another route.
_FORMS: Final = frozenset(_Forms.__struct_fields__)
#: White space as JSON has it.
_SPACE: Final = b" \t\r\n"


def check_body(body: bytes, *, reads_items: bool = False) -> Asked:
    """What a body asks for. Raise InvalidRequestError if to read it, or what it asks for, may cost too much.

    ``reads_items``: its input is of items like messages, not of texts or tokens.
    """
    check_text(body)
    check_values(body)
    # JSON in UTF-8 holds no such byte; in other encodings, which Python reads too, nothing above was counted.
    if b"\0" in body:
        raise InvalidRequestError("the body is not JSON in UTF-8")
    begin = body.lstrip(_SPACE)
    # A form, which is no JSON in any encoding, or nothing at all.
    if begin.startswith(b"--") or not begin:
        return _NOTHING
    # What is checked has to be what the server reads: it would also read JSON behind a byte order mark.
    if not begin.startswith(b"{"):
        raise InvalidRequestError(
            "the body is neither an object of JSON, in UTF-8 without a byte order mark, nor a form"
        )
    try:
        # The server reads halves of surrogates, too, and nothing else does: who looked at it would have seen nothing.
        body.decode()
        asked, parts = _decoder.decode(body), _parts_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    params = _params_in(parts)
    _check_counts(parts, params, reads_items=reads_items)
    _check_arguments(parts)
    conversations = _length_of(bytes(parts.get("messages", b"")), (b"[",))
    if conversations > MAX_CONVERSATIONS:
        raise InvalidRequestError(f"messages: one request may have {MAX_CONVERSATIONS} conversations; send several")
    texts = _check_texts(parts)
    prompts = max(1, conversations, _length_of(bytes(parts.get("prompt", b"")), (b"[", b'"')))
    _check_repeated(parts, params, prompts)
    _check_taken(parts)
    _check_names(parts)
    _check_length_penalty(bytes(parts.get("length_penalty", b"")))
    budget = FormBudget()
    if isinstance(asked.structured_outputs, dict):
        check_answer_form("structured_outputs", asked.structured_outputs, budget)
    for name in ("response_format", "text", "output_config"):
        value = getattr(asked, name)
        # A text is the prompt of another route.
        if isinstance(value, dict):
            check_schema(name, value, budget)
    tools = asked.tools if isinstance(asked.tools, list) else []
    _check_tools(tools, budget)
    shows = any(_is_asked(parts, name) for name in _SHOW_PROMPTS)
    return Asked(bool(tools), prompts, shows, texts, _value_in(bytes(parts.get("padding", b""))) == "max_length")


def _check_texts(parts: Mapping[str, msgspec.Raw]) -> int:
    """How many texts, or prompts, the longest list has. Raise InvalidRequestError for more than a request may have."""
    longest = max((_length_of(bytes(parts[name]), (b"[", b'"', b"{")) for name in _LISTS & parts.keys()), default=1)
    if longest > MAX_IN_ALL:
        raise InvalidRequestError(f"one request may have {MAX_IN_ALL} texts or prompts, not {longest}; send several")
    return max(1, longest)


def _check_counts(parts: Mapping[str, msgspec.Raw], params: Mapping[str, msgspec.Raw], *, reads_items: bool) -> None:
    check_objects(bytes(part) for name, part in parts.items() if name not in _FORMS)
    if reads_items:
        check_item_objects(bytes(parts.get("input", b"")))
    of_messages = {*_OF_MESSAGES, "input"} if reads_items else _OF_MESSAGES
    check_message_values(bytes(part) for name, part in parts.items() if name in of_messages)
    for each in (parts, params):
        for name in _FEW & each.keys():
            check_few_values(name, bytes(each[name]))


def _check_arguments(parts: Mapping[str, msgspec.Raw]) -> None:
    prompts = [bytes(part) for name, part in parts.items() if name in _PROMPTS]
    try:
        check_arguments(decode_any(each) for each in prompts if any(sign in each for sign in _ARGUMENTS_SIGNS))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error


def _check_tools(tools: list[Any], budget: FormBudget) -> None:
    # Each may take as long as one form, each of those in a namespace, too.
    if sum(map(_tools_in, tools)) > MAX_TOOLS or len(msgspec.json.encode(tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(
            f"tools: at most {MAX_TOOLS} of {MAX_TOOLS_BYTES} bytes together are allowed: describe fewer"
        )
    for position, tool in enumerate(tools):
        check_schema(f"tools[{position}]", tool, budget)


def _tools_in(tool: Any) -> int:
    """How many functions a tool is: one, unless it is a namespace."""
    inner = tool.get("tools") if isinstance(tool, dict) else None
    return max(1, len(inner)) if isinstance(inner, list) else 1


def _length_of(value: bytes, begins: tuple[bytes, ...]) -> int:
    """How many values a list has; 0 if it is none, or its first does not begin with one of these."""
    inner = value[1:].lstrip(_SPACE) if value.startswith(b"[") else b""
    return len(_list_decoder.decode(value)) if inner.startswith(begins) else 0


def _is_asked(parts: Mapping[str, msgspec.Raw], name: str) -> bool:
    return bytes(parts.get(name, b"false")) not in {b"false", b"null"}


def _params_in(parts: Mapping[str, msgspec.Raw]) -> Mapping[str, msgspec.Raw]:
    """The parameters of ``/inference/v1/generate``, which are a part of its body."""
    params = bytes(parts.get("sampling_params", b""))
    return _parts_decoder.decode(params) if params.startswith(b"{") else {}


def _value_in(value: bytes) -> Any:
    """A value, as the server reads it: a text may be written with escapes; None for what is none."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _number_in(value: bytes) -> float | None:
    """A number, as the server reads it; None for what is none, or refused by the server."""
    read = _value_in(value)
    try:
        # To the server, a number in quotes is one.
        return float(value if read is None else read)
    except (ValueError, TypeError):
        return None
    except OverflowError:
        return inf


def _check_taken(parts: Mapping[str, msgspec.Raw]) -> None:
    for name in _NOT_TAKEN:
        if bytes(parts.get(name, b"null")) not in {b"null", b"[]"}:
            raise InvalidRequestError(f"{name}: no stage takes it; give pictures in messages of a chat")


def _check_repeated(parts: Mapping[str, msgspec.Raw], params: Mapping[str, msgspec.Raw], prompts: int) -> None:
    each_bytes = sum(len(bytes(part)) for name, part in parts.items() if name not in _PROMPTS)
    of_each = (_number_in(bytes(each.get("n", b""))) for each in (parts, params))
    answers = prompts * max(1.0, *(number or 1.0 for number in of_each))
    if each_bytes * answers > MAX_REPEATED_BYTES:
        raise InvalidRequestError(
            f"what is asked beside the prompts has {each_bytes} bytes, which count for each of {answers:g} answers, "
            f"where a request may have {MAX_REPEATED_BYTES} in all: ask for less, or for fewer answers"
        )


def _check_names(parts: Mapping[str, msgspec.Raw]) -> None:
    for field in _NAMED:
        value = bytes(parts.get(field, b""))
        if value.startswith(b"{") and len(_parts_decoder.decode(value)) > MAX_NAMES:
            raise InvalidRequestError(f"{field}: at most {MAX_NAMES} names are allowed")


def _check_length_penalty(value: bytes) -> None:
    penalty = _number_in(value)
    if penalty is not None and not abs(penalty) <= MAX_LENGTH_PENALTY:
        raise InvalidRequestError(
            f"length_penalty: it has to be between -{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
        )


def counted_bytes(whole: bytes) -> int:
    """The size of a body, or that of a large one where it may take as long to look through."""
    has_forms = len(whole) >= _LARGE_FORM_BYTES and any(sign in whole for sign in _FORM_SIGNS)
    return max(len(whole), _LARGE_BYTES) if has_forms else len(whole)


async def checked_aside(check: Callable[[bytes], object], whole: bytes, scope: Scope) -> None:
    """Have a whole body, or a message of a WebSocket, checked. Raise what ``check`` does, or OverloadedError."""
    if counted_bytes(whole) < _LARGE_BYTES:
        check(whole)
    else:
        await _checked_in_thread(client_of(scope), len(whole), lambda: check(whole))


async def run_aside(size_bytes: int, check: Callable[[], object]) -> None:
    """Have something in the current context's request checked. Raise what ``check`` does, or OverloadedError."""
    body = _current.get()
    await _checked_in_thread("" if body is None else body.client, size_bytes, check)


async def _checked_in_thread(client: str, size_bytes: int, check: Callable[[], object]) -> None:
    async with _turns.turn(client, size_bytes):
        await asyncio.get_running_loop().run_in_executor(_thread, check)


class Body:
    """The body of a request, which is passed on piece by piece; its last piece only once the whole was checked."""

    def __init__(self, scope: Scope, receive: Receive, most_tokens: int = 0) -> None:
        """``most_tokens``: of the model's context."""
        self._most_tokens = most_tokens
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        self._scope, self._receive = scope, receive
        self._pieces: list[bytes] = []
        self._read_bytes = 0
        #: Why the request is refused, if it is.
        self.refusal: RequestError | None = None
        #: What it asks for, once the whole was checked.
        self.asked = _NOTHING
        #: Processor time in which its answer was read for calls, where no parser is kept for one answer.
        self.reading_s = 0.0
        self._check_length(int(length[:20]) if length.isdecimal() else 0)

    @property
    def client(self) -> str:
        """Whose it is."""
        return client_of(self._scope)

    @property
    def size_bytes(self) -> int:
        """How much of it has come."""
        return self._read_bytes

    def _check_length(self, size_bytes: int) -> None:
        if size_bytes > MAX_BYTES:
            self.refusal = BodyTooLongError(f"the body is longer than {MAX_BYTES} bytes: send less in one request")

    async def receive(self) -> Message:
        """See ASGI. Raise HTTPException if the body is refused."""
        message = {} if self.refusal is not None else await self._receive()
        if message.get("type") == "http.request":
            await self._add(message.get("body", b""), is_last=not message.get("more_body", False))
        if self.refusal is not None:
            raise HTTPException(HTTPStatus.BAD_REQUEST)
        return message

    async def _add(self, piece: bytes, *, is_last: bool) -> None:
        self._read_bytes += len(piece)
        self._check_length(self._read_bytes)
        if self.refusal is not None:
            return
        self._pieces.append(piece)
        if is_last:
            whole = b"".join(self._pieces)
            self._pieces.clear()
            try:
                await checked_aside(self.check, whole, self._scope)
                # The server reads it next, on the loop, and keeps it beside what it makes of it.
                await long_body(self._scope, counted_bytes(whole), len(whole) + memory_of(whole))
            except (InvalidRequestError, OverloadedError) as error:
                self.refusal = error

    def check(self, whole: bytes) -> None:
        """Raise InvalidRequestError if the whole body is refused. It may be called in a thread."""
        self.asked = check_body(whole, reads_items=self._scope.get("path") in _ROUTES_OF_ITEMS)
        most = max(1, MAX_PADDED_TOKENS // max(1, self._most_tokens))
        if self.asked.is_padded and self.asked.texts > most:
            raise InvalidRequestError(f"padding: one request may have {most} texts that are padded; send several")
        if self._scope.get("path") == _RENDERED and self.asked.texts > MAX_RENDERED:
            raise InvalidRequestError(f"prompt: one request may have {MAX_RENDERED} prompts rendered; send several")

    def enter(self) -> None:
        """Make it the body of the current context's request."""
        _current.set(self)


_current: Final[ContextVar[Body | None]] = ContextVar("body", default=None)


def body_now() -> Body | None:
    """The body of the current context's request; None outside of one."""
    return _current.get()


def asked_now() -> Asked:
    """What the current context's request asks for, as far as its body has been checked."""
    body = _current.get()
    return _NOTHING if body is None else body.asked
