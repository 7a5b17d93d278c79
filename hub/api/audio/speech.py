"""POST /v1/audio/speech: a text in, its sound out: as one file, as a file that is still being made, or as events."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from starlette.responses import Response

from hub.api.audio.encoder import FORMATS, SoundFile, check_sound
from hub.api.errors import describe
from hub.api.generation.body import AnswerSize, decode_body
from hub.api.generation.fields import SamplingFields, Voice, name_of_voice, stage_params, voice_params
from hub.api.generation.running import Ask, Came, CutShortError, Generation, GenerationStream, Route, stale_header
from hub.api.generation.usage import Usage
from omni_discovery.errors import InvalidRequestError, OmniError

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.api.audio.threads import EncoderThreads
    from hub.async_omni import AsyncOmni
    from omni_discovery.deploy.document import DeployConfig

_Word = Annotated[str, msgspec.Meta(max_length=64)]
#: OpenAI's names of formats here: raw samples have another one than in chats.
_NAMES: Final = tuple("pcm" if name == "pcm16" else name for name in FORMATS)


class SpeechRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/audio/speech. ``speaker``, ``language`` and ``task_type`` are vLLM-Omni's."""

    input: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16)]
    voice: _Word | Voice | None = None
    instructions: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    response_format: _Word = "mp3"
    speed: Annotated[float, msgspec.Meta(ge=0.25, le=4)] = 1.0
    #: None: the whole file in one piece.
    stream_format: Literal["audio", "sse"] | None = None
    #: As vLLM-Omni has it: events, unless ``stream_format`` says otherwise.
    stream: bool | None = None
    speaker: _Word | None = None
    language: _Word | None = None
    task_type: _Word | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | None = None

    @property
    def streams(self) -> str | None:
        """How it is streamed: ``audio``, ``sse``, or None."""
        return self.stream_format or ("sse" if self.stream else None)

    @property
    def sound_format(self) -> str:
        """The format, by its name in chats."""
        return "pcm16" if self.response_format == "pcm" else self.response_format


_decoder = msgspec.json.Decoder(SpeechRequest)


def parse_speech(body: bytes) -> SpeechRequest:
    """Read and check a request body. Raise InvalidRequestError that names the field."""
    request = decode_body(_decoder, body)
    if not request.input.strip():
        raise InvalidRequestError("'input' is empty; send the text that is to be said")
    check_sound(request.response_format, "response_format", request.speed, names=_NAMES)
    return request


def speech_params(deploy: DeployConfig, speech: SpeechRequest) -> dict[int, dict[str, Any]]:
    """The parameters of each stage. Raise InvalidRequestError."""
    how = {
        "speaker": speech.speaker or name_of_voice(speech.voice),
        "language": speech.language,
        "instruct": speech.instructions,
        "task_type": speech.task_type,
    }
    more = voice_params(deploy, how)
    longest = {} if speech.max_new_tokens is None else {"max_tokens": speech.max_new_tokens}
    # What is drawn there decides what is said.
    more.setdefault(deploy.stages[0].stage_id, {}).update(speech.text_params() | longest)
    return stage_params(deploy, speech, {}, more)


class Speech:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig, sounds: EncoderThreads) -> None:
        self._route = Route(omni, deploy, "speech")
        self._sounds = sounds

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        return await self._route.answer(request, self._parse, self._answer)

    def _parse(self, body: bytes) -> SpeechRequest:
        if not any(stage.final_output == "audio" for stage in self._route.deploy.stages):
            raise InvalidRequestError("this pipeline makes no sound: no stage of it has final_output: audio")
        return parse_speech(body)

    async def _answer(self, speech: SpeechRequest, came: Came) -> Response:
        with self._route.omni.rejections.counted():
            params = speech_params(self._route.deploy, speech)
        ask = Ask({"messages": [{"role": "user", "content": speech.input}]}, params, ("audio",))
        generation = self._route.generation(came, speech, [ask])
        sound = SoundFile(speech.sound_format, speech.speed, is_streamed=speech.streams is not None)
        usage = Usage([stage.stage_id for stage in self._route.deploy.stages])
        headers, mime = stale_header(self._route.omni), FORMATS[speech.sound_format].mime
        if speech.streams is None:
            body = await self._whole(generation, sound)
            if generation.has_left:
                return generation.left_response
            return Response(body, media_type=mime, headers=headers)
        await generation.begin()
        pieces = self._pieces(generation, sound, usage)
        if speech.streams == "sse":
            return GenerationStream(generation, _events(generation, pieces, usage), "text/event-stream", headers)
        return GenerationStream(generation, _bytes(generation, pieces), mime, headers)

    async def _whole(self, generation: Generation, sound: SoundFile) -> bytes:
        size, pieces = AnswerSize("'stream_format': 'audio'"), []
        try:
            async for _, output in generation:
                generation.exchange.note_output(output)
                if output.data:
                    async for made in self._sounds.encoded(sound, output.data):
                        size.add(sound.size_bytes - size.size_bytes)
                        pieces.append(made)
        finally:
            await generation.close()
        body = b"".join([*pieces, await self._sounds.finished(sound)])
        if not body and not generation.has_left:
            raise InvalidRequestError("no sound came out: the stages before have made nothing of this text", 422)
        return body

    async def _pieces(self, generation: Generation, sound: SoundFile, usage: Usage) -> AsyncIterator[bytes]:
        """The file, as it is made."""
        async for _, output in generation.outputs():
            generation.exchange.note_output(output)
            usage.add(0, output)
            if output.data:
                async for made in self._sounds.encoded(sound, output.data):
                    if made:
                        yield made
        if rest := await self._sounds.finished(sound):
            yield rest


async def _bytes(generation: Generation, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The file itself. An error cuts it short, so that no client takes it for whole."""
    try:
        async for piece in pieces:
            yield piece
    except OmniError as error:
        generation.exchange.note_error(error)
        raise CutShortError from error


async def _events(generation: Generation, pieces: AsyncIterator[bytes], usage: Usage) -> AsyncIterator[bytes]:
    """The file as server-sent events; an error is one, too, in vLLM-Omni's shape."""
    try:
        async for piece in pieces:
            yield _event("speech.audio.delta", {"audio": base64.b64encode(piece).decode()})
        yield _event("speech.audio.done", {"usage": usage.shown_as_input()})
    except OmniError as error:
        generation.exchange.note_error(error)
        yield _event("speech.audio.error", describe(error)[1])


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **body}))
