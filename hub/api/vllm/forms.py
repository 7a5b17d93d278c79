"""No grammar is compiled in the hub: that may take long, and the hub's loop serves everybody.

vLLM's server compiles the form of an answer to check it. Here only what a form asks for is checked; the replica, which
has to compile it anyway, says what else is wrong with it.
"""

from __future__ import annotations

import copy
import json
from contextvars import ContextVar
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output import backend_xgrammar

_compiles: Final = backend_xgrammar.validate_xgrammar_grammar
#: Whether the current context is that of a request to the hub.
_is_hub: Final[ContextVar[bool]] = ContextVar("is_hub", default=False)


def start_http_request() -> None:
    """Have vLLM's server compile nothing in the current context, that of one HTTP request."""
    _is_hub.set(True)


def without_form(params: Any) -> Any:
    """The parameters for vLLM's own check, which would compile the form of the answer."""
    if getattr(params, "structured_outputs", None) is None:
        return params
    bare = copy.copy(params)
    bare.structured_outputs = None
    return bare


def _check_grammar(sampling_params: Any) -> None:
    """In place of vLLM's: raise VLLMValidationError for a schema with parts that xgrammar does not know."""
    if not _is_hub.get():
        _compiles(sampling_params)
        return
    form = sampling_params.structured_outputs
    for text in () if form is None else (form.json, form.structural_tag):
        try:
            schema = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            raise VLLMValidationError(f"the form of the answer is not JSON: {error}") from error
        if text is form.json and isinstance(schema, dict) and _is_unknown(schema):
            raise VLLMValidationError("The provided JSON schema contains features not supported by xgrammar.")


_is_unknown: Final = backend_xgrammar.has_xgrammar_unsupported_json_features
# Its callers import it when they need it.
backend_xgrammar.validate_xgrammar_grammar = _check_grammar
