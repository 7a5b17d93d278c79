"""RealtimeMachine: one session of /v1/realtime. Events of the client and of its response in, actions out. Pure.

The driver carries actions out in their order: it sends events, has sounds encoded, begins and ends responses. At most
one response runs. An event that can't be followed becomes an ``error`` event, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hub.api.errors import describe
from hub.api.realtime.conversation import (
    BYTES_PER_MS,
    LEAST_SOUND_MS,
    Content,
    Conversation,
    ConversationItem,
    memory_of,
    messages_of,
    read_item,
)
from hub.api.realtime.events import (
    BeginResponse,
    EncodeSounds,
    EndResponse,
    EventFailed,
    RealtimeAction,
    RealtimeEvent,
    ResponseEnded,
    SendEvent,
    SoundCame,
    SoundMade,
    SoundsEncoded,
    WordsMade,
)
from hub.api.realtime.listening import Listening, SpeechStarted, SpeechStopped
from hub.api.realtime.response import SpokenResponse
from hub.api.realtime.schema import (
    BufferClear,
    BufferCommit,
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ItemReference,
    ItemRetrieve,
    ItemTruncate,
    NewItem,
    NewMessage,
    ResponseCancel,
    ResponseCreate,
    ResponseFields,
    SessionUpdate,
    TurnDetection,
)
from hub.api.realtime.settings import Abilities, first_settings, for_response, updated
from hub.config import RealtimeBounds
from omni_discovery.errors import InvalidRequestError, OmniError
from omni_discovery.wire import ToolCall


class RealtimeRefusalError(InvalidRequestError):
    """An event comes at the wrong moment; ``code`` is OpenAI's."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _Coming:
    """An item whose sounds are being encoded."""

    item: ConversationItem
    parts: list[Content]
    #: The item behind which it is to be put, see ``Conversation.place_after``.
    previous: str | None
    size_bytes: int
    #: Whether a response follows.
    is_turn: bool = False


class RealtimeMachine:
    """One session. ``name`` makes its ids different from those of others; ``expires_at`` is wall-clock seconds."""

    def __init__(self, name: str, abilities: Abilities, bounds: RealtimeBounds, expires_at: int) -> None:
        self._name, self._abilities, self._bounds, self._expires_at = name, abilities, bounds, expires_at
        self.settings = first_settings(abilities)
        self._listening = Listening(int(1000 * bounds.max_turn_s))
        self.conversation = Conversation(bounds)
        self._response: SpokenResponse | None = None
        self._coming: dict[str, _Coming] = {}
        #: The item that will be made of the speech that has begun.
        self._turn_id = ""
        self._ids = 0

    @property
    def is_responding(self) -> bool:
        """Whether a response is being made."""
        return self._response is not None

    @property
    def size_bytes(self) -> int:
        """The memory of what it keeps, about."""
        coming = sum(each.size_bytes + each.item.size_bytes for each in self._coming.values())
        # The conversation counts the item of a response when it is whole.
        made = 0
        if self._response is not None:
            own = self._response.settings
            made = self._response.item.size_bytes
            # Those of the session, unless it was given its own.
            made += memory_of(own.instructions) if own.instructions is not self.settings.instructions else 0
            made += own.tools.size_bytes if own.tools is not self.settings.tools else 0
        return self._listening.size_bytes + self.conversation.size_bytes + coming + made + self.settings_bytes

    @property
    def settings_bytes(self) -> int:
        """The memory of the session's settings, about."""
        return memory_of(self.settings.instructions) + self.settings.tools.size_bytes

    def begin(self) -> list[RealtimeAction]:
        """What the client gets first."""
        return [self._send({"type": "session.created", "session": self._shown()})]

    def handle(self, event: RealtimeEvent, now_s: float) -> list[RealtimeAction]:
        """Apply one event; return what the driver must do. Nothing is raised."""
        try:
            return self._apply(event, now_s)
        except OmniError as error:
            return [self._failed(error, getattr(event, "event_id", None))]

    def _apply(self, event: RealtimeEvent, now_s: float) -> list[RealtimeAction]:
        match event:
            case SoundCame():
                return self._hear(event, now_s)
            case SoundsEncoded():
                return self._encoded(event)
            case WordsMade() | SoundMade():
                return self._make(event, now_s)
            case ResponseEnded():
                return self._ended(event)
            case EventFailed():
                return [self._failed(event.error, event.event_id)]
            case SessionUpdate():
                return self._update(event)
            case _:
                return self._ask(event, now_s)

    def _ask(self, event: ClientEvent, now_s: float) -> list[RealtimeAction]:
        match event:
            case BufferCommit():
                return self._commit()
            case BufferClear():
                self._listening.clear()
                return [self._send({"type": "input_audio_buffer.cleared"})]
            case ItemCreate():
                return self._create(event)
            case ItemRetrieve():
                item = self.conversation.find(event.item_id)
                return [self._send({"type": "conversation.item.retrieved", "item": item.shown()})]
            case ItemDelete():
                self.conversation.remove(event.item_id)
                return [self._deleted(event.item_id)]
            case ItemTruncate():
                return self._truncate(event)
            case ResponseCreate():
                return self._respond(event.response)
            case ResponseCancel():
                return self._cancel(event, now_s)
        # The sound of an append comes as SoundCame, with what the detector says of it.
        return []

    # ---- the session

    def _update(self, event: SessionUpdate) -> list[RealtimeAction]:
        before = self.settings
        self.settings = updated(before, event.session, self._abilities)
        if (before.turn_detection is None) != (self.settings.turn_detection is None):
            # What was heard before stays; speech that had begun is no longer followed.
            self._listening.forget_speech()
        return [self._send({"type": "session.updated", "session": self._shown()})]

    def _shown(self) -> dict[str, Any]:
        return self.settings.shown(f"sess_{self._name}", self._abilities.model, self._expires_at)

    # ---- sound in

    def _hear(self, event: SoundCame, now_s: float) -> list[RealtimeAction]:
        detection = self.settings.turn_detection
        if detection is None or event.voiced is None:
            if len(event.samples) > self._listening.room_bytes():
                raise RealtimeRefusalError(
                    "the buffer is full: commit it as a turn, or clear it", "input_audio_buffer_full"
                )
            self._listening.add(event.samples)
            return []
        actions: list[RealtimeAction] = []
        for change in self._listening.hear(event.samples, event.voiced, detection):
            match change:
                case SpeechStarted(start_ms):
                    actions += self._speech_started(start_ms, detection, now_s)
                case SpeechStopped(end_ms, samples):
                    stopped = {"audio_end_ms": end_ms, "item_id": self._turn_id}
                    actions.append(self._send({"type": "input_audio_buffer.speech_stopped", **stopped}))
                    actions += self._turn(self._turn_id, samples, is_turn=detection.create_response)
        return actions

    def _speech_started(self, start_ms: int, detection: TurnDetection, now_s: float) -> list[RealtimeAction]:
        self._turn_id = self._new_id("item")
        started = {"audio_start_ms": start_ms, "item_id": self._turn_id}
        actions: list[RealtimeAction] = [self._send({"type": "input_audio_buffer.speech_started", **started})]
        response = self._response
        if response is not None and detection.interrupt_response and response.in_conversation:
            actions += self._interrupt(response, "turn_detected", now_s)
        return actions

    def _commit(self) -> list[RealtimeAction]:
        turn_id = self._turn_id if self._listening.is_speaking else self._new_id("item")
        if self._listening.size_bytes < LEAST_SOUND_MS * BYTES_PER_MS:
            raise RealtimeRefusalError(
                f"the buffer holds {self._listening.size_bytes // BYTES_PER_MS} ms of sound, and a turn has at least"
                f" {LEAST_SOUND_MS}: append more before you commit it",
                "input_audio_buffer_commit_empty",
            )
        return self._turn(turn_id, self._listening.take_all(), is_turn=False)

    def _turn(self, item_id: str, samples: bytes, *, is_turn: bool) -> list[RealtimeAction]:
        """Make samples an item of the user."""
        content = Content("input_audio", sound_ms=len(samples) // BYTES_PER_MS)
        item = ConversationItem(item_id, "message", "user", [content])
        committed = {"previous_item_id": self.conversation.last_id, "item_id": item_id}
        return [
            self._send({"type": "input_audio_buffer.committed", **committed}),
            *self._encode(_Coming(item, [content], None, len(samples), is_turn), [samples]),
        ]

    def _encode(self, coming: _Coming, sounds: Sequence[bytes]) -> list[RealtimeAction]:
        self._coming[coming.item.item_id] = coming
        return [EncodeSounds(coming.item.item_id, sounds)]

    def _encoded(self, event: SoundsEncoded) -> list[RealtimeAction]:
        coming = self._coming.pop(event.item_id)
        for part, (file, sound_format) in zip(coming.parts, event.files, strict=False):
            part.sound, part.sound_format = file, sound_format
        if len(event.files) < len(coming.parts):
            # The driver has said why.
            return []
        actions = self._add(coming.item, coming.previous)
        if coming.is_turn and not self._listening.is_speaking:
            try:
                actions += self._respond(None)
            except OmniError as error:
                actions.append(self._failed(error, None))
        return actions

    # ---- items

    def _create(self, event: ItemCreate) -> list[RealtimeAction]:
        item_id = event.item.id or self._new_id("item")
        if self.conversation.has(item_id) or item_id in self._coming or item_id == self._turn_id:
            raise InvalidRequestError(f"'item.id': there is an item {item_id!r} already")
        item, sounds = read_item(event.item, item_id)
        self.conversation.place_after(event.previous_item_id)
        if not sounds:
            return self._add(item, event.previous_item_id)
        samples = [each for _, each in sounds]
        coming = _Coming(item, [part for part, _ in sounds], event.previous_item_id, sum(map(len, samples)))
        return self._encode(coming, samples)

    def _add(self, item: ConversationItem, previous: str | None) -> list[RealtimeAction]:
        """Put an item into the conversation, from which the oldest may have to go for it."""
        removed = self.conversation.make_room(
            item.size_bytes, truncates=self.settings.truncates, parts=len(item.content)
        )
        place = self.conversation.place_after(None if previous in removed else previous)
        before = self.conversation.add(item, place)
        more = {"previous_item_id": before, "item": item.shown()}
        return [
            *(self._deleted(each) for each in removed),
            self._send({"type": "conversation.item.added", **more}),
            self._send({"type": "conversation.item.done", **more}),
        ]

    def _deleted(self, item_id: str) -> SendEvent:
        return self._send({"type": "conversation.item.deleted", "item_id": item_id})

    def _truncate(self, event: ItemTruncate) -> list[RealtimeAction]:
        item = self.conversation.find(event.item_id)
        parts = item.content if item.role == "assistant" else []
        content = parts[event.content_index] if event.content_index < len(parts) else None
        if content is None or content.kind != "output_audio":
            raise InvalidRequestError("only the sound of an answer can be truncated, and this item has none there")
        if self._response is not None and item is self._response.item:
            raise InvalidRequestError("this item is still being made: send 'response.cancel' first")
        if event.audio_end_ms > content.sound_ms:
            raise InvalidRequestError(
                f"'audio_end_ms' is {event.audio_end_ms}, and the sound of this item has {content.sound_ms} ms"
            )
        return [self._cut(item, content, event.content_index, event.audio_end_ms, is_whole=True)]

    def _cut(self, item: ConversationItem, content: Content, index: int, end_ms: int, *, is_whole: bool) -> SendEvent:
        content.cut(end_ms, is_whole=is_whole)
        self.conversation.recount(item)
        what = {"item_id": item.item_id, "content_index": index, "audio_end_ms": end_ms}
        return self._send({"type": "conversation.item.truncated", **what})

    # ---- responses

    def _respond(self, asked: ResponseFields | None) -> list[RealtimeAction]:
        if self._response is not None:
            raise RealtimeRefusalError(
                f"the response {self._response.response_id} is being made: wait for its 'response.done', or cancel it",
                "conversation_already_has_active_response",
            )
        asked = asked or ResponseFields()
        settings = for_response(self.settings, asked, self._abilities)
        items = list(self.conversation) if asked.input is None else self._input(asked.input)
        messages = messages_of(items, settings.instructions, truncates=settings.truncates)
        response = SpokenResponse(
            self._new_id("resp"),
            ConversationItem(self._new_id("item"), "message", "assistant", status="in_progress"),
            settings,
            f"conv_{self._name}",
            asked.metadata,
            asked.conversation != "none",
        )
        self._response = response
        given_bytes = sum(item.counted_bytes for item in items) + settings.tools.size_bytes
        return [
            self._send({"type": "response.created", "response": response.shown()}),
            BeginResponse(response.response_id, messages, settings, given_bytes),
        ]

    def _input(self, given: Sequence[NewItem | ItemReference]) -> list[ConversationItem]:
        """The items that a response is given in place of the conversation."""
        items = []
        kept = {item.item_id: item for item in self.conversation}
        parts = 0
        for each in given:
            named = (kept.get(each.id) or self.conversation.find(each.id)) if isinstance(each, ItemReference) else each
            parts += len(named.content) if isinstance(named, ConversationItem | NewMessage) else 1
            if parts > self._bounds.max_parts:
                raise InvalidRequestError(f"'response.input': it has more than {self._bounds.max_parts} parts")
            if isinstance(named, ConversationItem):
                items.append(named)
                continue
            item, sounds = read_item(named, named.id or self._new_id("item"))
            if sounds:
                raise InvalidRequestError(
                    "'response.input': give sound by 'conversation.item.create', and name that item here"
                )
            items.append(item)
        return items

    def _make(self, event: WordsMade | SoundMade, now_s: float) -> list[RealtimeAction]:
        response = self._response
        if response is None or response.response_id != event.response_id:
            return []
        actions = [] if response.is_shown else self._show(response)
        if isinstance(event, WordsMade):
            made = response.words(event.text)
        elif response.settings.modality == "audio":
            made = response.sound(event.samples, now_s)
        else:
            made = []
        return [*actions, *map(self._send, made)]

    def _show(self, response: SpokenResponse) -> list[RealtimeAction]:
        before, actions = None, list[RealtimeAction]()
        if response.in_conversation:
            removed = self.conversation.make_room(0, truncates=True)
            actions += [self._deleted(each) for each in removed]
            before = self.conversation.add(response.item, len(self.conversation))
        return [*actions, *map(self._send, response.first(before))]

    def _ended(self, event: ResponseEnded) -> list[RealtimeAction]:
        response = self._response
        if response is None or response.response_id != event.response_id:
            return []
        response.usage = event.usage
        status = "completed"
        if event.error is not None:
            status = "failed"
            error = describe(event.error)[1]["error"]
            why = {"type": error["type"], "code": error["code"], "message": error["message"]}
            response.details = {"type": status, "error": why}
        elif event.is_cut:
            status = "incomplete"
            response.details = {"type": status, "reason": "max_output_tokens"}
        return self._finish(response, status, event.calls)

    def _cancel(self, event: ResponseCancel, now_s: float) -> list[RealtimeAction]:
        response = self._response
        if response is None or (event.response_id or response.response_id) != response.response_id:
            raise RealtimeRefusalError("there is no such response that is being made", "response_cancel_not_active")
        return self._interrupt(response, "client_cancelled", now_s)

    def _interrupt(self, response: SpokenResponse, reason: str, now_s: float) -> list[RealtimeAction]:
        response.details = {"type": "cancelled", "reason": reason}
        actions = [EndResponse(response.response_id), *self._finish(response, "cancelled")]
        content = response.item.content[0] if response.item.content else None
        if reason == "turn_detected" and content is not None and content.kind == "output_audio":
            heard_ms = response.heard_ms(now_s)
            actions.append(self._cut(response.item, content, 0, heard_ms, is_whole=False))
        return actions

    def _finish(self, response: SpokenResponse, status: str, calls: Sequence[ToolCall] = ()) -> list[RealtimeAction]:
        self._response = None
        self.conversation.recount(response.item)
        actions: list[RealtimeAction] = [*map(self._send, response.end(status, self._before(response.item)))]
        for call in calls:
            actions += self._call(response, call)
        return [*actions, self._send(response.done())]

    def _call(self, response: SpokenResponse, call: ToolCall) -> list[RealtimeAction]:
        item = ConversationItem(
            self._new_id("item"), "function_call", status="in_progress", call_id=self._new_id("call"), name=call.name
        )
        before, removed = None, list[str]()
        if response.in_conversation:
            removed = self.conversation.make_room(0, truncates=True)
            before = self.conversation.add(item, len(self.conversation))
        events = response.call(item, call.arguments, before)
        self.conversation.recount(item)
        return [*map(self._deleted, removed), *map(self._send, events)]

    def _before(self, item: ConversationItem) -> str | None:
        before: str | None = None
        for each in self.conversation:
            if each is item:
                return before
            before = each.item_id
        return None

    # ---- events

    def _failed(self, error: OmniError, event_id: str | None) -> SendEvent:
        shown = dict(describe(error)[1]["error"])
        if isinstance(error, RealtimeRefusalError):
            shown["code"] = error.code
        return self._send({"type": "error", "error": {**shown, "event_id": event_id}})

    def _send(self, event: Mapping[str, Any]) -> SendEvent:
        return SendEvent({"event_id": self._new_id("event"), **event})

    def _new_id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}_{self._name}_{self._ids}"
