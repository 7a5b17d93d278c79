"""GET /openapi.json: what the routes take and give, in OpenAPI 3.1, made of the same classes that check the bodies."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from hub.api.audio.speech import SpeechRequest
from hub.api.chat.schema import ChatRequest
from hub.api.images.generations import ImageRequest
from hub.api.prompts.completions import CompletionRequest
from omni_discovery import __version__


class _Described(NamedTuple):
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    #: The types of its answers.
    answers: tuple[str, ...] = ("application/json",)


_EVENTS: Final = "text/event-stream"
_SOUND: Final = ("audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm")
_ROUTES: Final = (
    _Described(
        "/v1/chat/completions",
        "Messages in; words, sound, pictures out.",
        ChatRequest,
        ("application/json", _EVENTS),
    ),
    _Described("/v1/completions", "Prompts in, text out.", CompletionRequest, ("application/json", _EVENTS)),
    _Described("/v1/images/generations", "A prompt in, pictures out.", ImageRequest),
    _Described("/v1/audio/speech", "A text in, its sound out.", SpeechRequest, (*_SOUND, _EVENTS)),
    _Described("/v1/audio/voices", "The voices that the pipeline can speak with."),
    _Described("/v1/models", "The model that is served."),
    _Described("/health", "Whether this hub lives."),
    _Described("/ready", "Whether this hub can serve every stage; 503 if not."),
)


class ErrorDetails(msgspec.Struct):
    """What went wrong, and what to do next."""

    message: str
    type: str
    code: str
    param: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetails


def openapi(title: str) -> dict[str, Any]:
    """The document, for the pipeline with this name."""
    bodies = [each.body for each in _ROUTES if each.body is not None]
    references, schemas = msgspec.json.schema_components(
        [*bodies, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    by_class = dict(zip([*bodies, ErrorBody], references, strict=True))
    failed = {"description": "An error.", "content": {"application/json": {"schema": by_class[ErrorBody]}}}
    paths: dict[str, Any] = {}
    for each in _ROUTES:
        answers: dict[str, Any] = {media_type: {} for media_type in each.answers}
        described: dict[str, Any] = {
            "summary": each.summary,
            "responses": {"200": {"description": "The answer.", "content": answers}, "default": failed},
        }
        if each.body is not None:
            content = {"application/json": {"schema": by_class[each.body]}}
            described["requestBody"] = {"required": True, "content": content}
        paths[each.path] = {"get" if each.body is None else "post": described}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        # A key, where the hub asks for one.
        "security": [{}, {"key": []}],
    }
