"""The endpoint of /v1/realtime: one WebSocket, its RealtimeMachine, and the requests that its responses are.

One task reads events and one sends them, so that a client that leaves is noticed at once. A third makes the response.
What waits to be sent is bounded: while it is too much, neither events are read nor outputs taken, and the replica of
the response is paused.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections import deque
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.websockets import WebSocketDisconnect

from hub.api.audio.encoder import SoundFile
from hub.api.chat.choices import Choices
from hub.api.chat.schema import ChatRequest, ChatSound, chat_params
from hub.api.door.guard import still_opens
from hub.api.errors import NotServedError, UnauthorizedError, describe, error_response
from hub.api.exchange import exchange_of
from hub.api.generation.fields import check_model
from hub.api.generation.usage import Usage
from hub.api.long_bodies import long_body, long_work
from hub.api.protocols import input_wait_of
from hub.api.realtime.beta import BETA_HEADER, BETA_SUBPROTOCOL, as_beta
from hub.api.realtime.conversation import memory_of, read_samples
from hub.api.realtime.detector import VoiceDetector, detector_missing
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
from hub.api.realtime.machine import RealtimeMachine
from hub.api.realtime.memory import SoundMemory
from hub.api.realtime.schema import BufferAppend, ItemCreate, ResponseCreate, SessionUpdate, id_of, parse_event
from hub.api.realtime.settings import Abilities
from hub.api.realtime.tools import tools_missing
from hub.orchestrator.tracing import trace_headers
from omni_discovery.errors import InputTimeoutError, OmniError, OverloadedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.websockets import WebSocket

    from hub.api.audio.threads import EncoderThreads
    from hub.async_omni import AsyncOmni
    from hub.request.outputs import OmniOutput
    from omni_discovery.deploy.document import DeployConfig
    from omni_discovery.wire import ToolAnswer, ToolCall

logger = logging.getLogger(__name__)

#: The subprotocol that clients in browsers name, beside others.
_SUBPROTOCOL: Final = "realtime"
#: Events and bytes that may wait to be sent before nothing more is read or made.
_MOST_WAITING: Final = 256
_MOST_WAITING_BYTES: Final = 1 << 20
#: Words of one response, in UTF-8. Its last events show them whole, and clients' libraries refuse more than 1 MiB.
_MOST_WORDS_BYTES: Final = 1_000_000
#: The time between the beginnings of two responses: a short event may have much read, and sent to replicas. It is
#: longer, up to a bound, the more the first has of the conversation.
_LEAST_BETWEEN_S, _MOST_BETWEEN_S = 0.05, 0.75
_KEPT_BYTES_PER_S: Final = 4_000_000
#: How much of a session's events are shown again to it, such as items: a short event may ask for megabytes. Until then
#: no further event is read; what is shown within the least time between two responses costs nothing.
_SHOWN_BYTES_PER_S: Final = 4_000_000
#: A session's settings are checked and shown whole on the loop each time they are changed, those of one response each
#: time: the time until they may be changed or given again is longer, up to the same bound, the larger they are.
_SETTINGS_BYTES_PER_S: Final = 1_000_000
#: WebSocket close codes: normal, policy violation, internal error.
_OK, _REFUSED, _FAILURE = 1000, 1008, 1011
#: How long the last events may take to be sent to a client that does not read.
_CLOSE_S: Final = 5.0
#: The format of a client's turns, as stages get them.
_TURN_FORMAT: Final = "opus"


class Realtime:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig, sounds: EncoderThreads) -> None:
        self.omni, self.deploy, self.sounds = omni, deploy, sounds
        self.memory = SoundMemory(omni.realtime_bounds.max_memory_bytes)
        made = {stage.final_output for stage in deploy.stages}
        self.made = tuple(each for each in ("text", "audio") if each in made)
        missing = detector_missing(), tools_missing(deploy)
        self.abilities = Abilities(deploy.served_name, "audio" in made, "text" in made, *missing)

    async def respond(self, websocket: WebSocket) -> None:
        """Serve one connection."""
        exchange = exchange_of(websocket.scope)
        exchange.request_id = f"realtime-{exchange.request_id}"
        try:
            with self.omni.rejections.counted():
                self._check(websocket)
        except OmniError as error:
            self.note_refusal("session", describe(error)[1]["error"]["code"])
            await websocket.send_denial_response(error_response(error))
            return
        await websocket.accept(_SUBPROTOCOL if _SUBPROTOCOL in _subprotocols(websocket) else None)
        with self.omni.hub_metrics.realtime_sessions.track_inprogress():
            await _Connection(self, websocket).run()

    def note_refusal(self, kind: str, code: str) -> None:
        """Count what is refused: a ``session``, or an ``event`` of one."""
        self.omni.hub_metrics.realtime_refusals.labels(kind, code).inc()

    def _check(self, websocket: WebSocket) -> None:
        """Raise InvalidRequestError for a session that is not served here."""
        asked = websocket.query_params
        check_model(asked.get("model", ""), self.abilities.model)
        if "call_id" in asked or asked.get("intent", "conversation") != "conversation":
            raise NotServedError("transcriptions and calls are not served here: leave 'intent' and 'call_id' out")
        if not self.made:
            raise NotServedError("this pipeline puts out neither text nor sound, which is what a session is made of")


def _subprotocols(websocket: WebSocket) -> Sequence[str]:
    return websocket.scope.get("subprotocols") or ()


def _is_beta(websocket: WebSocket) -> bool:
    return BETA_HEADER in websocket.headers.get("openai-beta", "") or BETA_SUBPROTOCOL in _subprotocols(websocket)


class _Connection:
    """One session."""

    def __init__(self, realtime: Realtime, websocket: WebSocket) -> None:
        self._realtime, self._omni, self._websocket = realtime, realtime.omni, websocket
        self._bounds = realtime.omni.realtime_bounds
        self._exchange = exchange_of(websocket.scope)
        name = self._exchange.request_id.rpartition("-")[2][:16]
        expires_at = int(time.time() + self._bounds.max_session_s)
        self._machine = RealtimeMachine(name, realtime.abilities, self._bounds, expires_at)
        self._detector = None if realtime.abilities.no_detection else VoiceDetector(realtime.sounds)
        self._outbox = _Outbox(websocket, self._note_memory)
        self._input_wait = input_wait_of(websocket.scope)
        #: Before this moment no response begins; before the second, no settings are taken; before the third, no event.
        self._next_s = self._next_update_s = self._next_event_s = 0.0
        #: Words of the response that runs which may turn out to be a call, in bytes.
        self._held_bytes = 0
        #: Makes the response that runs, and ends it.
        self._making: asyncio.Task[None] | None = None
        #: Responses that were ended, until their stages have been told.
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve the session to its end."""
        sending = asyncio.create_task(self._outbox.run(), name="RealtimeSender")
        try:
            await self._close(sending, await self._serve(sending))
        finally:
            sending.cancel()
            self._realtime.memory.release(self)

    async def _serve(self, sending: asyncio.Task[None]) -> int:
        """Serve until something ends the session; return the code to close with."""
        reading = asyncio.create_task(self._read(), name="RealtimeReader")
        try:
            async with asyncio.timeout(self._bounds.max_session_s):
                await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            text = f"this session has lasted {self._bounds.max_session_s:g} s, the longest that one may: open another"
            self._put(EventFailed(InputTimeoutError(text)))
        finally:
            ends = await self._stop(reading)
        return self._code_of(next((end for end in ends if isinstance(end, Exception)), None))

    def _code_of(self, failure: Exception | None) -> int:
        """The code to close with; what has ended the session is told before, if it is the client's to know."""
        if isinstance(failure, OmniError):
            self._put(EventFailed(failure))
            return _REFUSED if isinstance(failure, UnauthorizedError) else _OK
        if failure is None or isinstance(failure, WebSocketDisconnect):
            return _OK
        logger.error("realtime.bug request=%s", self._exchange.request_id, exc_info=failure)
        return _FAILURE

    async def _stop(self, reading: asyncio.Task[None]) -> list[Any]:
        tasks = [reading, *self._ending, *([self._making] if self._making is not None else [])]
        for task in tasks:
            task.cancel()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    async def _close(self, sending: asyncio.Task[None], code: int) -> None:
        """Send what still waits, and close, within 5 s: the client may not read any more."""
        self._outbox.end()
        with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(_CLOSE_S):
                await sending
                await self._websocket.close(code)

    # ---- events of the client

    async def _read(self) -> None:
        self._put_all(self._machine.begin())
        while True:
            await self._outbox.room()
            await self._rest()
            if self._input_wait is not None and not self._machine.is_responding:
                self._input_wait(True)
            message = await self._next_message()
            if message["type"] == "websocket.disconnect":
                return
            if not still_opens(self._websocket.scope):
                raise UnauthorizedError(is_missing=False)
            # Not kept while the next one is waited for.
            await self._take(message.pop("text", None))

    async def _next_message(self) -> dict[str, Any]:
        """The next message. Raise InputTimeoutError if there is none for too long, and nothing is being made."""
        waiting = asyncio.ensure_future(self._websocket.receive())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=self._bounds.idle_timeout_s)
                if done:
                    return dict(waiting.result())
                if not self._machine.is_responding:
                    text = f"no event came within {self._bounds.idle_timeout_s:g} s: the session ends"
                    raise InputTimeoutError(text)
        finally:
            waiting.cancel()

    async def _take(self, text: str | None) -> None:
        with ExitStack() as stack:
            try:
                with self._omni.rejections.counted():
                    await long_body(self._websocket.scope, len(text or ""))
                    event = parse_event(text)
                    if isinstance(event, BufferAppend | ItemCreate | SessionUpdate | ResponseCreate):
                        # Until it is held: other sessions' events are taken while this one waits.
                        stack.enter_context(self._realtime.memory.room_for(memory_of(text or "")))
            except RequestError as error:
                self._put(EventFailed(error, id_of(text)))
                return
            if isinstance(event, BufferAppend):
                await self._hear(event)
            else:
                if isinstance(event, SessionUpdate | ResponseCreate):
                    await asyncio.sleep(self._next_update_s - time.monotonic())
                    kept_bytes = self._machine.settings_bytes if isinstance(event, SessionUpdate) else 0
                    self._note_settings(memory_of(text or "") + kept_bytes)
                self._note_shown(await self._perform(event))
            self._note_memory()

    def _note_memory(self) -> None:
        size_bytes = self._machine.size_bytes + self._held_bytes + self._outbox.size_bytes
        self._realtime.memory.hold(self, size_bytes)

    async def _hear(self, event: BufferAppend) -> None:
        """Take sound in."""
        detection = self._machine.settings.turn_detection
        try:
            with self._omni.rejections.counted():
                samples = read_samples(event.audio, "audio")
                voiced = None
                if detection is not None and self._detector is not None:
                    voiced = await self._detector.voiced(samples, detection.threshold)
                elif self._detector is not None:
                    self._detector.reset()
        except OmniError as error:
            self._put(EventFailed(error, event.event_id))
            return
        self._note_shown(await self._perform(SoundCame(samples, voiced, event.event_id)))

    # ---- actions of the machine

    def _put(self, event: RealtimeEvent) -> None:
        """Apply an event that does nothing but send others."""
        self._put_all(self._machine.handle(event, time.monotonic()))

    def _put_all(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, SendEvent):
                self._send(action.event)

    def _send(self, event: Mapping[str, Any]) -> int:
        if event["type"] == "error":
            self._realtime.note_refusal("event", event["error"]["code"])
        return self._outbox.put(event)

    async def _perform(self, event: RealtimeEvent) -> int:
        """Apply an event, and carry out what follows; return how many bytes that shows."""
        is_asked = isinstance(event, ResponseCreate)
        if is_asked:
            # Also one that fails has the conversation read.
            await self._pause()
        if isinstance(event, ResponseCreate | SoundsEncoded):
            try:
                with self._omni.rejections.counted():
                    # A few bytes have all of the conversation read: in turns, as if it came anew.
                    await long_work(self._websocket.scope)
            except OverloadedError as error:
                self._put(EventFailed(error, getattr(event, "event_id", None)))
                if isinstance(event, ResponseCreate):
                    return 0
                # Without its sounds an item is given up.
                event = SoundsEncoded(event.item_id, [])
        return await self._carry_out(self._machine.handle(event, time.monotonic()), is_asked=is_asked)

    async def _carry_out(self, actions: Sequence[RealtimeAction], *, is_asked: bool) -> int:
        """Carry out actions, of a client who asked for a response or not; return how many bytes that shows."""
        shown_bytes = 0
        for action in actions:
            match action:
                case SendEvent():
                    shown_bytes += self._send(action.event)
                case EncodeSounds():
                    shown_bytes += await self._encode(action)
                case BeginResponse():
                    if self._input_wait is not None:
                        self._input_wait(False)
                    if not is_asked:
                        await self._pause()
                    between_s = max(_LEAST_BETWEEN_S, action.kept_bytes / _KEPT_BYTES_PER_S)
                    self._next_s = time.monotonic() + min(between_s, _MOST_BETWEEN_S)
                    self._making = asyncio.create_task(self._respond(action), name="RealtimeResponse")
                case EndResponse():
                    self._end_response()
        return shown_bytes

    async def _pause(self) -> None:
        """Wait until a response may be asked for."""
        await asyncio.sleep(self._next_s - time.monotonic())
        self._next_s = time.monotonic() + _LEAST_BETWEEN_S

    def _note_settings(self, size_bytes: int) -> None:
        """Settings of so many bytes are being looked through."""
        between_s = size_bytes / _SETTINGS_BYTES_PER_S
        self._next_update_s = time.monotonic() + min(max(_LEAST_BETWEEN_S, between_s), _MOST_BETWEEN_S)

    def _note_shown(self, shown_bytes: int) -> None:
        """An event of the client has shown so many bytes."""
        now_s = time.monotonic()
        next_s = max(self._next_event_s, now_s) + shown_bytes / _SHOWN_BYTES_PER_S
        self._next_event_s = min(next_s, now_s + _MOST_BETWEEN_S)

    async def _rest(self) -> None:
        """Wait until an event may be read."""
        ahead_s = self._next_event_s - time.monotonic()
        if ahead_s > _LEAST_BETWEEN_S:
            await asyncio.sleep(ahead_s)

    async def _encode(self, action: EncodeSounds) -> int:
        files: list[tuple[str, str]] = []
        try:
            for samples in action.sounds:
                file = await self._realtime.sounds.speech_file(samples)
                files.append((base64.b64encode(file).decode(), _TURN_FORMAT))
        except OmniError as error:
            self._put(EventFailed(error))
        return await self._perform(SoundsEncoded(action.item_id, files))

    def _end_response(self) -> None:
        making, self._making = self._making, None
        if making is not None:
            # Its generator aborts the stages when it is closed.
            making.cancel()
            self._ending.add(making)
            making.add_done_callback(self._ending.discard)

    # ---- the response

    async def _respond(self, begin: BeginResponse) -> None:
        """Ask the pipeline, and turn its outputs into events."""
        made = _Made(self._realtime, begin)
        try:
            await self._make(begin, made)
        except OmniError as error:
            self._exchange.note_error(error)
            await self._perform(ResponseEnded(begin.response_id, made.shown_usage(), error=error))
        except Exception as error:
            logger.exception("realtime.bug request=%s", self._exchange.request_id)
            bug = RequestError(f"an internal error: {type(error).__name__}")
            await self._perform(ResponseEnded(begin.response_id, made.shown_usage(), error=bug))
        self._held_bytes = 0
        if self._input_wait is not None and not self._machine.is_responding:
            self._input_wait(True)

    async def _make(self, begin: BeginResponse, made: _Made) -> None:
        with self._omni.rejections.counted():
            chat = made.chat()
            params = chat_params(self._realtime.deploy, chat)
        exchange, headers = self._exchange, self._websocket.headers
        outputs = self._omni.generate(
            {"messages": begin.messages, **made.tools},
            request_id=f"{exchange.request_id}-{begin.response_id.rpartition('_')[2]}",
            label=exchange.label,
            key=exchange.key,
            client=exchange.client,
            modalities=chat.modalities,
            params=params,
            received_s=time.perf_counter(),
            # What calls a function is not to be said, which is known when it is whole.
            async_chunk=False if made.tools else None,
            trace_headers=trace_headers(headers),
        )
        async with aclosing(outputs):
            async for output in outputs:
                exchange.note_output(output)
                await self._show(begin.response_id, output, made)
                if made.is_full:
                    text = "realtime.words_cut request=%s replicas=%s most_bytes=%d"
                    logger.warning(text, exchange.request_id, exchange.replicas, _MOST_WORDS_BYTES)
                    break
        if rest := await self._realtime.sounds.finished(made.sound):
            await self._perform(SoundMade(begin.response_id, rest))
        is_cut = made.is_cut or made.is_full
        await self._perform(ResponseEnded(begin.response_id, made.shown_usage(), is_cut, calls=made.calls))

    async def _show(self, response_id: str, output: OmniOutput, made: _Made) -> None:
        if not made.takes(output):
            return
        await self._outbox.room()
        words, self._held_bytes = made.words_of(output), made.held_bytes
        if words:
            await self._perform(WordsMade(response_id, words))
        self._note_memory()
        if output.data:
            async for samples in self._realtime.sounds.encoded(made.sound, output.data):
                if samples:
                    await self._outbox.room()
                    await self._perform(SoundMade(response_id, samples))


class _Made:
    """What is asked for one response, and what has come of it."""

    def __init__(self, realtime: Realtime, begin: BeginResponse) -> None:
        self._begin = begin
        self._is_sound = begin.settings.modality == "audio"
        self.modalities: list[str] = [each for each in realtime.made if self._is_sound or each == "text"]
        self.sound = SoundFile("pcm16", begin.settings.speed if self._is_sound else 1.0, is_streamed=True)
        self._choices = Choices(self.modalities)
        self._usage = Usage([stage.stage_id for stage in realtime.deploy.stages])
        self.is_cut = False
        self._room_bytes = _MOST_WORDS_BYTES
        #: What may be called, as the first stage gets it; and what is.
        self.tools = begin.settings.tools.inputs()
        self.calls: Sequence[ToolCall] = ()
        #: Words that may turn out to be a call, and their memory.
        self._held: list[str] = []
        self.held_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether more words have come than a response may have."""
        return self._room_bytes < 0

    def chat(self) -> ChatRequest:
        """The same, as a chat would ask it."""
        settings = self._begin.settings
        return ChatRequest(
            messages=self._begin.messages,
            modalities=self.modalities,
            audio=ChatSound(voice=settings.voice, format="pcm16") if self._is_sound else None,
            max_completion_tokens=settings.max_tokens,
            temperature=settings.temperature,
        )

    def takes(self, output: OmniOutput) -> bool:
        """Whether an output is of this response's words or sound."""
        choice = None if output.is_summary else self._choices.find(0, output)
        if choice is None or not choice.is_spoken:
            return False
        self._usage.add(0, output)
        self._choices.note_end(choice, output)
        self.is_cut = choice.finish_reason == "length"
        return True

    def words_of(self, output: OmniOutput) -> str:
        """The words that are shown by an output that it takes, as far as they have room.

        Where tools may be called, all of them come at the end.
        """
        words = self._within(output.text)
        if not self.tools:
            return words
        self._held.append(words)
        self.held_bytes += memory_of(words)
        is_whole = output.finish_reason is not None and output.modality == "text"
        if not (is_whole or self.is_full):
            return ""
        words, called = "".join(self._held), output.called
        self._held.clear()
        self.held_bytes = 0
        if called is None or self.is_full:
            return words
        if _size_of(called) > _MOST_WORDS_BYTES:
            self._room_bytes = -1
            return words
        self.calls = called.calls
        return called.content

    def _within(self, text: str) -> str:
        words, room_bytes = text.encode(errors="replace"), self._room_bytes
        self._room_bytes -= len(words)
        return words[:room_bytes].decode(errors="ignore") if self.is_full else text

    def shown_usage(self) -> dict[str, Any]:
        """The token counts, as responses have them."""
        counts = self._usage.shown()
        sound = counts.get("completion_tokens_details", {}).get("audio_tokens", 0)
        made = counts["completion_tokens"]
        return {
            "total_tokens": counts["total_tokens"],
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": made,
            "output_token_details": {"text_tokens": made - sound, "audio_tokens": sound},
        }


def _size_of(called: ToolAnswer) -> int:
    texts = [called.content, *(call.name + call.arguments for call in called.calls)]
    return sum(len(text.encode(errors="replace")) for text in texts)


class _Outbox:
    """Events that wait to be sent, in their order; ``changed`` is called when there are more, or fewer."""

    def __init__(self, websocket: WebSocket, changed: Callable[[], None]) -> None:
        self._websocket, self._changed = websocket, changed
        self._is_beta = _is_beta(websocket)
        self._waiting: deque[str] = deque()
        self.size_bytes = 0
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_ended = False

    def put(self, event: Mapping[str, Any]) -> int:
        """Have an event sent; return its bytes."""
        shown = as_beta(event) if self._is_beta else event
        if shown is None:
            return 0
        text = msgspec.json.encode(shown).decode()
        self._waiting.append(text)
        self.size_bytes += len(text)
        self._note()
        return len(text)

    def end(self) -> None:
        """Send what waits, and no more. Idempotent."""
        self._is_ended = True
        self._wake.set()

    async def room(self) -> None:
        """Wait until not too much waits."""
        await self._has_room.wait()

    async def run(self) -> None:
        """Send events until ``end``. Raise WebSocketDisconnect if the client has left."""
        while True:
            while self._waiting:
                text = self._waiting[0]
                await self._websocket.send_text(text)
                self._waiting.popleft()
                self.size_bytes -= len(text)
                del text
                self._note()
            if self._is_ended:
                return
            self._wake.clear()
            await self._wake.wait()

    def _note(self) -> None:
        self._changed()
        self._wake.set()
        if len(self._waiting) < _MOST_WAITING and self.size_bytes < _MOST_WAITING_BYTES:
            self._has_room.set()
        else:
            self._has_room.clear()
