"""Checks the form of an answer, by our bounds and as vLLM does, and has vLLM not do so again in the engine's thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import check_answer_form
from stage_runtime.engines.errors import is_panic, lacks_memory

#: The name of the mark of a form that was checked, see ``check_form``.
_MARK: Final = "omni_is_checked"


def check_form(params: Any, vllm_config: Any, tokenizer: Any) -> None:
    """Raise InvalidRequestError if the form in ``params``, of SamplingParams, costs too much, or vLLM can't read it.

    vLLM does not check it again, if ``check_forms_once`` was called.
    """
    form = params.structured_outputs
    check_answer_form("structured_outputs", vars(form))
    if form.json is not None and not isinstance(form.json, str):
        # Of an object, vLLM makes copies in the engine's thread.
        form.json = json.dumps(form.json)
    with form_errors(params):
        params.verify(vllm_config.model_config, None, vllm_config.structured_outputs_config, tokenizer)
    setattr(form, _MARK, True)


@contextmanager
def form_errors(params: Any) -> Iterator[None]:
    """Raise InvalidRequestError for what vLLM raises inside: to check a form it uses libraries that raise anything."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        raise InvalidRequestError(str(error)) from error
    except BaseException as error:
        if getattr(params, "structured_outputs", None) is None or not _is_of_form(error):
            raise
        raise InvalidRequestError(f"structured_outputs: the engine can't read this form: {_line(error)}") from error


def check_forms_once() -> None:
    """Have vLLM leave out its own check of a form, which it makes in the engine's thread, behind ``check_form``."""
    from vllm import SamplingParams

    kind: Any = SamplingParams
    check = getattr(kind, "_validate_structured_outputs", None)
    if check is None or hasattr(check, _MARK):
        return

    def check_unless_done(self: Any, *given: Any, **more: Any) -> None:
        if not getattr(self.structured_outputs, _MARK, False):
            check(self, *given, **more)

    setattr(check_unless_done, _MARK, True)
    kind._validate_structured_outputs = check_unless_done  # noqa: SLF001 - there is no public way to it


def _is_of_form(error: BaseException) -> bool:
    return is_panic(error) or (isinstance(error, Exception) and not lacks_memory(error))


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
