"""What a caller of the Python API gives, as plain values: a prompt, and sampling parameters by stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from omni_discovery.errors import InvalidRequestError

#: Arguments of vLLM's ``generate`` that no replica could follow.
_REFUSED: Final[Mapping[str, str]] = {
    "lora_request": "name the adapter in the parameters of its stage, as {'lora': NAME}",
    "tokenization_kwargs": "the replica tokenizes; give prompt_token_ids for another way to do it",
    "data_parallel_rank": "the hub picks the replica",
    "kv_hints": "a hub can't pass it on",
}
#: Those that change no output: they save an engine work, or are repeated in vLLM's own kind of output.
_WITHOUT_EFFECT: Final = ("prompt_text", "session_id", "reasoning_ended", "reasoning_parser_kwargs", "arrival_time")
#: Fields of vLLM's SamplingParams that say how a front end puts its outputs together.
_OF_FRONT_END: Final = frozenset({"n", "output_kind", "detokenize", "skip_clone", "output_text_buffer_length"})


def inputs_of(prompt: Any) -> Mapping[str, Any]:
    """The input mapping of a text, token ids, chat messages, or a mapping. Raise InvalidRequestError."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) and len(prompt):
        if all(type(item) is int for item in prompt):
            return {"prompt_token_ids": list(prompt)}
        if all(isinstance(item, Mapping) for item in prompt):
            return {"messages": [dict(item) for item in prompt]}
    raise InvalidRequestError(
        "a prompt is a text, a list of token ids, a list of chat messages, or a mapping with one of prompt, "
        f"prompt_token_ids and messages; this is {type(prompt).__name__} {prompt!r:.60}"
    )


def plain_params(asked: Any) -> Mapping[str, Any] | None:
    """The parameters of one stage as a mapping; of a SamplingParams of vLLM's, those that differ from its defaults.

    Raise InvalidRequestError for anything else, and for several answers to one request.
    """
    if asked is None or isinstance(asked, Mapping):
        return asked
    names = getattr(asked, "__struct_fields__", None)
    if not names:
        raise InvalidRequestError(
            f"the parameters of a stage are a mapping, vLLM's SamplingParams, or None; not {type(asked).__name__}"
        )
    if getattr(asked, "n", 1) != 1:
        raise InvalidRequestError("n: one answer for each call of generate; call it once for each")
    usual = type(asked)()
    own = [name for name in names if not name.startswith("_") and name not in _OF_FRONT_END]
    return {name: getattr(asked, name) for name in own if getattr(asked, name) != getattr(usual, name)}


def arranged(request_id: Any, each: Any, one: Any) -> tuple[str | None, Sequence[Mapping[str, Any] | None] | None]:
    """The id of a request and the parameters of its stages, from ``generate``'s second and third place and keywords.

    Both orders are understood: the id first, or as vLLM's EngineClient has them, the parameters. ``one`` are those of
    the first stage. Raise InvalidRequestError.
    """
    if request_id is not None and not isinstance(request_id, str):
        if not isinstance(each, str | None):
            raise InvalidRequestError("generate takes a prompt, a request_id (text), then sampling_params_list")
        request_id, one, each = each, request_id, None
    if isinstance(one, Sequence) and not isinstance(one, str):
        each, one = one if each is None else each, None
    if one is not None and each is not None:
        raise InvalidRequestError("give sampling_params or sampling_params_list, not both")
    if one is not None:
        each = [one]
    if each is None:
        return request_id, None
    if isinstance(each, str | Mapping) or not isinstance(each, Sequence):
        raise InvalidRequestError("sampling_params_list has one entry for each stage; for one stage: sampling_params")
    return request_id, [plain_params(params) for params in each]


def check_unread(more: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for an argument of vLLM's that can't be followed, TypeError for any other."""
    for name, value in more.items():
        if name not in _REFUSED and name not in _WITHOUT_EFFECT:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        if name in _REFUSED and value is not None:
            raise InvalidRequestError(f"{name}: {_REFUSED[name]}")
