"""Errors of requests to vLLM-Omni's server: what a hub can't do for it, and what went wrong during an HTTP request."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from fastapi import HTTPException
from vllm.exceptions import VLLMValidationError

from hub.api.errors import NotServedError
from hub.api.vllm.errors import as_vllm_error
from hub.api.vllm.validation import set_handler

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response
    from vllm.exceptions import VLLMError

    from omni_discovery.errors import OmniError


#: What wrong values of a request raise.
_OF_WRONG_VALUES: Final = (ValueError, TypeError, OverflowError, VLLMValidationError)


@dataclass(slots=True)
class AnswerOutcome:
    """What has become so far of the requests to replicas that one HTTP request has led to."""

    #: The first error.
    failure: OmniError | None = None
    #: Whether there has been any.
    has_asked: bool = False
    #: Whether any of them has put anything out.
    has_output: bool = False
    #: What the first stage gets of its chat, if that brings files.
    chat: Mapping[str, Any] = field(default_factory=dict)


_outcome: Final[ContextVar[AnswerOutcome | None]] = ContextVar("outcome", default=None)


def begin_outcome() -> AnswerOutcome:
    """Begin that of the current context's HTTP request."""
    outcome = AnswerOutcome()
    _outcome.set(outcome)
    return outcome


def current_outcome() -> AnswerOutcome:
    """That of the HTTP request which the current task serves; a new one where there is none."""
    return _outcome.get() or AnswerOutcome()


def noted(error: OmniError) -> VLLMError:
    """The error for vLLM-Omni's server, which shows most of them as 500; the hub answers with what is noted here."""
    outcome = current_outcome()
    outcome.failure = outcome.failure or error
    return as_vllm_error(error)


def not_served(what: str) -> VLLMError:
    """The error of what vLLM-Omni's server asks of its engine and a hub can't do."""
    return noted(NotServedError(what))


def blame_wrong_values(app: FastAPI) -> None:
    """Have the application answer 400 where it can't read a request, before any replica is asked: it would say 500."""
    show: Any = app.exception_handlers[HTTPException]

    async def show_blamed(request: Request, error: HTTPException) -> Response:
        is_unread = isinstance(error.__cause__, _OF_WRONG_VALUES) and not current_outcome().has_asked
        if is_unread and error.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            error.status_code = HTTPStatus.BAD_REQUEST
        answer: Response = await show(request, error)
        return answer

    set_handler(app, HTTPException, show_blamed)
