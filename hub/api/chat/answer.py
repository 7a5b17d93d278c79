"""The answer to a chat completion, whole or as server-sent events, in the shapes of OpenAI's clients."""

from __future__ import annotations

import base64
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hub.api.audio.encoder import SoundFile
from hub.api.generation.body import AnswerSize, encode_body, encode_event
from hub.api.generation.running import event_of
from hub.api.generation.timings import shown_timings

if TYPE_CHECKING:
    from hub.api.audio.threads import EncoderThreads
    from hub.api.chat.choices import Choice, Choices
    from hub.api.exchange import Exchange
    from hub.api.generation.resumption import Progress
    from hub.api.generation.usage import Usage
    from hub.request.outputs import OmniOutput
    from omni_discovery.wire import TokenLogprob, TokenLogprobs

#: The parts of a choice that a client may have had: bytes, and marks of what comes once.
_TEXT: Final = "t"
_SOUND: Final = "s"
_PICTURE: Final = "p"
_EXPIRY: Final = "x"
_END: Final = "e"
#: Stands for the words in an event; no name in it is this.
_PLACE: Final = "\x00words\x00"
#: From so many characters on a piece of text goes the long way, which may take a thread.
_LONG_TEXT: Final = 4096

_encode: Final = msgspec.json.Encoder().encode

#: Pieces of base64 can be put together if each is made of whole groups of three bytes. A sample has two.
_GROUP_BYTES: Final = 6

#: The one choice if no requested stage has output, such as a picture for a question without one.
_NOTHING_TO_SHOW = {
    "index": 0,
    "message": {"role": "assistant", "content": None, "refusal": "nothing of what was asked for came out of this"},
    "finish_reason": "stop",
}


class Answer:
    """What whole and streamed answers share. ``sound_format`` is that of the sound in them.

    ``top_logprobs``: how many of the likeliest tokens are shown in the place of each; None for no log probabilities.
    """

    def __init__(
        self,
        exchange: Exchange,
        model: str,
        choices: Choices,
        usage: Usage,
        sounds: EncoderThreads,
        *,
        sound_format: str = "wav",
        top_logprobs: int | None = None,
    ) -> None:
        self.exchange = exchange
        self.top_logprobs = top_logprobs
        self.choices = choices
        self.usage = usage
        #: Seconds by name, from the request's summary.
        self.timings_s: Mapping[str, float] = {}
        #: When the last frame of the answer came from a replica, on ``time.perf_counter``.
        self.received_at_s = 0.0
        self.head: dict[str, Any] = {"id": exchange.request_id, "created": int(time.time()), "model": model}
        self.sounds = sounds
        self.sound_format = sound_format
        #: The sound of each choice that has some, by its index.
        self.files: dict[int, SoundFile] = {}

    def note(self, number: int, output: OmniOutput) -> Choice | None:
        """Take in what an output says of the request with this number; return the choice that it belongs to."""
        self.exchange.note_output(output)
        if output.is_summary:
            self.timings_s = output.timings_s
            return None
        if output.partial_image is not None:
            # There is no place for it in a chat.
            return None
        self.received_at_s = max(self.received_at_s, output.received_at_s)
        choice = self.choices.find(number, output)
        if choice is not None:
            self.usage.add(number, output)
        return choice

    def logprobs(self, output: OmniOutput) -> tuple[TokenLogprobs, ...]:
        """The log probabilities in an output; empty if the client has not asked for them."""
        return () if self.top_logprobs is None else output.logprobs

    async def encoded(self, choice: Choice, output: OmniOutput, *, is_streamed: bool) -> AsyncIterator[bytes]:
        """The bytes of the choice's file of sound that are ready. Raise EngineFailedError."""
        if choice.index not in self.files:
            self.files[choice.index] = SoundFile(self.sound_format, is_streamed=is_streamed)
        async for made in self.sounds.encoded(self.files[choice.index], output.data):
            yield made

    def sound_id(self, choice: Choice) -> str:
        """The name of a choice's sound."""
        return f"audio-{self.exchange.request_id}-{choice.index}"


class WholeAnswer(Answer):
    """Collects the outputs of a request, or of several, into one body. Sound is encoded as it comes."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._size = AnswerSize("'stream': true")
        self._parts: defaultdict[int, _Parts] = defaultdict(_Parts)

    def take(self, output: OmniOutput) -> bool:
        """Add a piece of text of the only request at once; False, and nothing is done, for any other output."""
        if not _is_piece_of_text(output) or not self._size.has_room(len(output.text)):
            return False
        choice = self.note(0, output)
        if choice is not None:
            self._size.add(len(output.text))
            self._parts[choice.index].texts.append(output.text)
        return True

    async def add(self, number: int, output: OmniOutput) -> None:
        """Add one output. Raise EngineFailedError for sound that can't be encoded, or an answer that is too long."""
        choice = self.note(number, output)
        if choice is None:
            return
        is_sound = output.modality == "audio"
        self._size.add(len(output.text) + (0 if is_sound else 4 * len(output.data) // 3))
        kept = self._parts[choice.index]
        kept.texts.append(output.text)
        if places := self.logprobs(output):
            # Kept as they are sent: as objects they would take many times the memory, and the loop's time at the end.
            made = await encode_body(partial(shown_places, places, self.top_logprobs or 0), output.size_bytes)
            self._size.add(len(made))
            kept.logprobs.append(made[1:-1])
        if output.data and is_sound:
            async for piece in self.encoded(choice, output, is_streamed=False):
                # What is encoded is kept as something smaller, and raw samples may be kept as many more.
                size_bytes = self.files[choice.index].size_bytes
                self._size.add(4 * (size_bytes - kept.sound_bytes) // 3)
                kept.sound_bytes = size_bytes
                kept.sound.append(piece)
        elif output.data:
            kept.pictures.append((output.data, output.mime))
        self.choices.note_end(choice, output)

    async def body(self, *, timings: bool = False) -> bytes:
        """The body as JSON, with ``timings_s`` if ``timings``. Raise EngineFailedError."""
        for index, file in self.files.items():
            self._parts[index].sound.append(await self.sounds.finished(file))
        return await encode_body(partial(self._completion, timings), self._size.size_bytes)

    def _completion(self, timings: bool) -> dict[str, Any]:
        choices = [self._shown(choice) for choice in self.choices if choice.index in self._parts]
        more = {"timings_s": shown_timings(self.timings_s)} if timings else {}
        return {
            **self.head,
            "object": "chat.completion",
            "choices": choices or [_NOTHING_TO_SHOW],
            "usage": self.usage.shown(),
            **more,
        }

    def _shown(self, choice: Choice) -> dict[str, Any]:
        parts = self._parts[choice.index]
        text, sound = "".join(parts.texts), b"".join(parts.sound)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if sound:
            # It is not kept for later turns: it expires when it is made.
            audio = {"id": self.sound_id(choice), "data": base64.b64encode(sound).decode()}
            message["content"] = text or None
            message["audio"] = {**audio, "expires_at": self.head["created"], "transcript": text}
        elif parts.pictures:
            message["content"] = [image_part(data, mime) for data, mime in parts.pictures]
        shown: dict[str, Any] = {"index": choice.index, "message": message, "finish_reason": choice.finish_reason}
        if parts.logprobs:
            content = msgspec.Raw(b"".join((b"[", b",".join(parts.logprobs), b"]")))
            shown["logprobs"] = {"content": content, "refusal": None}
        return shown


class _Parts:
    """What is kept of one choice."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.sound: list[bytes] = []
        #: Of the file of sound so far.
        self.sound_bytes = 0
        #: Each with its type.
        self.pictures: list[tuple[bytes, str]] = []
        #: As JSON without its brackets: an entry for each token, several in each piece.
        self.logprobs: list[bytes] = []


class StreamedAnswer(Answer):
    """Turns each output into events and keeps nothing but the state of encoders."""

    def __init__(self, *args: Any, counts_each: bool = False, progress: Progress | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        #: What the client has had; None where the answer is not resumed.
        self._progress = progress
        #: Whether every event has the token counts so far.
        self._counts_each = counts_each
        #: The choices that have sound, by index, and their bytes that wait for others.
        self._rests: dict[int, bytes] = {}
        #: By stage: the choice of its words, and the event that shows some, split where they belong.
        self._templates: dict[int, tuple[Choice, list[bytes]]] = {}

    def take(self, write: Callable[[bytes], bool], output: OmniOutput) -> bool:
        """Write the event of a piece of text that goes on a choice; False, and nothing is done, for any other output.

        As ``events`` makes it, out of the same event for another text; ``write`` may refuse it.
        """
        if not _is_piece_of_text(output) or len(output.text) > _LONG_TEXT:
            return False
        choice, parts = self._templates.get(output.stage_id) or self._template(output)
        event = _encode(output.text).join(parts)
        if choice is None or not write(event):
            return False
        self.exchange.count_piece(event)
        choice.modality = "text"
        self.exchange.note_output(output)
        self.received_at_s = max(self.received_at_s, output.received_at_s)
        self.usage.add(0, output)
        return True

    def _template(self, output: OmniOutput) -> tuple[Choice | None, list[bytes]]:
        """The choice that an output of text goes on, and its event in parts; None if an event holds more than that."""
        if self._counts_each or self.top_logprobs is not None or self._progress is not None:
            return None, []
        choice = self.choices.find(0, output)
        if choice is None or not choice.is_shown:
            return None, []
        words = self._words(choice, _PLACE)
        event = event_of(self._chunk(choice, "text", lambda: words))
        self._templates[output.stage_id] = made = choice, event.split(_encode(_PLACE))
        return made

    async def events(self, number: int, output: OmniOutput) -> AsyncIterator[bytes]:
        """The events of an output of the request with this number. Raise EngineFailedError."""
        choice = self.note(number, output)
        if choice is not None:
            async for event in self._new(choice, output):
                yield event
        ended = self.choices.end_all(number) if output.is_summary else []
        if choice is not None and self.choices.note_end(choice, output):
            ended = [choice]
        for each in ended:
            async for event in self._end(each):
                yield event

    async def _new(self, choice: Choice, output: OmniOutput) -> AsyncIterator[bytes]:
        """The events of what an output holds."""
        if output.data and output.modality == "audio":
            async for event in self._sound(choice, output):
                yield event
        elif output.data:
            data, mime = output.data, output.mime
            if self._progress is not None and not self._progress.pass_whole(choice.index, _PICTURE, data):
                return
            picture = partial(self._chunk, choice, output.modality, lambda: {"content": [image_part(data, mime)]})
            yield await encode_event(picture, len(data))
        elif output.text or self.logprobs(output):
            text = output.text
            if self._progress is not None:
                text = self._progress.pass_text(choice.index, _TEXT, text)
                if not text:
                    return
            words = self._words(choice, text)
            chunk = partial(self._chunk, choice, "text", lambda: words, logprobs=self.logprobs(output))
            yield await encode_event(chunk, output.size_bytes)

    def last(self, *, usage: bool, timings: bool) -> bytes:
        """The last event, with the token counts, the timings or both."""
        more: dict[str, Any] = {"usage": self.usage.shown()} if usage else {}
        if timings:
            more["timings_s"] = shown_timings(self.timings_s)
        more |= self._reached()
        return event_of({**self.head, "object": "chat.completion.chunk", "choices": [], **more})

    def check_end(self) -> None:
        """Raise RetryConflictError if the answer has ended before all that the client had of it."""
        if self._progress is not None:
            self._progress.check_end()

    def _reached(self) -> dict[str, str]:
        return {} if self._progress is None else {"resume": self._progress.shown}

    def _is_new(self, choice: Choice, kind: str) -> bool:
        """Whether the client has not had this mark of a choice."""
        return self._progress is None or self._progress.pass_whole(choice.index, kind, b"\1")

    async def _sound(self, choice: Choice, output: OmniOutput) -> AsyncIterator[bytes]:
        self._rests.setdefault(choice.index, b"")
        if self.sound_format == "wav":
            # As vLLM-Omni sends it: each piece is a file.
            if self._progress is None or self._progress.pass_whole(choice.index, _SOUND, output.data):
                yield await self._heard(choice, output.data)
            return
        async for made in self.encoded(choice, output, is_streamed=True):
            ready = self._rests[choice.index] + made
            whole = len(ready) - len(ready) % _GROUP_BYTES
            self._rests[choice.index] = ready[whole:]
            if fresh := self._not_heard(choice, ready[:whole]):
                yield await self._heard(choice, fresh)

    async def _end(self, choice: Choice) -> AsyncIterator[bytes]:
        """What is left of the sound, when it expires, and why the choice has ended."""
        if choice.index in self._rests:
            rest = self._rests[choice.index]
            if choice.index in self.files:
                rest += await self.sounds.finished(self.files[choice.index])
            if fresh := self._not_heard(choice, rest):
                yield await self._heard(choice, fresh)
            if self._is_new(choice, _EXPIRY):
                # It is not kept for later turns: it expires when it is made.
                expiry = {"audio": {"expires_at": self.head["created"]}}
                last = self._chunk(choice, "audio", lambda: expiry)
                del last["choices"][0]["finish_reason"]
                yield event_of(last)
        if self._is_new(choice, _END):
            yield event_of(self._chunk(choice, choice.modality, dict, finish_reason=choice.finish_reason))

    def _not_heard(self, choice: Choice, data: bytes) -> bytes:
        """What the client has not had of the next bytes of sound. Raise RetryConflictError."""
        return data if self._progress is None or not data else self._progress.pass_on(choice.index, _SOUND, data)

    async def _heard(self, choice: Choice, data: bytes) -> bytes:
        def delta() -> dict[str, Any]:
            return {"audio": {"data": base64.b64encode(data).decode()}}

        return await encode_event(partial(self._chunk, choice, "audio", delta), len(data))

    def _words(self, choice: Choice, text: str) -> dict[str, Any]:
        """Words as text, and as the transcript of the sound that comes with them."""
        speaks = choice.is_spoken and self.choices.expects_sound
        return {"content": text, "audio": {"transcript": text}} if speaks else {"content": text}

    def _chunk(
        self,
        choice: Choice,
        modality: str,
        make_delta: Callable[[], dict[str, Any]],
        *,
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> dict[str, Any]:
        """One event of the stream; its ``modality`` is text, image or audio, as vLLM-Omni has it."""
        delta = make_delta()
        is_first = not choice.is_shown and (self._progress is None or not self._progress.was_begun(choice.index))
        choice.is_shown = True
        if is_first:
            if choice.is_spoken and self.choices.expects_sound:
                delta["audio"] = {"id": self.sound_id(choice), **delta.get("audio", {})}
            delta = {"role": "assistant", **delta}
        shown: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": finish_reason}
        if logprobs:
            shown["logprobs"] = {"content": shown_places(logprobs, self.top_logprobs or 0), "refusal": None}
        more: dict[str, Any] = {"usage": self.usage.shown()} if self._counts_each else {}
        more |= self._reached()
        return {**self.head, "object": "chat.completion.chunk", "modality": modality, "choices": [shown], **more}


def _is_piece_of_text(output: OmniOutput) -> bool:
    """Whether an output is text that goes on, and nothing else."""
    if output.modality != "text" or not output.text:
        return False
    return not (output.data or output.finish_reason or output.segment_end or output.logprobs)


def image_part(data: bytes, mime: str) -> dict[str, Any]:
    """An image as OpenAI's clients expect it: a data URL. A video in the same form, as vLLM's clients send theirs."""
    kind = "video_url" if mime.startswith("video/") else "image_url"
    return {"type": kind, kind: {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def shown_places(places: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """Log probabilities as chats have them: of each token that was drawn, and of the ``top`` likeliest in its place."""
    content = []
    for place in places:
        likeliest = sorted((each for each in place if each.rank <= top), key=lambda each: each.rank)
        content.append({**_token(place[0]), "top_logprobs": [_token(each) for each in likeliest]})
    return content


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode())}
