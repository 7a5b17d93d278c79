"""The conversation of a session: its items within bounds, and the messages that stages get of them. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hub.api.chat.messages import MAX_PICTURES, MAX_SOUNDS, check_messages
from hub.api.realtime.schema import MessagePart, NewCall, NewCallOutput, NewItem, NewMessage
from hub.config import RealtimeBounds
from omni_discovery.errors import InvalidRequestError, OverloadedError

#: Bytes of one millisecond of sound: 24 kHz, 16 bits, one channel.
BYTES_PER_MS: Final = 48
#: What one request to the first stage may hold. The body of a chat request has a bound of its own, which is a bit more.
_MOST_BYTES: Final = 2_900_000
#: The shortest sound that is made a file of, in milliseconds: each has an encoder of its own.
LEAST_SOUND_MS: Final = 100
#: Seconds of sound that replicas unpack for one request.
_MOST_SOUND_MS: Final = 600_000
#: Memory of an item beside its parts, and of a part beside its texts and sounds.
_ITEM_BYTES: Final = 500
_PART_BYTES: Final = 150
#: How many characters of a transcript a second of sound holds, where the sound is not whole yet.
_CHARACTERS_PER_S: Final = 15
#: Characters of a word, at whose beginning a transcript is cut; in what is longer it is cut anywhere.
_LONGEST_WORD: Final = 1024


def memory_of(text: str) -> int:
    """The memory of a text, in bytes: beyond ASCII up to four a character, and those of its UTF-8 once it is sent."""
    return len(text) if text.isascii() else 5 * len(text)


@dataclass(slots=True)
class Content:
    """One part of a message. ``kind``: ``input_text``, ``input_audio``, ``input_image``, ``output_text`` or
    ``output_audio``; the last has words and no sound, for that is not kept.
    """

    kind: str
    text: str = ""
    #: A file in base64, and its format.
    sound: str = ""
    sound_format: str = ""
    sound_ms: int = 0
    image_url: str = ""

    @property
    def size_bytes(self) -> int:
        """Its memory, about."""
        return _PART_BYTES + memory_of(self.text) + len(self.sound) + memory_of(self.image_url)

    @property
    def length(self) -> int:
        """Its characters."""
        return len(self.text) + len(self.sound) + len(self.image_url)

    def shown(self) -> dict[str, Any]:
        """As clients see it: without sound."""
        match self.kind:
            case "input_audio" | "output_audio":
                return {"type": self.kind, "transcript": self.text or None if self.kind == "input_audio" else self.text}
            case "input_image":
                return {"type": self.kind, "image_url": self.image_url}
            case _:
                return {"type": self.kind, "text": self.text}

    def cut(self, end_ms: int, *, is_whole: bool) -> None:
        """Forget the words behind this moment of the sound, at the end of a word; ``is_whole``: no sound will follow.

        How long the rest would have been is estimated where the sound is not whole.
        """
        total_ms = self.sound_ms
        if not is_whole:
            total_ms = max(total_ms, 1000 * len(self.text) // _CHARACTERS_PER_S)
        self.sound_ms = end_ms
        if end_ms < total_ms:
            kept = self.text[: len(self.text) * end_ms // total_ms]
            is_between_words = self.text[len(kept) : len(kept) + 1].isspace() or kept[-1:].isspace()
            # A session may have one answer cut without end: no more of it is looked at.
            tail = kept[-_LONGEST_WORD:]
            word = "" if is_between_words else (tail.split() or [""])[-1]
            # Without a space there is no word to cut before, as in Chinese.
            self.text = kept if word == tail else kept[: len(kept) - len(word)].rstrip()


@dataclass(slots=True)
class ConversationItem:
    """One item: a message, or a call of a function, or what it has said."""

    item_id: str
    kind: str
    role: str = ""
    content: list[Content] = field(default_factory=list)
    status: str = "completed"
    call_id: str = ""
    name: str = ""
    #: The arguments of a call, or what the function has said.
    value: str = ""
    #: What a conversation that holds it counts it as, and how many parts, one at least; 0: none holds it.
    counted_bytes: int = 0
    counted_parts: int = 0

    @property
    def size_bytes(self) -> int:
        """Its memory, about."""
        return _ITEM_BYTES + memory_of(self.value) + sum(part.size_bytes for part in self.content)

    @property
    def length(self) -> int:
        """Its characters, and some for itself."""
        return _ITEM_BYTES + len(self.value) + sum(part.length for part in self.content)

    def shown(self) -> dict[str, Any]:
        """As clients see it."""
        head = {"id": self.item_id, "object": "realtime.item", "type": self.kind, "status": self.status}
        match self.kind:
            case "function_call":
                return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.value}
            case "function_call_output":
                return {**head, "call_id": self.call_id, "output": self.value}
            case _:
                return {**head, "role": self.role, "content": [part.shown() for part in self.content]}

    def message(self) -> dict[str, Any] | None:
        """As the chat's stages get it; None for one that says nothing."""
        match self.kind:
            case "function_call":
                called = {"name": self.name, "arguments": self.value}
                call = {"id": self.call_id, "type": "function", "function": called}
                return {"role": "assistant", "content": None, "tool_calls": [call]}
            case "function_call_output":
                return {"role": "tool", "tool_call_id": self.call_id, "content": self.value}
        if all(part.kind in {"input_text", "output_text", "output_audio"} for part in self.content):
            text = "".join(part.text for part in self.content)
            return {"role": self.role, "content": text} if text.strip() else None
        return {"role": self.role, "content": [_message_part(part) for part in self.content]}


def _message_part(part: Content) -> dict[str, Any]:
    if part.kind == "input_audio":
        return {"type": "input_audio", "input_audio": {"data": part.sound, "format": part.sound_format}}
    if part.kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text}


class Conversation:
    """The items in their order."""

    def __init__(self, bounds: RealtimeBounds) -> None:
        self._bounds = bounds
        self._items: list[ConversationItem] = []
        #: Memory of all items, and the number of their parts: each as it was counted last.
        self.size_bytes = self.parts = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ConversationItem]:
        return iter(self._items)

    @property
    def last_id(self) -> str | None:
        """The id of the last item; None without any."""
        return self._items[-1].item_id if self._items else None

    def find(self, item_id: str) -> ConversationItem:
        """The item with this id. Raise InvalidRequestError if there is none."""
        for item in self._items:
            if item.item_id == item_id:
                return item
        raise InvalidRequestError(f"there is no item {item_id!r} in this conversation", 404)

    def has(self, item_id: str) -> bool:
        """Whether there is an item with this id."""
        return any(item.item_id == item_id for item in self._items)

    def place_after(self, previous: str | None) -> int:
        """Where an item is to be put: ``previous`` None: at the end, ``root``: at the beginning.

        Raise InvalidRequestError if there is no such item.
        """
        if previous is None:
            return len(self._items)
        return 0 if previous == "root" else self._items.index(self.find(previous)) + 1

    def add(self, item: ConversationItem, place: int) -> str | None:
        """Put an item in; return the id of the one before it."""
        self._items.insert(place, item)
        self._count(item)
        return self._items[place - 1].item_id if place else None

    def remove(self, item_id: str) -> None:
        """Take an item out. Raise InvalidRequestError if there is none."""
        item = self.find(item_id)
        self._items.remove(item)
        self._forget(item)

    def make_room(self, size_bytes: int, *, truncates: bool, parts: int = 1) -> list[str]:
        """Take the oldest items out until one of this size has room, if ``truncates``; return their ids.

        Raise OverloadedError if there is none.
        """
        bounds = self._bounds
        removed: list[str] = []
        if size_bytes + _ITEM_BYTES > bounds.max_item_bytes or parts > bounds.max_parts:
            most_mib = bounds.max_item_bytes / (1 << 20)
            raise InvalidRequestError(
                f"this item is too large: a conversation holds {most_mib:g} MiB and {bounds.max_parts} parts", 413
            )
        while (
            len(self._items) >= bounds.max_items
            or self.size_bytes + size_bytes + _ITEM_BYTES > bounds.max_item_bytes
            or self.parts + parts > bounds.max_parts
        ):
            if not truncates:
                raise OverloadedError(
                    "this conversation is full: delete items, or let the oldest go with 'truncation': 'auto'"
                )
            oldest = self._items.pop(0)
            self._forget(oldest)
            removed.append(oldest.item_id)
        return removed

    def recount(self, item: ConversationItem) -> None:
        """Note that an item has changed; nothing if it has been taken out."""
        if item.counted_bytes:
            self._forget(item)
            self._count(item)

    def _count(self, item: ConversationItem) -> None:
        # Kept, so that one change costs one item: all of them may have thousands of parts.
        item.counted_bytes, item.counted_parts = item.size_bytes, max(1, len(item.content))
        self.size_bytes += item.counted_bytes
        self.parts += item.counted_parts

    def _forget(self, item: ConversationItem) -> None:
        self.size_bytes -= item.counted_bytes
        self.parts -= item.counted_parts
        item.counted_bytes = item.counted_parts = 0


def messages_of(items: Sequence[ConversationItem], instructions: str, *, truncates: bool) -> list[dict[str, Any]]:
    """What the first stage gets of items: the last ones that fit into one request.

    Raise InvalidRequestError if there is nothing to answer, or without ``truncates`` if not all fit.
    """
    kept: list[dict[str, Any]] = []
    length, sound_ms, sounds, pictures = len(instructions), 0, 0, 0
    for item in reversed(items):
        length += item.length
        sound_ms += sum(part.sound_ms for part in item.content if part.kind == "input_audio")
        sounds += sum(part.kind == "input_audio" for part in item.content)
        pictures += sum(part.kind == "input_image" for part in item.content)
        if length > _MOST_BYTES or sound_ms > _MOST_SOUND_MS or sounds > MAX_SOUNDS or pictures > MAX_PICTURES:
            if not truncates or not kept:
                raise InvalidRequestError(
                    "the conversation is too long for one request: delete items, or let the oldest be left out with "
                    f"'truncation': 'auto'. Up to {MAX_SOUNDS} sounds of {_MOST_SOUND_MS // 1000} s together, "
                    f"{MAX_PICTURES} pictures and {_MOST_BYTES} bytes are read"
                )
            break
        message = item.message()
        if message is None:
            continue
        if kept and item.kind == "function_call" and "tool_calls" in kept[0]:
            # The calls of one answer, as chat templates know them.
            kept[0]["tool_calls"] = message["tool_calls"] + kept[0]["tool_calls"]
        else:
            kept.insert(0, message)
    # What a tool has said is nothing without its call.
    while kept and kept[0]["role"] == "tool":
        del kept[0]
    if instructions.strip():
        kept.insert(0, {"role": "system", "content": instructions})
    if not kept:
        raise InvalidRequestError("there is nothing to answer: say something, or create an item, before a response")
    check_messages(kept)
    return kept


def read_item(asked: NewItem, item_id: str) -> tuple[ConversationItem, list[tuple[Content, bytes]]]:
    """The item that a client has made, and for each of its sounds the samples. Raise InvalidRequestError."""
    match asked:
        case NewCall():
            call_id = asked.call_id or item_id
            return ConversationItem(
                item_id, "function_call", call_id=call_id, name=asked.name, value=asked.arguments
            ), []
        case NewCallOutput():
            return ConversationItem(item_id, "function_call_output", call_id=asked.call_id, value=asked.output), []
        case NewMessage():
            item = ConversationItem(item_id, "message", asked.role)
            sounds: list[tuple[Content, bytes]] = []
            for place, part in enumerate(asked.content):
                made, samples = _read_part(asked.role, part, f"item.content[{place}]")
                item.content.append(made)
                if samples:
                    sounds.append((made, samples))
            if len(sounds) > MAX_SOUNDS:
                raise InvalidRequestError(f"item.content: {len(sounds)} sounds; one request has at most {MAX_SOUNDS}")
            return item, sounds


#: The kinds of parts of each role; OpenAI's beta has other names for the last.
_KINDS: Final = {
    "system": {"input_text"},
    "user": {"input_text", "input_audio", "input_image"},
    "assistant": {"output_text", "output_audio"},
}
_BETA: Final = {"text": "output_text", "audio": "output_audio"}


def _read_part(role: str, part: MessagePart, where: str) -> tuple[Content, bytes]:
    kind = _BETA.get(part.type, part.type)
    if kind not in _KINDS[role]:
        raise InvalidRequestError(f"{where}: a message of role {role!r} has {', '.join(sorted(_KINDS[role]))}")
    if kind == "input_audio":
        samples = read_samples(part.audio or "", f"{where}.audio")
        if len(samples) < LEAST_SOUND_MS * BYTES_PER_MS:
            raise InvalidRequestError(f"{where}.audio: a sound has at least {LEAST_SOUND_MS} ms")
        return Content(kind, part.transcript or "", sound_ms=len(samples) // BYTES_PER_MS), samples
    if kind == "input_image":
        made = Content(kind, image_url=part.image_url or "")
        try:
            check_messages([{"role": "user", "content": [_message_part(made)]}])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}.image_url: {error}") from error
        return made, b""
    if kind == "output_audio" and part.audio is not None:
        raise InvalidRequestError(f"{where}: the sound of earlier answers is not kept; send its 'transcript' alone")
    text = part.transcript if kind == "output_audio" else part.text
    if text is None:
        raise InvalidRequestError(f"{where} has no '{'transcript' if kind == 'output_audio' else 'text'}'")
    return Content(kind, text), b""


def read_samples(encoded: str, where: str) -> bytes:
    """16-bit samples from base64. Raise InvalidRequestError."""
    try:
        samples = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"'{where}' is no base64: {error}") from error
    if not samples or len(samples) % 2:
        raise InvalidRequestError(f"'{where}' holds {len(samples)} bytes: send samples of 16 bits each")
    return samples
