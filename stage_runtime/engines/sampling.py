"""Sampling and pooling parameters by their OpenAI and vLLM names, checked before an engine gets them.

They are checked strictly, because a value of the wrong type may pass an engine's own check and crash a later step, and
with it every other request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from omni_discovery.errors import InvalidRequestError
from omni_discovery.inputs.answer_form import MAX_CHOICES, check_answer_form
from omni_discovery.inputs.seeds import SEED_BITS
from omni_discovery.inputs.token_choices import MAX_ALLOWED_TOKENS, check_token_choices
from omni_discovery.wire import MAX_LOGPROBS

_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Fraction = Annotated[float, Meta(ge=0, le=1)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Salt = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"\A[^@/\\\0]*\Z")]
_StopText = Annotated[str, Meta(min_length=1, max_length=256)]
_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_Extra = str | Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)] | float

#: Extra arguments that vLLM itself reads; the stages use them between each other.
_NO_EXTRAS: Final = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")

_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")

_Checked = TypeVar("_Checked")

#: The seed of a picture or a sound.
Seed = Annotated[int, Meta(ge=0, le=(1 << SEED_BITS) - 1)]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The form that an answer must have: one of the first six, as vLLM names them, and how its JSON is written."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When to end an answer that repeats itself: a pattern of so many tokens came ``min_count`` times."""

    max_pattern_size: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    min_count: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


class TokenSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The parameters of a stage that generates tokens. None means the engine's default."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: _Fraction | None = None
    seed: Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)] | None = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=256)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[_TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[_StopText], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    stream_interval: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    watermarking: bool | None = None
    #: Requests share the prefix cache only with those of the same salt, so timing tells nothing of other prompts.
    cache_salt: _Salt | None = None
    #: For logits processors of the operator's own.
    extra_args: Annotated[dict[_Name, _Extra | list[_Extra]], Meta(max_length=64)] | None = None


def token_sampling(params: Mapping[str, Any], *, checks_form: bool = True) -> dict[str, Any]:
    """The parameters of a token request by name; None: not set. Raise InvalidRequestError that names the bad one.

    ``checks_form`` False: what the answer's form may cost is checked elsewhere, which takes up to a tenth of a second.
    """
    given = {name: value for name, value in params.items() if value is not None}
    longest = given.pop("max_completion_tokens", None)
    if longest is not None:
        given["max_tokens"] = longest
    extras = given.get("extra_args")
    for name in extras if isinstance(extras, Mapping) else ():
        if name in _NO_EXTRAS:
            raise InvalidRequestError(f"extra_args.{name}: that is between the stages; leave it out")
    if given.pop("n", 1) != 1:
        raise InvalidRequestError("n: one answer per request is made; send the request again for more")
    check_token_choices(given)
    found = checked(given, TokenSampling)
    if checks_form and found.structured_outputs is not None:
        check_answer_form("structured_outputs", msgspec.structs.asdict(found.structured_outputs))
    return msgspec.structs.asdict(found)


class Pooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The parameters of a stage that pools, as vLLM names them. None means the engine's default."""

    task: Annotated[str, Meta(max_length=64)] | None = None
    dimensions: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    use_activation: bool | None = None
    #: At which token the second of two texts in one prompt begins, for models that want to know.
    compressed_token_type_ids: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    cache_salt: _Salt | None = None


def pooling_asked(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a pooling request that were set, by name. Raise InvalidRequestError that names the bad one."""
    asked = msgspec.structs.asdict(checked(params, Pooling))
    return {name: value for name, value in asked.items() if value is not None}


def checked(given: Mapping[str, Any], kind: type[_Checked]) -> _Checked:
    """The parameters as a struct. Raise InvalidRequestError that names the bad one."""
    try:
        # Keys of a JSON object are text, those of logit_bias mean numbers.
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown = _UNKNOWN.search(text)
        if unknown is not None:
            raise InvalidRequestError(f"the parameter {unknown.group(1)!r} is not known to this stage") from error
        place = _PLACE.search(text)
        name = place.group(1) if place is not None else "parameters"
        raise InvalidRequestError(f"{name}: {_PLACE.sub('', text)}") from error
