"""Bounds of the texts that vLLM's and vLLM-Omni's servers make tokens, whichever of their code calls a tokenizer.

They tokenize some texts whole before they look at the model's context, some of them in the hub's loop, and pairs of
texts each with each. Here a tokenizer itself refuses what is too long, while it works for an HTTP request.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any, Final

from transformers import PythonBackend, TokenizersBackend
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer

from hub.api.exchange import client_name, current_exchange
from hub.api.vllm.bounds.body import body_now
from hub.api.vllm.bounds.wrapping import wrapped_once

#: Characters of all texts of one request together, as often as each is tokenized: those of the longest body.
MAX_CHARACTERS: Final = 8 << 20
#: Of those, what may be tokenized in the hub's loop, where everybody waits for it: some 50 ms.
MAX_ON_THE_LOOP: Final = 64 << 10
#: A request is short while its body has so many bytes at most, and its texts so many characters: some 0.1 s for each.
MAX_SHORT: Final = 64 << 10
#: A text with so many characters for each token that the model holds is tried on its begin first.
_USUAL: Final = 8
#: Tokens more than enough: where a text is cut, its last tokens may be others.
_MORE: Final = 16
#: Names of how a tokenizer cuts a text, or two.
_CUTS: Final = frozenset({"longest_first", "only_first", "only_second"})
#: Modules whose methods only pass texts on to methods that are bounded.
_PASSES_ON: Final = frozenset(
    {"vllm.tokenizers.hf", "vllm.tokenizers.protocol", "transformers.tokenization_utils_base"}
)


@dataclass(slots=True)
class RequestTexts:
    """What one HTTP request has had tokenized."""

    #: The model's context.
    most_tokens: int
    #: Whose it is; empty for a client without a key and an address.
    client: str = ""
    #: Whether one budget counts for all of it: not for a WebSocket, where texts come one after the other.
    is_counted: bool = True
    characters: int = 0
    on_the_loop: int = 0
    #: Whether the request was refused: what it still has queued is not done.
    has_failed: bool = False

    def spend(self, characters: int) -> None:
        """Count a text. Raise VLLMValidationError if the request then has too much of it."""
        if self.is_counted:
            self.characters += characters
            if self.characters > MAX_CHARACTERS:
                raise VLLMValidationError(
                    f"the texts of one request may have {MAX_CHARACTERS} characters together, where a text that is "
                    "paired with many others counts with each: send several requests"
                )
        if _is_loop():
            self.on_the_loop = self.on_the_loop + characters if self.is_counted else characters
            if self.on_the_loop > MAX_ON_THE_LOOP:
                raise VLLMValidationError(f"texts at this place may have {MAX_ON_THE_LOOP} characters: send less")


_texts: Final[ContextVar[RequestTexts | None]] = ContextVar("texts", default=None)
#: Its ``is_within`` is true in a thread whose tokenizer is at work.
_thread: Final = threading.local()


def start_http_request(most_tokens: int, *, is_websocket: bool = False) -> RequestTexts:
    """Bound the texts of the current context, that of one HTTP request to a model with this context."""
    exchange = current_exchange()
    client = client_name(exchange.key, exchange.host)
    texts = RequestTexts(most_tokens, client, is_counted=not is_websocket)
    _texts.set(texts)
    return texts


def beginning(tokenizer: Any, text: str, most: int, side: str = "right") -> str:
    """So much of a text that it has more tokens than ``most``, or all of it. ``side``: where it may be cut.

    A whole text costs what it is long; this costs a few times what ``most`` tokens of it do.
    """
    return _beginning(lambda part: len(tokenizer.encode(part, add_special_tokens=False)), text, most, side)


def _beginning(count: Callable[[str], int], text: str, most: int, side: str) -> str:
    length = _USUAL * (most + _MORE)
    while length < len(text):
        part = text[-length:] if side == "left" else text[:length]
        if count(part) >= most + _MORE:
            return part
        length *= 2
    return text


@contextmanager
def counted_once(text: str) -> Iterator[None]:
    """Count a text as tokenized, and nothing that is tokenized in the block. Raise VLLMValidationError."""
    texts = _texts.get()
    if texts is not None and not _is_within():
        texts.spend(len(text))
    with _within():
        yield


def bound_tokenizers(renderer: Any, *, short_apart: bool = False) -> None:
    """Bound the tokenizers of this process, among them that of a renderer, and have its thread serve by turns.

    ``short_apart``: the texts of short requests have a thread of their own; that tokenizer can be used by two.
    """
    kinds: list[Any] = [TokenizersBackend, PythonBackend]
    if renderer.tokenizer is not None:
        kinds += type(renderer.tokenizer).__mro__
    for kind in kinds:
        own: Any = {} if kind.__module__ in _PASSES_ON else vars(kind)
        if "_encode_plus" in own:
            kind._encode_plus = wrapped_once(own["_encode_plus"], _bounded)  # noqa: SLF001
        if "__call__" in own:
            kind.__call__ = wrapped_once(own["__call__"], _bounded)
        if "encode" in own:
            kind.encode = wrapped_once(own["encode"], _bounded)
    serve_by_turns(renderer._executor, short_apart=short_apart)  # noqa: SLF001 - vLLM's own code shares it so, too


def _bounded(method: Callable[..., Any]) -> Callable[..., Any]:
    def tokenize(self: Any, text: Any = "", text_pair: Any = None, *more: Any, **options: Any) -> Any:
        texts = _texts.get()
        if texts is None or _is_within():
            return method(self, text, *_given(text_pair, more), **options)

        def count(part: str) -> int:
            made = method(self, part, add_special_tokens=False)
            return len(made if isinstance(made, list) else made["input_ids"])

        most = _cut_at(options)
        side = getattr(self, "truncation_side", "right")
        with _within():
            text, text_pair = (_fitting(count, each, most, texts, side) for each in (text, text_pair))
            texts.spend(_characters(text) + _characters(text_pair))
            return method(self, text, *_given(text_pair, more), **options)

    return tokenize


def _given(text_pair: Any, more: tuple[Any, ...]) -> tuple[Any, ...]:
    # Not all have a second text.
    return () if text_pair is None and not more else (text_pair, *more)


def _cut_at(options: dict[str, Any]) -> int | None:
    """To how many tokens the tokenizer cuts a text by itself; None: not at all."""
    strategy = options.get("truncation_strategy", options.get("truncation"))
    length = options.get("max_length")
    cuts = strategy is True or str(getattr(strategy, "value", strategy)) in _CUTS
    return length if cuts and isinstance(length, int) else None


def _fitting(count: Callable[[str], int], text: Any, most: int | None, texts: RequestTexts, side: str) -> Any:
    if not isinstance(text, str):
        return [_fitting(count, each, most, texts, side) for each in text] if isinstance(text, list) else text
    part = _beginning(count, text, texts.most_tokens if most is None else min(most, texts.most_tokens + 1), side)
    if len(part) < len(text) and most is None:
        raise VLLMValidationError(
            f"a text of {len(text)} characters can't fit into the model's context of {texts.most_tokens} tokens: "
            "send less"
        )
    return part


def _characters(text: Any) -> int:
    return sum(map(_characters, text)) if isinstance(text, list | tuple) else len(text) if isinstance(text, str) else 0


def _is_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_within() -> bool:
    return bool(getattr(_thread, "is_within", False))


@contextmanager
def _within() -> Iterator[None]:
    was, _thread.is_within = _is_within(), True
    try:
        yield
    finally:
        _thread.is_within = was


_tokenizes: Final = BaseRenderer._tokenize_prompt  # noqa: SLF001 - the step that is overridden


def _tokenize_prompt(self: Any, prompt: Any, params: Any) -> Any:
    """In place of vLLM's, which tokenizes a whole text where the request says on which side to cut it."""
    text, most = prompt["prompt"], None
    if _texts.get() is not None and None not in (params.truncate_prompt_tokens, params.truncation_side):
        # To how many tokens -1 cuts has a name of its own in each version of vLLM; without a side all say it here.
        most = replace(params, truncation_side=None).get_encode_kwargs()["max_length"]
    if most is None:
        return _tokenizes(self, prompt, params)
    tokenizer = self.get_tokenizer()
    with _within():
        part = beginning(tokenizer, text, most, "left" if params.truncation_side == "left" else "right")
    with counted_once(part):
        cut: Any = {**prompt, "prompt": part}
        made = _tokenizes(self, cut, params)
    skipped = len(text) - len(part) if params.truncation_side == "left" else 0
    return self._apply_prompt_char_offset(made, skipped) if skipped else made


BaseRenderer._tokenize_prompt = _tokenize_prompt  # type: ignore[method-assign] # noqa: SLF001


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    context: Context
    call: Callable[[], Any]


def serve_by_turns(executor: Executor, *, short_apart: bool = False) -> None:
    """Have an executor serve the clients in turn, and the HTTP requests of each, in their contexts.

    By itself it does jobs as they come: a request with ten thousand texts has all others wait. Of a request that has
    failed none is done. ``short_apart``: the jobs of short requests are done by a thread of their own. Where vLLM
    replaces the executor's threads, because a chat template is stuck, that thread is replaced, too.
    """
    if isinstance(getattr(executor.submit, "__self__", None), _Turns):
        return
    turns = _Turns(executor)
    if short_apart:
        # Of the same kind: one whose threads can be replaced, where this vLLM has it.
        kind: Any = type(executor)
        turns = _Turns(kind(1), turns)
    executor.submit = turns.submit  # type: ignore[method-assign]
    if hasattr(executor, "replace_inner"):
        executor.replace_inner = turns.replace_inner


def _is_short() -> bool:
    """Whether the current context is that of a short request, as far as its texts are known."""
    texts, body = _texts.get(), body_now()
    return texts is not None and body is not None and max(body.size_bytes, texts.characters) <= MAX_SHORT


class _Turns:
    """``of_long``: has the jobs of requests that are not short; None: they are done here, too."""

    def __init__(self, executor: Executor, of_long: _Turns | None = None) -> None:
        self._submit = executor.submit
        self._replace: Callable[[], None] | None = getattr(executor, "replace_inner", None)
        self._of_long = of_long
        self._lock = threading.Lock()
        #: How often the threads were replaced. Those of now have one call of ``_do_next`` for each job that waits.
        self._replaced = 0
        #: The jobs that wait, of each client and request; the first of the first of the first is next.
        self._waiting: OrderedDict[str, OrderedDict[int, deque[_Job]]] = OrderedDict()

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """See Executor."""
        job = _Job(Future(), copy_context(), lambda: call(*args, **options))
        self._add(job)
        return job.future

    def replace_inner(self) -> None:
        """In place of the executor's: the new threads do also the jobs that wait behind one that is stuck."""
        with self._lock:
            if self._replace is not None:
                self._replace()
                self._replaced += 1
                for _ in range(sum(len(jobs) for each in self._waiting.values() for jobs in each.values())):
                    self._submit(self._do_next, self._replaced)
        if self._of_long is not None:
            self._of_long.replace_inner()

    def _add(self, job: _Job) -> None:
        texts = job.context.get(_texts)
        try:
            # Under the lock: while the threads are being replaced, the executor takes nothing.
            with self._lock:
                self._submit(self._do_next, self._replaced)
                of_client = self._waiting.setdefault("" if texts is None else texts.client, OrderedDict())
                of_client.setdefault(id(texts), deque()).append(job)
        except RuntimeError:
            # It is shut down.
            job.future.cancel()
            raise

    def _do_next(self, replaced: int) -> None:
        with self._lock:
            if replaced != self._replaced:
                # A thread that was stuck has gone on: others have its jobs.
                return
            client, of_client = self._waiting.popitem(last=False)
            request, jobs = of_client.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                of_client[request] = jobs
            if of_client:
                self._waiting[client] = of_client
        if self._of_long is not None and not job.context.run(_is_short):
            self._of_long._add(job)  # noqa: SLF001 - of the same class
            return
        texts = job.context.get(_texts)
        if texts is not None and texts.has_failed:
            job.future.cancel()
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(job.context.run(job.call))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            job.future.set_exception(error)
