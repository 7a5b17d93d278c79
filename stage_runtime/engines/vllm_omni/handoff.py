"""The hand-offs of vllm-omni stages: a payload of vLLM-Omni as it is, and what the next stage asks of the stage before.

``{"payload": {...}, "source": {...}}``; of a hand-off in pieces only the first has the source, which the next stage
needs to begin. They come from replicas, not from clients, and are checked all the same: a payload that does not fit
would end the engine in a step, with every other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec import Meta

from omni_discovery.errors import InvalidRequestError

_Ids = list[Annotated[int, Meta(ge=0, lt=1 << 31)]]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The request of the stage before: its prompt, and what it made if that is whole."""

    prompt_token_ids: Annotated[_Ids, Meta(min_length=1, max_length=1 << 20)]
    token_ids: Annotated[_Ids, Meta(max_length=1 << 20)] = []
    text: str = ""
    additional_information: dict[str, Any] | None = None

    def as_output(self, request_id: str) -> Any:
        """In the shape that vLLM-Omni's functions between two stages read."""
        made = SimpleNamespace(
            token_ids=self.token_ids, cumulative_token_ids=self.token_ids, text=self.text, multimodal_output=None
        )
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids,
            finished=True,
            multimodal_output=None,
            outputs=[made],
        )

    def prompt(self) -> dict[str, Any]:
        """The prompt of the request, as its first stage got it."""
        more = {} if self.additional_information is None else {"additional_information": self.additional_information}
        return {"prompt_token_ids": self.prompt_token_ids, **more}


def read_source(handed: Mapping[str, Any]) -> Source:
    """The source in a hand-off, or in its first piece. Raise InvalidRequestError."""
    try:
        return msgspec.convert(handed.get("source"), Source)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the hand-off's source: {error}") from error


class PayloadCheck(Protocol):
    """What a stage takes of the one before it."""

    def check(self, payload: Mapping[str, Any], *, is_first: bool) -> None:
        """Raise InvalidRequestError for a payload, or a piece of one, that the stage would trip over."""


def read_payload(handed: Mapping[str, Any], takes: PayloadCheck | None, *, is_first: bool = True) -> Mapping[str, Any]:
    """The payload in a hand-off or in a piece of it. Raise InvalidRequestError."""
    payload = handed.get("payload")
    if not isinstance(payload, Mapping) or not payload:
        raise InvalidRequestError("the hand-off holds no payload of vLLM-Omni")
    if takes is not None:
        takes.check(payload, is_first=is_first)
    return payload


def pieces_of(handed: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A hand-off's pieces in order: itself, if it is one whole. Raise InvalidRequestError."""
    pieces = handed.get("pieces")
    if pieces is None:
        return [handed]
    if not isinstance(pieces, list) or not pieces or not all(isinstance(each, Mapping) for each in pieces):
        raise InvalidRequestError("the hand-off's pieces are no mappings, or there are none")
    return pieces


def renamed(payload: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A payload with the request's name here: two replicas of the stage before may have given theirs the same one."""
    meta = payload.get("meta")
    if not isinstance(meta, Mapping) or "request_id" not in meta:
        return payload
    return {**payload, "meta": {**meta, "request_id": name}}


def is_terminal(payload: Mapping[str, Any]) -> bool:
    """Whether a payload says that it is the last one."""
    meta = payload.get("meta")
    finished = meta.get("finished") if isinstance(meta, Mapping) else None
    if finished is None or isinstance(finished, bool):
        return bool(finished)
    return hasattr(finished, "numel") and finished.numel() == 1 and bool(finished)


class Codes(msgspec.Struct, frozen=True, kw_only=True):
    """The codes of sound that a decoder takes: ``groups`` books of ``codes`` each."""

    groups: int
    codes: int

    def check(self, payload: Mapping[str, Any], *, is_first: bool) -> None:
        """Raise InvalidRequestError for codes that the decoder would trip over."""
        del is_first
        held = payload.get("codes")
        audio = held.get("audio") if isinstance(held, Mapping) else None
        if audio is None:
            return
        values = audio.flatten().tolist() if hasattr(audio, "flatten") else audio
        if not isinstance(values, list) or any(type(each) is not int for each in values):
            raise InvalidRequestError("the hand-off's codes are whole numbers in one row")
        if len(values) % self.groups:
            raise InvalidRequestError(f"{len(values)} codes can't be shared out to {self.groups} books")
        if values and not 0 <= min(values) <= max(values) < self.codes:
            raise InvalidRequestError(f"a code of the hand-off is out of its book of {self.codes}")


#: The names of stages that take codes, in vLLM-Omni's pipelines.
_DECODERS: Final = ("code2wav",)


def codes_of(model_stage: str | None, hf_config: Any) -> Codes | None:
    """What a decoder of sound takes; None for a stage that is none, or whose model does not say it."""
    if model_stage not in _DECODERS:
        return None
    drawn = getattr(getattr(hf_config, "token2wav_config", None), "dit_config", None)
    if drawn is not None:
        # Its table has one row more than it has codes.
        return Codes(groups=1, codes=int(drawn.num_embeds) + 1)
    talker = getattr(hf_config, "talker_config", None)
    predictor = getattr(talker, "code_predictor_config", None)
    groups, codes = getattr(talker, "num_code_groups", None), getattr(predictor, "vocab_size", None)
    if not groups or not codes:
        return None
    return Codes(groups=int(groups), codes=int(codes))
