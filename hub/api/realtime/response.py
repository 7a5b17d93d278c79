"""The events of one response, in OpenAI's order, from the words and the sound that come out of the pipeline. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hub.api.realtime.conversation import BYTES_PER_MS, Content, ConversationItem
from hub.api.realtime.settings import SessionSettings

#: Sound of one event: clients' libraries refuse messages of more than 1 MiB.
_PIECE_BYTES: Final = 48_000


@dataclass(slots=True)
class SpokenResponse:
    """One response, as far as it has come. ``in_conversation``: whether its item is one of the conversation's."""

    response_id: str
    item: ConversationItem
    settings: SessionSettings
    conversation_id: str
    metadata: Mapping[str, str] | None = None
    in_conversation: bool = True
    #: Whether its item has been shown.
    is_shown: bool = False
    #: When its first sound was sent; 0.0: none was.
    began_s: float = 0.0
    status: str = "in_progress"
    usage: Mapping[str, Any] | None = None
    #: Why it has not been completed.
    details: Mapping[str, Any] | None = None
    #: The functions that it calls.
    calls: list[ConversationItem] = field(default_factory=list)
    _content: Content = field(init=False)

    def __post_init__(self) -> None:
        """Make the one part of its item."""
        self._content = Content("output_audio" if self.settings.modality == "audio" else "output_text")

    @property
    def _is_sound(self) -> bool:
        return self.settings.modality == "audio"

    def heard_ms(self, now_s: float) -> int:
        """How much of its sound the client can have played by now."""
        return min(self._content.sound_ms, int(1000 * (now_s - self.began_s))) if self.began_s else 0

    def shown(self) -> dict[str, Any]:
        """The response as clients see it."""
        return {
            "id": self.response_id,
            "object": "realtime.response",
            "conversation_id": self.conversation_id if self.in_conversation else None,
            "status": self.status,
            "status_details": self.details,
            "output": self._output() if self.status != "in_progress" else [],
            "output_modalities": [self.settings.modality],
            "max_output_tokens": self.settings.shown_tokens,
            "audio": {"output": self.settings.shown_output},
            "metadata": self.metadata,
            "usage": self.usage,
        }

    def _output(self) -> list[dict[str, Any]]:
        return [each.shown() for each in ([self.item] if self.is_shown else []) + self.calls]

    def first(self, previous_id: str | None) -> list[dict[str, Any]]:
        """The events before the first delta. ``previous_id``: the item before it in the conversation."""
        self.is_shown = True
        events = [self._event("response.output_item.added", output_index=0, item=self.item.shown())]
        if self.in_conversation:
            events.append(
                {"type": "conversation.item.added", "previous_item_id": previous_id, "item": self.item.shown()}
            )
        self.item.content.append(self._content)
        return [*events, self._of_part("response.content_part.added", part=self._part())]

    def words(self, text: str) -> list[dict[str, Any]]:
        """The events of words."""
        self._content.text += text
        name = "response.output_audio_transcript.delta" if self._is_sound else "response.output_text.delta"
        return [self._of_part(name, delta=text)]

    def sound(self, samples: bytes, now_s: float) -> list[dict[str, Any]]:
        """The events of samples."""
        self.began_s = self.began_s or now_s
        self._content.sound_ms += len(samples) // BYTES_PER_MS
        pieces = (samples[start : start + _PIECE_BYTES] for start in range(0, len(samples), _PIECE_BYTES))
        return [
            self._of_part("response.output_audio.delta", delta=base64.b64encode(piece).decode()) for piece in pieces
        ]

    def end(self, status: str, previous_id: str | None) -> list[dict[str, Any]]:
        """The events after the last delta, but for calls and ``response.done``."""
        self.status = status
        events: list[dict[str, Any]] = []
        if self.is_shown:
            self.item.status = "completed" if status == "completed" else "incomplete"
            if self._is_sound:
                events.append(self._of_part("response.output_audio.done"))
                name, of = "response.output_audio_transcript.done", {"transcript": self._content.text}
            else:
                name, of = "response.output_text.done", {"text": self._content.text}
            events += [self._of_part(name, **of), self._of_part("response.content_part.done", part=self._part())]
            if self.in_conversation:
                done = {"type": "conversation.item.done", "previous_item_id": previous_id, "item": self.item.shown()}
                events.append(done)
            events.append(self._event("response.output_item.done", output_index=0, item=self.item.shown()))
        return events

    def call(self, item: ConversationItem, arguments: str, previous_id: str | None) -> list[dict[str, Any]]:
        """The events of a function that is called: an item of its own, whole at once."""
        index = len(self.calls) + self.is_shown
        self.calls.append(item)
        begun = item.shown()
        item.status, item.value = "completed", arguments
        placed = {"previous_item_id": previous_id}
        where = {"item_id": item.item_id, "output_index": index, "call_id": item.call_id}
        name = "response.function_call_arguments"
        events = [
            self._event("response.output_item.added", output_index=index, item=begun),
            {"type": "conversation.item.added", **placed, "item": begun},
            self._event(f"{name}.delta", **where, delta=arguments),
            self._event(f"{name}.done", **where, name=item.name, arguments=arguments),
            {"type": "conversation.item.done", **placed, "item": item.shown()},
            self._event("response.output_item.done", output_index=index, item=item.shown()),
        ]
        return [each for each in events if self.in_conversation or not each["type"].startswith("conversation.")]

    def done(self) -> dict[str, Any]:
        """The last event. ``usage`` and ``details`` have been set."""
        return {"type": "response.done", "response": self.shown()}

    def _part(self) -> dict[str, Any]:
        if self._is_sound:
            return {"type": "audio", "transcript": self._content.text}
        return {"type": "text", "text": self._content.text}

    def _event(self, name: str, /, **more: Any) -> dict[str, Any]:
        return {"type": name, "response_id": self.response_id, **more}

    def _of_part(self, name: str, **more: Any) -> dict[str, Any]:
        return self._event(name, item_id=self.item.item_id, output_index=0, content_index=0, **more)
