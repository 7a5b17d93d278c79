"""GET /openapi.json: what the routes take and give, in OpenAPI 3.1, made of the same classes that check the bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from hub.api.audio.speech import SpeechRequest
from hub.api.chat.schema import ChatRequest
from hub.api.cross_origin import FORM
from hub.api.images.schema import ImageEdit, ImageRequest
from hub.api.prompts.completions import CompletionRequest
from omni_discovery import __version__


class _Described(NamedTuple):
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    #: The types of its answers.
    answers: tuple[str, ...] = ("application/json",)
    #: A body that asks for something.
    example: Mapping[str, Any] | None = None
    #: The type of its body.
    takes: str = "application/json"


_JSON: Final = "application/json"
#: A file in a form.
_FILE: Final = {"type": "string", "format": "binary"}
_EVENTS: Final = "text/event-stream"
_SOUND: Final = ("audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm")
_ROUTES: Final = (
    _Described(
        "/v1/chat/completions",
        "Messages in; words, sound, pictures out.",
        ChatRequest,
        (_JSON, _EVENTS),
        {"messages": [{"role": "user", "content": "26 plus 48"}]},
    ),
    _Described(
        "/v1/completions",
        "Prompts in, text out.",
        CompletionRequest,
        (_JSON, _EVENTS),
        {"prompt": "26 plus 48", "max_tokens": 20},
    ),
    _Described(
        "/v1/images/generations",
        "A prompt in, pictures out.",
        ImageRequest,
        (_JSON, _EVENTS),
        {"prompt": "26 plus 48", "n": 1},
    ),
    _Described(
        "/v1/images/edits",
        "Pictures and a prompt in, as a form; pictures out.",
        ImageEdit,
        (_JSON, _EVENTS),
        takes=FORM,
    ),
    _Described(
        "/v1/audio/speech",
        "A text in, its sound out.",
        SpeechRequest,
        (*_SOUND, _EVENTS),
        {"input": "Good morning!", "response_format": "mp3"},
    ),
    _Described("/v1/audio/voices", "The voices that the pipeline can speak with."),
    _Described("/v1/models", "The model that is served, as a list of one."),
    _Described("/v1/models/{model}", "The model that is served, by its name; 404 for any other."),
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
    files = schemas[ImageEdit.__name__]["properties"]
    files["image"] |= {"items": _FILE}
    files["mask"] = _FILE
    by_class = dict(zip([*bodies, ErrorBody], references, strict=True))
    failed = {"description": "An error.", "content": {_JSON: {"schema": by_class[ErrorBody]}}}
    paths: dict[str, Any] = {}
    for each in _ROUTES:
        answers: dict[str, Any] = {media_type: {} for media_type in each.answers}
        described: dict[str, Any] = {
            "summary": each.summary,
            "responses": {"200": {"description": "The answer.", "content": answers}, "default": failed},
        }
        if each.body is not None:
            body = {"schema": by_class[each.body], **({"example": each.example} if each.example else {})}
            described["requestBody"] = {"required": True, "content": {each.takes: body}}
        if each.path.endswith("{model}"):
            # A name may have slashes, which are sent as they are or as %2F.
            name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": title}
            described["parameters"] = [name]
        paths[each.path] = {"get" if each.body is None else "post": described}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        # A key, where the hub asks for one.
        "security": [{}, {"key": []}],
    }
