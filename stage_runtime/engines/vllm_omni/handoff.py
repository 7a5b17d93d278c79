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

#: Frames of sound: more than any hand-off has.
_Frames = Annotated[int, Meta(ge=0, le=1 << 24)]
_META: Final = "meta"
#: Parts of a payload that are no tensors: who speaks, and how.
_TEXTS: Final = ("speaker", "language")
_LONGEST_TEXT: Final = 1 << 16
#: Token ids of one payload, or piece of one: more than any thinker reads and says.
MOST_IDS: Final = 1 << 19
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


class _PayloadMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the stages that were run say of a payload beside its tensors. vLLM-Omni reads more, and believes it all."""

    finished: bool | None = None
    is_segment_finished: bool | None = None
    request_id: Annotated[str, Meta(max_length=1024)] | None = None
    left_context_size: _Frames | None = None
    ref_context_size: _Frames | None = None
    ref_context_request_id: Annotated[str, Meta(max_length=1024)] | None = None
    ref_context_included: bool | None = None


def check_parts(payload: Mapping[str, Any], tensors: Mapping[str, frozenset[str]]) -> _PayloadMeta:
    """What a payload says of itself. Raise InvalidRequestError for anything else than these parts of it.

    What no stage hands over is not taken: vLLM-Omni keeps its own state of a request under the same names.
    """
    for name, part in payload.items():
        if name in _TEXTS:
            words = part if isinstance(part, list) else [part]
            if len(words) > 1 or not all(isinstance(each, str) and len(each) <= _LONGEST_TEXT for each in words):
                raise InvalidRequestError(f"the hand-off's {name} is a short text, or a list of one")
        elif name != _META and not (name in tensors and isinstance(part, Mapping) and part.keys() <= tensors[name]):
            raise InvalidRequestError(f"the hand-off's part {str(name)[:80]!r} is none that the stage before makes")
    given = payload.get(_META, {})
    if not isinstance(given, Mapping):
        raise InvalidRequestError("the hand-off's meta is no mapping")
    try:
        meta = msgspec.convert({name: _flag(value) for name, value in given.items()}, _PayloadMeta)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequestError(f"the hand-off's meta: {error}") from error
    if meta.is_segment_finished and not meta.finished:
        # It would forget what it has of the request, which goes on.
        raise InvalidRequestError("the hand-off's meta: is_segment_finished, and it is not the last piece")
    return meta


def check_count(values: Any, name: str, most: int = MOST_IDS) -> None:
    """Raise InvalidRequestError for more values in a row than the stage takes, before they are looked at."""
    if hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0 and len(values) > most:
        raise InvalidRequestError(f"the hand-off's {name} are {len(values)} numbers; at most {most} are taken")


def _flag(value: Any) -> Any:
    """A flag, which vLLM-Omni keeps in a tensor; any other value as it is."""
    return bool(value) if hasattr(value, "numel") and value.numel() == 1 else value


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


def code_count(payload: Mapping[str, Any]) -> int:
    """How many codes of sound a payload holds."""
    held = payload.get("codes")
    audio: Any = held.get("audio") if isinstance(held, Mapping) else None
    if hasattr(audio, "numel"):
        return int(audio.numel())
    return len(audio) if isinstance(audio, list) else 0


class Codes(msgspec.Struct, frozen=True, kw_only=True):
    """The codes of sound that a decoder takes: ``groups`` books of ``codes`` each, at most so many at once."""

    groups: int
    codes: int
    most: int = MOST_IDS

    def check(self, payload: Mapping[str, Any], *, is_first: bool) -> None:
        """Raise InvalidRequestError for codes that the decoder would trip over."""
        meta = check_parts(payload, _OF_DECODERS)
        held = payload.get("codes")
        audio = held.get("audio") if isinstance(held, Mapping) else None
        frames = 0 if audio is None else self._frames(audio)
        left, reference = meta.left_context_size or 0, meta.ref_context_size or 0
        if left > frames:
            raise InvalidRequestError(f"the hand-off's meta: left_context_size is {left} of {frames} frames")
        # A decoder reads the reference from the first frames that it gets, and wants to hear nothing more of it. One
        # that gets nothing else ends its engine.
        if reference and not (is_first and meta.ref_context_included and reference < frames):
            raise InvalidRequestError(
                f"the hand-off's meta: ref_context_size is {reference}, and the first piece has to begin with these and"
                " go on behind them"
            )

    def _frames(self, audio: Any) -> int:
        if getattr(audio, "ndim", 1) != 1:
            raise InvalidRequestError("the hand-off's codes are whole numbers in one row")
        check_count(audio, "codes", self.most)
        values = audio.tolist() if hasattr(audio, "tolist") else audio
        if not isinstance(values, list) or not set(map(type, values)) <= {int}:
            raise InvalidRequestError("the hand-off's codes are whole numbers in one row")
        if len(values) % self.groups:
            raise InvalidRequestError(f"{len(values)} codes can't be shared out to {self.groups} books")
        if values and not 0 <= min(values) <= max(values) < self.codes:
            raise InvalidRequestError(f"a code of the hand-off is out of its book of {self.codes}")
        return len(values) // self.groups


_OF_DECODERS: Final = {"codes": frozenset(("audio",))}
#: The names of stages that take codes, in vLLM-Omni's pipelines.
_DECODERS: Final = ("code2wav",)


def codes_of(model_stage: str | None, hf_config: Any, most: int = MOST_IDS) -> Codes | None:
    """What a decoder of sound takes; None for a stage that is none, or whose model does not say it."""
    if model_stage not in _DECODERS:
        return None
    drawn = getattr(getattr(hf_config, "token2wav_config", None), "dit_config", None)
    if drawn is not None:
        # Its table has one row more than it has codes.
        return Codes(groups=1, codes=int(drawn.num_embeds) + 1, most=most)
    talker = getattr(hf_config, "talker_config", None)
    predictor = getattr(talker, "code_predictor_config", None)
    groups, codes = getattr(talker, "num_code_groups", None), getattr(predictor, "vocab_size", None)
    if not groups or not codes:
        return None
    return Codes(groups=int(groups), codes=int(codes), most=most)
