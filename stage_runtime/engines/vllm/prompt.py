"""The prompt of a vLLM stage, from a client's inputs or from the hand-offs of earlier stages.

Pictures for a multimodal model come with the request, in messages or beside the prompt; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Final

from PIL import Image

from omni_discovery.data_urls import MAX_PIXELS
from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.tools import asked_tools
from omni_discovery.wire import WITH_KEY
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.client_threads import ClientThreads, work_of
from stage_runtime.engines.handoffs import check_sound
from stage_runtime.engines.media.items import BESIDE, PICTURES, has_items, take_items
from stage_runtime.engines.prompts import LONG, check_unread, is_long, read_prompt
from stage_runtime.engines.vllm.load import Model
from stage_runtime.engines.vllm.sampling_params import check_length, check_prompt

#: Names in a hand-off that hold a prompt; the first that is there counts. Embeds only with ``enable_prompt_embeds``.
_EMBEDS: Final = ("prompt_embeds", "hidden_states")
_TOKENS: Final = "prompt_token_ids"
_IDS: Final = (_TOKENS, "token_ids")
_ITEMS: Final = "multi_modal_data"
_PIECES: Final = "pieces"
#: Values of items in lists, and numbers of their arrays and tensors: as many as a request's pictures have.
_MOST_ITEMS: Final = 1 << 16
_MOST_NUMBERS: Final = 3 * MAX_PIXELS
#: What the metadata of a video tell in a text, which is the name of a library; and its length.
_NAMES_OF_TEXTS: Final = frozenset(("video_backend",))
_LONGEST_NAME: Final = 64
#: Beside these, token ids are not all that counts.
_NOT_ALONE: Final = frozenset((_ITEMS, _PIECES))
#: How long a step waits for a prompt, if there is nothing else to do.
_PAUSE_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, or in their place ``embeds``, a tensor of floats with the shape (tokens, hidden size).

    ``items`` are pictures, sound and other inputs of the model, in the form of vLLM's ``multi_modal_data``; vLLM puts
    them in place of the placeholder tokens. The prefix cache is shared by prompts with the same ``salt``. ``prepared``
    is what vLLM has made of all that already, see ``runs.prepare_prompt``: then ``items`` are empty.
    """

    token_ids: Sequence[int] = field(default_factory=list)
    embeds: Any = None
    items: Mapping[str, Any] | None = None
    salt: str = ""
    prepared: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.token_ids) if self.embeds is None else int(self.embeds.shape[0])

    def with_answer(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The prompt as vLLM takes it, followed by the answer so far. Nothing can follow embeds."""
        if self.prepared is not None:
            return {**self.prepared, _TOKENS: [*self.prepared[_TOKENS], *token_ids]}
        prompt: dict[str, Any] = {"cache_salt": self.salt} if self.salt else {}
        if self.embeds is not None:
            return {**prompt, "prompt_embeds": self.embeds}
        prompt[_TOKENS] = [*self.token_ids, *token_ids]
        return prompt if self.items is None else {**prompt, _ITEMS: self.items}


@dataclass(slots=True)
class Reading:
    """A request whose prompt is being read."""

    request: StageRequest
    params: Any
    lora: Any
    #: None if the engine's thread is to read it: only the form of the answer was checked.
    prompt: Future[Prompt | None]
    is_paused: bool = False
    #: Reads its pictures or other items, behind ``prompt``, once it has its turn, see ``PromptReader``; then None.
    read_items: Callable[[], Prompt] | None = None

    @property
    def waits_for_turn(self) -> bool:
        """Whether nothing but its turn is missing for its items to be read."""
        return self.read_items is not None and self.prompt.done() and self.prompt.exception() is None


class PromptReader:
    """Reads long prompts in a thread, one after the other, the clients in turn: the engine goes on meanwhile.

    Another one unpacks pictures and other items, and prepares them for the model, which may take a second for a picture
    of a few KB: those of one request after those of another, and of one client twice in a row only if nobody else has
    any.
    """

    def __init__(self) -> None:
        self._thread = ClientThreads(1, "PromptReader", is_low=False)
        self._items_thread = ClientThreads(1, "ItemsReader")
        self._readings: dict[str, Reading] = {}
        #: What is made of a prompt with items in their thread. Set once the engine has loaded.
        self.prepare: Callable[[Prompt], Prompt] = lambda prompt: prompt
        #: The request whose items were read last, and whose it is.
        self._last: Future[Prompt | None] | None = None
        self._last_client = ""

    def __len__(self) -> int:
        return len(self._readings)

    def __contains__(self, key: str) -> bool:
        return key in self._readings

    def read_long(self, request: StageRequest, params: Any, lora: Any, model: Model, earlier: Sequence[int]) -> bool:
        """Whether the request's prompt is long, or brings items; then it is being read from now on, or waits for its
        turn.
        """
        read: Future[Prompt | None] = Future()
        if brings_items(request, model):
            read.set_result(None)
        elif _is_long(request):
            with work_of(request.client):
                read = self._thread.submit(read_request, request, model, earlier)
        else:
            return False
        items = self._reader_of_items(request, model, earlier)
        self._readings[request.key] = Reading(request, params, lora, read, read_items=items)
        return True

    def read_behind(
        self,
        check: Callable[[], None],
        threads: Executor,
        request: StageRequest,
        params: Any,
        lora: Any,
        model: Model,
        earlier: Sequence[int],
    ) -> None:
        """Read the request's prompt, if it is long or brings items, behind a check that the threads make. Whatever that
        raises.
        """
        items = self._reader_of_items(request, model, earlier)

        def read() -> Prompt | None:
            check()
            return read_request(request, model, earlier) if items is None and _is_long(request) else None

        self._readings[request.key] = Reading(request, params, lora, threads.submit(read), read_items=items)

    def pause(self, key: str, *, paused: bool) -> None:
        """The request is to begin paused, or not. Unknown keys are ignored."""
        if key in self._readings:
            self._readings[key].is_paused = paused

    def take_read(self, *, waits: bool) -> list[Reading]:
        """The requests whose prompts are read, or can't be. ``waits``: for a moment, if there are none yet."""
        self._give_turn()
        if waits and (reading := [each.prompt for each in self._readings.values() if not each.waits_for_turn]):
            wait(reading, _PAUSE_S, FIRST_COMPLETED)
        taken = [each for each in self._readings.values() if each.prompt.done() and not each.waits_for_turn]
        for each in taken:
            del self._readings[each.request.key]
        return taken

    def stop(self, key: str) -> bool:
        """Forget a request; return whether it was known. Its prompt is read to its end if that has begun."""
        reading = self._readings.pop(key, None)
        if reading is not None:
            reading.prompt.cancel()
        return reading is not None

    def close(self) -> None:
        """Forget all requests, and end the threads."""
        self._readings.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._items_thread.shutdown(wait=False, cancel_futures=True)

    def _reader_of_items(
        self, request: StageRequest, model: Model, earlier: Sequence[int]
    ) -> Callable[[], Prompt] | None:
        if not brings_items(request, model):
            return None
        return lambda: self.prepare(read_request(request, model, earlier))

    def _give_turn(self) -> None:
        """Have the thread for items begin with the next ones, if it has none."""
        if self._last is not None and not self._last.done():
            return
        waiting = [each for each in self._readings.values() if each.waits_for_turn]
        others = (each for each in waiting if each.request.client != self._last_client)
        following = next(others, waiting[0] if waiting else None)
        if following is None or following.read_items is None:
            return
        following.prompt = self._last = self._items_thread.submit(following.read_items)
        following.read_items, self._last_client = None, following.request.client


def brings_items(request: StageRequest, model: Model) -> bool:
    """Whether a request has pictures or other items for a model that takes some."""
    if not model.takes_items:
        return False
    if request.payloads:
        return any(_ITEMS in part for part in parts_of(request.payloads.values()))
    return has_items(request.inputs)


def _is_long(request: StageRequest) -> bool:
    if not request.payloads:
        return is_long(request.inputs)
    return text_size(parts_of(request.payloads.values())) >= LONG


def parts_of(handed: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The pieces of these hand-offs, or themselves. Raise InvalidRequestError for pieces that are none."""
    parts: list[Mapping[str, Any]] = []
    for each in handed:
        pieces = each.get(_PIECES, (each,))
        if not isinstance(pieces, list | tuple) or not all(isinstance(piece, Mapping) for piece in pieces):
            raise InvalidRequestError("the hand-off's pieces must be a list of mappings")
        parts += pieces
    return parts


def text_size(parts: Iterable[Mapping[str, Any]]) -> int:
    """Characters of the texts of pieces; one for a piece without any."""
    texts = (part.get("text") for part in parts)
    return sum(max(1, len(text)) if isinstance(text, str) else 1 for text in texts)


def salt_of(request: StageRequest, model: Model) -> str:
    """With which requests it shares the prefix cache: those with the same ``cache_salt``, and of the same API key."""
    salt = str(request.params.get("cache_salt") or "")
    if model.shares_cache or not request.client.startswith(WITH_KEY):
        return salt
    return f"{request.client}:{salt}"


def read_request(request: StageRequest, model: Model, earlier: Sequence[int]) -> Prompt:
    """The prompt of a request whose hand-offs are complete; ``earlier`` are the token ids of its earlier segments.

    Raise InvalidRequestError for inputs, or a hand-off, that are no prompt of this model.
    """
    if _ITEMS in request.inputs:
        raise InvalidRequestError(f"{_ITEMS}: give pictures as image_url parts of messages, to a stage that takes them")
    if not model.takes_items and (beside := [name for name in BESIDE if name in request.inputs]):
        raise InvalidRequestError(f"{beside[0]}: this stage's model takes no pictures")
    if request.payloads:
        prompt = read_handed(request.payloads.values(), model)
    else:
        check_unread(request.inputs, reads_tools=True)
        inputs, items = take_items(request.inputs, PICTURES) if model.takes_items else (request.inputs, None)
        asked = asked_tools(inputs)
        tools = () if asked is None else asked.shown()
        read = read_prompt(model.bounded, inputs, begins=not earlier, items=items or (), tools=tools)
        prompt = Prompt(read, items=items)
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty")
    if request.segment is not None and (prompt.embeds is not None or prompt.items is not None):
        raise InvalidRequestError("input in segments is tokens or text; embeds and pictures come whole")
    whole = replace(prompt, token_ids=[*earlier, *prompt.token_ids], salt=salt_of(request, model))
    return checked_prompt(whole, model)


def checked_prompt(prompt: Prompt, model: Model) -> Prompt:
    """The prompt itself. Raise InvalidRequestError if it is empty, too long, or has ids beyond the vocabulary."""
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty")
    # Of embeds only the length is checked.
    token_ids = prompt.token_ids if prompt.embeds is None else [0] * len(prompt)
    check_prompt(token_ids, model.max_model_len, model.vocab_size, model.least_answer)
    return prompt


def read_handed(handed: Iterable[Mapping[str, Any]], model: Model) -> Prompt:
    """The prompt in these hand-offs, or pieces of one, concatenated. Raise InvalidRequestError if they hold none."""
    parts = parts_of(handed)
    if not parts:
        return Prompt()
    items = _items(parts, model)
    if model.embeds_size and items is None:
        for name in _EMBEDS:
            if all(name in part for part in parts):
                return Prompt(embeds=_joined_embeds([part[name] for part in parts], name, model))
    for name in _IDS:
        if all(name in part for part in parts):
            return Prompt(_joined_ids([part[name] for part in parts], name, model), items=items)
    if all(isinstance(part.get("text"), str) for part in parts):
        return Prompt(model.bounded.encode("".join(part["text"] for part in parts)), items=items)
    names = ", ".join(sorted({name for part in parts for name in part})) or "nothing"
    hint = "" if model.embeds_size else "; prompt_embeds are taken where engine_args.enable_prompt_embeds is true"
    raise InvalidRequestError(
        f"the hand-off has no token_ids, prompt_token_ids or text for a prompt, but {names}{hint}"
    )


def _items(parts: Sequence[Mapping[str, Any]], model: Model) -> Mapping[str, Any] | None:
    items = [part[_ITEMS] for part in parts if _ITEMS in part]
    if not items:
        return None
    if not model.takes_items:
        raise InvalidRequestError(f"the hand-off holds {_ITEMS}, and this stage's model takes none")
    if len(items) > 1 or not isinstance(items[0], Mapping):
        raise InvalidRequestError(f"{_ITEMS} must come once in a hand-off, as a mapping from its kind to the items")
    _check_items(items[0])
    return dict(items[0])


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME


def _check_items(items: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for anything but numbers, arrays, tensors, pictures, and lists and mappings of these.

    A text would be fetched as a URL, or opened as a file, by the model's processor.
    """
    size, count, unread = 0, 0, list[Any]([items])
    while unread:
        count, value = count + 1, unread.pop()
        if count + len(unread) > _MOST_ITEMS:
            raise InvalidRequestError(f"the hand-off's {_ITEMS} are too many values: pack them in arrays or tensors")
        if isinstance(value, Mapping):
            if not all(isinstance(name, str) for name in value):
                raise InvalidRequestError(f"the hand-off's {_ITEMS} have names that are no texts")
            unread += (each for key, each in value.items() if not (key in _NAMES_OF_TEXTS and _is_short(each)))
        elif isinstance(value, list | tuple):
            unread += value
        elif hasattr(value, "numel") or getattr(getattr(value, "dtype", None), "kind", "") in tuple("biuf"):
            size += int(value.numel()) if hasattr(value, "numel") else int(value.size)
        elif isinstance(value, Image.Image):
            size += 3 * value.width * value.height
        elif value is not None and not isinstance(value, bool | int | float):
            raise InvalidRequestError(
                f"the hand-off's {_ITEMS} hold a {type(value).__name__}: items come as numbers, arrays or tensors"
            )
    if size > _MOST_NUMBERS:
        raise InvalidRequestError(f"the hand-off's {_ITEMS} have {size} numbers; at most {_MOST_NUMBERS} are taken")


def ids_name(part: Mapping[str, Any]) -> str:
    """The name under which a piece of a hand-off has its token ids; empty if it has none, or items or pieces, too."""
    return next((name for name in _IDS if name in part), "") if part.keys().isdisjoint(_NOT_ALONE) else ""


def is_counted(part: Mapping[str, Any]) -> bool:
    """Whether a piece of a hand-off has embeds or token ids: of its text alone, words may join those of the next."""
    return any(name in part for name in (*_EMBEDS, *_IDS))


def read_ids(value: Any, name: str) -> list[int]:
    """The token ids of a hand-off. Raise InvalidRequestError for what is none."""
    given = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(given, list | tuple) or not all(type(each) is int for each in given):
        raise InvalidRequestError(f"the hand-off's {name} must be whole numbers in one row")
    return list(given)


def count_ids(value: Any, name: str) -> int:
    """How many token ids a hand-off has, before any is looked at. Raise InvalidRequestError if they are in no row."""
    if not isinstance(value, list | tuple) and getattr(value, "ndim", None) != 1:
        raise InvalidRequestError(f"the hand-off's {name} must be whole numbers in one row")
    return len(value)


def ids_size(part: Mapping[str, Any]) -> int:
    """How many token ids a piece of a hand-off has. Raise InvalidRequestError if they are in no row."""
    return sum(count_ids(part[name], name) for name in _IDS if name in part)


def _joined_ids(parts: Sequence[Any], name: str, model: Model) -> list[int]:
    # Whoever has handed them over may have made gigabytes of them.
    check_length(sum(count_ids(part, name) for part in parts), model.max_model_len, model.least_answer)
    return [token_id for part in parts for token_id in read_ids(part, name)]


def _joined_embeds(parts: Sequence[Any], name: str, model: Model) -> Any:
    import torch

    for part in parts:
        if not isinstance(part, torch.Tensor) or part.ndim != 2 or not part.is_floating_point():
            raise InvalidRequestError(
                f"the hand-off's {name} must be a tensor of floats with the shape (tokens, hidden size)"
            )
        if part.shape[1] != model.embeds_size:
            raise InvalidRequestError(
                f"the hand-off's {name} has {part.shape[1]} numbers a token; the model, {model.embeds_size}"
            )
    check_length(sum(len(part) for part in parts), model.max_model_len, model.least_answer)
    whole = torch.cat(list(parts)).to(model.dtype)
    check_sound(whole, f"the hand-off's {name}")
    return whole
