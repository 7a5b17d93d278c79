"""GET /openapi.json: what the routes take and give, in OpenAPI 3.1, made of the same classes that check the bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from hub.api.audio.speech import SpeechRequest
from hub.api.chat import schema as chats
from hub.api.cross_origin import FORM
from hub.api.images import schema as images
from hub.api.prompts import completions
from hub.api.videos import schema as videos
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
    #: The fields that are taken only with some values, which ask for nothing; null is always one of them.
    neutral: Mapping[str, Sequence[Any]] = {}
    #: POST for one with a body, GET for others, unless it is said here.
    method: str = ""
    #: The class whose fields are the parameters of its query.
    query: type[msgspec.Struct] | None = None
    #: The name under which the body is described as a form, too; empty for none.
    form: str = ""


_JSON: Final = "application/json"
#: The description of a field that is taken only with values that ask for nothing.
NOT_SERVED: Final = "Not served here: taken only with values that ask for nothing."
#: The parameters of paths, by name: the schema of each, and an example; None for the name of the model.
_IN_PATHS: Final[dict[str, tuple[dict[str, Any], str | None]]] = {
    # A name may have slashes, which are sent as they are or as %2F.
    "model": ({"type": "string"}, None),
    "video_id": ({"type": "string", "pattern": "^video_[0-9a-f]{32}$"}, f"video_{0:032x}"),
}
#: A file in a form.
_FILE: Final = {"type": "string", "format": "binary"}
_EVENTS: Final = "text/event-stream"
_SOUND: Final = ("audio/mpeg", "audio/ogg", "audio/aac", "audio/flac", "audio/wav", "audio/pcm")
_ROUTES: Final = (
    _Described(
        "/v1/chat/completions",
        "Messages in; words, sound, pictures out.",
        chats.ChatRequest,
        (_JSON, _EVENTS),
        {"messages": [{"role": "user", "content": "26 plus 48"}]},
        neutral=chats.NEUTRAL,
    ),
    _Described(
        "/v1/completions",
        "Prompts in, text out.",
        completions.CompletionRequest,
        (_JSON, _EVENTS),
        {"prompt": "26 plus 48", "max_tokens": 20},
        neutral=completions.NEUTRAL,
    ),
    _Described(
        "/v1/images/generations",
        "A prompt in, pictures out.",
        images.ImageRequest,
        (_JSON, _EVENTS),
        {"prompt": "26 plus 48", "n": 1},
        neutral=images.NEUTRAL_DRAWN,
    ),
    _Described(
        "/v1/images/edits",
        "Pictures and a prompt in, as a form; pictures out.",
        images.ImageEdit,
        (_JSON, _EVENTS),
        takes=FORM,
        neutral=images.NEUTRAL_EDITED,
    ),
    _Described(
        "/v1/audio/speech",
        "A text in, its sound out.",
        SpeechRequest,
        (*_SOUND, _EVENTS),
        {"input": "Good morning!", "response_format": "mp3"},
    ),
    _Described(
        "/v1/videos",
        "A prompt in, as JSON or a form; a job out, which makes a video.",
        videos.VideoCreate,
        example={"prompt": "26 plus 48", "num_frames": 8},
        form="VideoForm",
    ),
    _Described("/v1/videos", "The videos of this client, the newest first.", query=videos.VideoQuery),
    _Described(
        "/v1/videos/{video_id}/content", "The file of a video.", None, ("video/mp4",), query=videos.ContentQuery
    ),
    _Described("/v1/videos/{video_id}", "How far a video is."),
    _Described("/v1/videos/{video_id}", "Deletes a video, and stops its making.", method="delete"),
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


def _describe_fields(fields: dict[str, Any], route: _Described) -> None:
    """Say of the fields of a body what its class does not: which values are neutral, and what a form can't have."""
    for name, values in route.neutral.items():
        fields[name] = {"enum": [None, *values], "default": None, "description": NOT_SERVED}
    if route.takes == FORM:
        for name, field in fields.items():
            fields[name] = _without_null(field)
        fields["image"] |= {"items": _FILE}
        fields["mask"] = _FILE


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a text in a form, which is left out and never null."""
    kept = {name: value for name, value in schema.items() if name != "anyOf" and (name, value) != ("default", None)}
    if "enum" in kept:
        kept["enum"] = [value for value in kept["enum"] if value is not None]
    kinds = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return kept | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})


def _form_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A body as a form: no field is null, one that is left out may be empty, and the picture is a file."""
    given = {name: field for name, field in schema["properties"].items() if name not in videos.NOT_IN_FORMS}
    fields = {name: _without_null(field) for name, field in given.items()}
    for name, field in fields.items():
        kinds = field.get("anyOf", [field])
        if name not in schema["required"] and any("pattern" in kind for kind in kinds):
            fields[name] = {"anyOf": [*kinds, {"const": ""}]}
    return {**schema, "title": "VideoForm", "properties": {**fields, "input_reference": _FILE}}


def _in_path(path: str, title: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": schema, "example": example or title}
        for name, (schema, example) in _IN_PATHS.items()
        if f"{{{name}}}" in path
    ]


def _in_query(query: type[msgspec.Struct] | None) -> list[dict[str, Any]]:
    if query is None:
        return []
    fields = msgspec.json.schema(query)["$defs"][query.__name__]["properties"]
    return [{"name": name, "in": "query", "schema": _without_null(field)} for name, field in fields.items()]


def _with_anchors(schema: Any) -> Any:
    """A copy whose patterns have the anchors of JSON schemas, which know neither of Python's own."""
    if isinstance(schema, dict):
        return {
            name: value.replace("\\A", "^").replace("\\Z", "$")
            if name == "pattern" and isinstance(value, str)
            else _with_anchors(value)
            for name, value in schema.items()
        }
    return [_with_anchors(each) for each in schema] if isinstance(schema, list) else schema


def openapi(title: str) -> dict[str, Any]:
    """The document, for the pipeline with this name."""
    bodies = [each.body for each in _ROUTES if each.body is not None]
    references, schemas = msgspec.json.schema_components(
        [*bodies, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    for each in _ROUTES:
        if each.body is not None:
            _describe_fields(schemas[each.body.__name__]["properties"], each)
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
            content = {each.takes: body}
            if each.form:
                schemas[each.form] = _form_of(schemas[each.body.__name__])
                content[FORM] = {"schema": {"$ref": f"#/components/schemas/{each.form}"}}
            described["requestBody"] = {"required": True, "content": content}
        if parameters := [*_in_path(each.path, title), *_in_query(each.query)]:
            described["parameters"] = parameters
        method = each.method or ("get" if each.body is None else "post")
        paths.setdefault(each.path, {})[method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": _with_anchors(paths),
        "components": {
            "schemas": _with_anchors(schemas),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # A key, where the hub asks for one.
        "security": [{}, {"key": []}],
    }
