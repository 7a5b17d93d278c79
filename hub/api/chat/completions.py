"""POST /v1/chat/completions: messages in, choices out, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from hub.api.chat.answer import StreamedAnswer, WholeAnswer
from hub.api.chat.choices import Choices
from hub.api.chat.schema import ChatRequest, chat_params, parse_chat, refuse_embeddings
from hub.api.generation.fields import with_seed
from hub.api.generation.running import Ask, Came, Generation, Route
from hub.api.generation.usage import Usage
from hub.request.companions import check_number
from omni_discovery.errors import InvalidRequestError, OmniError
from omni_discovery.inputs.media_links import links_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from hub.api.audio.threads import EncoderThreads
    from hub.async_omni import AsyncOmni
    from omni_discovery.deploy.document import DeployConfig


class ChatCompletions:
    """The endpoint, over one AsyncOmni."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig, sounds: EncoderThreads) -> None:
        self._route = Route(omni, deploy, "chatcmpl")
        self._sounds = sounds
        self._links = links_of(deploy.stages[0].engine, deploy.stages[0].engine_args)

    async def respond(self, request: Request) -> Response:
        """Answer one request."""
        return await self._route.answer(request, self._parse, self._answer)

    def _parse(self, body: bytes) -> ChatRequest:
        chat = parse_chat(body, self._links)
        # Here and not for each answer: they may be tens of thousands.
        check_number(chat.companions)
        refuse_embeddings(self._route.deploy.stages, chat.modalities)
        if chat.audio is not None and "audio" not in self._modalities(chat):
            raise InvalidRequestError("'audio' says how sound is put out, and no sound is asked for here: leave it out")
        return chat

    def _modalities(self, chat: ChatRequest) -> set[str]:
        """The modalities of the answer."""
        made = {stage.final_output for stage in self._route.deploy.stages}
        return {each for each in made if chat.modalities is None or each in chat.modalities}

    async def _answer(self, chat: ChatRequest, came: Came) -> Response:
        with self._route.omni.rejections.counted():
            params = chat_params(self._route.deploy, chat)
        companions = {role: {"messages": [{"role": "user", "content": text}]} for role, text in chat.companions.items()}
        inputs, answers = chat.inputs(), chat.n or 1
        asks = [Ask(inputs, with_seed(params, number), chat.modalities, companions) for number in range(answers)]
        stage_ids = [stage.stage_id for stage in self._route.deploy.stages]
        given = (
            *(came.exchange, self._route.model, Choices(self._modalities(chat), answers)),
            *(Usage(stage_ids, answers), self._sounds),
        )
        more: dict[str, Any] = {
            "sound_format": chat.sound_format,
            "top_logprobs": (chat.top_logprobs or 0) if chat.logprobs else None,
        }
        # Ogg draws the number of each stream by chance.
        is_drawn = chat.sound_format == "opus" and "audio" in self._modalities(chat)
        can_resume = bool(chat.stream) and not chat.logprobs and not is_drawn
        generation = self._route.generation(came, chat, asks, can_resume=can_resume)
        if not chat.stream:
            return await self._whole(chat, WholeAnswer(*given, **more), generation)
        counts_each = chat.stream_options is not None and chat.stream_options.continuous_usage_stats
        more |= {"counts_each": counts_each, "progress": generation.progress}
        return await self._streamed(chat, StreamedAnswer(*given, **more), generation)

    async def _whole(self, chat: ChatRequest, answer: WholeAnswer, generation: Generation) -> Response:
        generation.taker = answer.take
        try:
            async for number, output in generation:
                await answer.add(number, output)
        finally:
            await generation.close()
        if generation.has_left:
            return generation.left_response
        body = await answer.body(timings=chat.include_timings)
        return self._route.whole(body, answer.received_at_s, answer.timings_s)

    async def _streamed(self, chat: ChatRequest, answer: StreamedAnswer, generation: Generation) -> Response:
        usage = chat.stream_options is not None and chat.stream_options.include_usage
        events = _events(answer, generation, usage=usage, timings=chat.include_timings)
        return await self._route.streamed(generation, events, answer.take)


async def _events(
    answer: StreamedAnswer,
    generation: Generation,
    *,
    usage: bool,
    timings: bool,
) -> AsyncGenerator[bytes, None]:
    try:
        async for number, output in generation.outputs():
            async for event in answer.events(number, output):
                yield event
        if not generation.has_left:
            answer.check_end()
        if usage or timings:
            yield answer.last(usage=usage, timings=timings)
    except OmniError as error:
        yield generation.event_of_error(error)
    yield b"data: [DONE]\n\n"
