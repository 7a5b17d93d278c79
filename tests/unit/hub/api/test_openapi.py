"""The description of the routes: it has them all, and its schemas take what the routes take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator, ValidationError
from starlette.routing import Route
from starlette.testclient import TestClient

from hub.api.openapi import openapi
from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from tests.support.hub_fakes import ONE_STAGE, deploy_of

DEPLOY = deploy_of(ONE_STAGE)
APP = build_app(AsyncOmni(DEPLOY, "hub-1", None), DEPLOY, 0)
#: For operators' tools, not for clients; and this description itself.
UNDESCRIBED = {"/metrics", "/openapi.json", "/docs"}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    answer = TestClient(APP).get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    return body


def test_every_route_is_described_with_its_method(described: dict[str, Any]) -> None:
    routes = {
        (route.path_format, method.lower())
        for route in APP.routes
        if isinstance(route, Route) and route.path not in UNDESCRIBED
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in described["paths"].items() for method in methods} == routes


def schema_of(described: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of a body, with all that it refers to."""
    content = described["paths"][path]["post"]["requestBody"]["content"]
    (body,) = content.values()
    return {**body["schema"], "components": described["components"]}


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "audio": {"voice": {"id": "a"}, "format": "mp3"}},
            {"messages": "hi"},
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "ignore_eos": True, "n": 2}, {"prompt": "a", "n": 0}),
        ("/v1/audio/speech", {"input": "hi", "voice": "ann", "speed": 2}, {"input": "hi", "speed": 9}),
        ("/v1/images/generations", {"prompt": "a cat", "size": "64x64"}, {"prompt": "a cat", "size": "huge"}),
        ("/v1/images/edits", {"prompt": "a hat", "image": ["a"], "n": 2}, {"prompt": "a hat", "image": []}),
        ("/v1/chat/completions", {"messages": [], "tools": [], "echo": None}, {"messages": [], "tools": [{}]}),
        ("/v1/completions", {"prompt": "a", "best_of": 1, "suffix": ""}, {"prompt": "a", "best_of": 2}),
        ("/v1/images/generations", {"prompt": "a", "quality": "auto"}, {"prompt": "a", "quality": "high"}),
        ("/v1/images/edits", {"prompt": "a", "image": ["a"]}, {"prompt": "a", "image": ["a"], "size": None}),
    ],
)
def test_the_schemas_take_what_the_routes_take(described: dict[str, Any], path: str, good: Any, bad: Any) -> None:
    schema = schema_of(described, path)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(good)
    with pytest.raises(ValidationError):
        Draft202012Validator(schema).validate(bad)


def test_videos_are_described_as_json_and_as_a_form(described: dict[str, Any]) -> None:
    """A form has a file in the place of a URL, and empty texts for what is left out."""
    content = described["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    as_json, as_form = (
        Draft202012Validator({**content[kind]["schema"], "components": described["components"]})
        for kind in ("application/json", "multipart/form-data")
    )
    as_json.validate({"prompt": "a cat", "seconds": 4, "input_reference": {"image_url": "data:image/png;base64,AA"}})
    as_form.validate({"prompt": "a cat", "seconds": "4", "size": "", "input_reference": "file"})
    for wrong in ({"prompt": "a cat", "size": ""}, {"prompt": "a cat", "seconds": 0}, {}):
        assert not as_json.is_valid(wrong)
    for wrong in ({"prompt": ""}, {"prompt": "a cat", "size": "big"}):
        assert not as_form.is_valid(wrong)
    (limit,) = (each for each in described["paths"]["/v1/videos"]["get"]["parameters"] if each["name"] == "limit")
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}


def test_errors_have_openais_body(described: dict[str, Any]) -> None:
    failed = described["paths"]["/v1/completions"]["post"]["responses"]["default"]["content"]["application/json"]
    answer = TestClient(APP).post("/v1/completions", json={"prompt": []})
    Draft202012Validator({**failed["schema"], "components": described["components"]}).validate(answer.json())


def test_patterns_are_anchored_as_json_schemas_have_it() -> None:
    described = msgspec.json.encode(openapi("m"))
    assert b"\\\\A" not in described
    assert b"\\\\Z" not in described
    assert rb"^(auto|[1-9][0-9]{0,2})$" in described
