"""What vLLM's server makes of a wrong body is bounded: by itself, it would write an error for each wrong element.

A single wrong item of a conversation is 233 errors, one for each kind of item that it might have been. Here a list or
a mapping is given up at its first wrong element, whichever field of whichever model it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import SchemaValidator

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

#: Packages whose models are read from bodies.
_PACKAGES: Final = ("vllm.", "vllm_omni.")
#: Kinds of pydantic's schemas that can stop at their first wrong element.
_CONTAINERS: Final = frozenset({"list", "tuple", "set", "frozenset", "generator", "dict"})
#: Parts of a schema that hold none.
_NO_SCHEMAS: Final = frozenset({"serialization", "metadata", "default"})
#: Errors of one body that are shown, and characters of a message or a name in them.
_MOST_ERRORS: Final = 10
_MOST_CHARACTERS: Final = 300


def stop_at_first_errors() -> None:
    """Have all request models that are imported by now stop at the first wrong element of a list or mapping.

    To be called before an application is built of them: it keeps the validators that it finds.
    """
    for model in set(_models_below(BaseModel)):
        if model.__module__.startswith(_PACKAGES):
            if not model.__pydantic_complete__:
                model.model_rebuild()
            model.__pydantic_validator__ = _stopping_validator(model.__pydantic_core_schema__)


def stop_in_routes(app: FastAPI) -> None:
    """The same for the bodies of an application's routes: one of several models has a validator of its own."""
    for route in app.routes:
        waiting = [route.dependant] if isinstance(route, APIRoute) else []
        while waiting:
            dependant = waiting.pop()
            waiting += dependant.dependencies
            for field in dependant.body_params:
                adapter: Any = field._type_adapter  # noqa: SLF001 - FastAPI has no other way to it
                adapter.validator = _stopping_validator(adapter.core_schema)


def shorten_errors(app: FastAPI) -> None:
    """Have the application show a few errors of a body, without what was wrong where that is long.

    The server would write the whole list or text, again for each error.
    """
    show: Any = app.exception_handlers[RequestValidationError]

    async def show_shortened(request: Request, error: RequestValidationError) -> Response:
        short = [_shortened(each) for each in error.errors()[:_MOST_ERRORS]]
        answer: Response = await show(request, RequestValidationError(short, body=None))
        return answer

    set_handler(app, RequestValidationError, show_shortened)


def set_handler(app: FastAPI, kind: type[Exception], handler: Any) -> None:
    """Have an application show errors of a kind otherwise."""
    app.exception_handlers[kind] = handler
    # The server's application has read its handlers by now; it reads them again at its first request.
    app.middleware_stack = None


def _stopping_validator(schema: Any) -> SchemaValidator:
    # Without those of its parts, which do not stop.
    return SchemaValidator(_stopping(schema, {}), _use_prebuilt=False)


def _models_below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        yield each
        yield from _models_below(each)


def _stopping(part: Any, made: dict[int, Any]) -> Any:
    """A copy of a part of a schema, whose containers stop; ``made``: the copies so far, by the part's id."""
    if isinstance(part, list | tuple):
        return type(part)(_stopping(each, made) for each in part)
    if not isinstance(part, dict):
        return part
    if id(part) not in made:
        copy = made[id(part)] = {}
        kind = part.get("type")
        # Other mappings hold the fields of a model by their names, of which one may be ``type``.
        is_schema = isinstance(kind, str)
        for name, value in part.items():
            copy[name] = value if is_schema and name in _NO_SCHEMAS else _stopping(value, made)
        if is_schema and kind in _CONTAINERS:
            copy["fail_fast"] = True
    return made[id(part)]


def _shortened(error: Any) -> dict[str, Any]:
    place = tuple(each[:_MOST_CHARACTERS] if isinstance(each, str) else each for each in error["loc"])
    short = {"type": error["type"], "loc": place, "msg": str(error["msg"])[:_MOST_CHARACTERS]}
    given = error.get("input")
    if isinstance(given, bool | int | float | None) or (isinstance(given, str) and len(given) <= _MOST_CHARACTERS):
        short["input"] = given
    # The server looks there for which field is wrong.
    cause = (error.get("ctx") or {}).get("error")
    return short if cause is None else {**short, "ctx": {"error": cause}}
