"""What a thinker and the talker behind it agree on, in Qwen2.5-Omni and Qwen3-Omni. Pure.

A talker fills as many places as its thinker's prompt has, and Qwen3's finds the turns of the chat in it. What does not
fit would end the engine in a step, with every other request: it is refused here, in the thinker's replica as the
client's mistake, in the talker's as a bad hand-off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.handoffs import check_sound
from stage_runtime.engines.vllm_omni.handoff import MOST_IDS, check_count, check_parts

#: By the model type of vLLM-Omni's pipeline: models in which a thinker's hidden states are spoken by a talker.
OMNI: Final = ("qwen2_5_omni", "qwen3_omni_moe")
#: Those, and models of which the thinker alone is served: chats with pictures, sound and videos.
THINKERS: Final = (*OMNI, "qwen2_5_omni_thinker_only", "qwen3_omni_moe_thinker_only")


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens by which a chat is told from other text: what begins a turn, and the roles behind it."""

    begin: int
    roles: tuple[int, ...]
    assistant: int

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequestError for a prompt that is no chat with the assistant's turn at its end."""
        if token_ids.count(self.begin) > _MOST_TURNS:
            raise InvalidRequestError(f"this model speaks the answers of chats of up to {_MOST_TURNS} messages")
        begins = [at for at, token_id in enumerate(token_ids) if token_id == self.begin]
        roles = [token_ids[at + 1] for at in begins if at + 1 < len(token_ids)]
        is_chat = len(begins) == len(roles) > 1 and set(roles) <= set(self.roles) and roles[-1] == self.assistant
        if not is_chat or len(token_ids) - begins[-1] < _SHORTEST_TURN:
            raise InvalidRequestError(
                "this model speaks the answers of chats alone: give messages, of the roles system, user and assistant,"
                " or a prompt in the model's own marks that ends with the beginning of the assistant's turn"
            )


#: vLLM-Omni goes through them one by one, in the engine's thread.
_MOST_TURNS: Final = 4096
#: What begins it, the role, and the end of that line.
_SHORTEST_TURN: Final = 3


class Talker(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model's talker."""

    #: The size of the thinker's hidden states.
    hidden_size: int
    #: How many tokens the thinker knows.
    vocabulary: int
    #: The turns that it looks for; None for a talker that takes any prompt.
    turns: Turns | None = None
    #: The voices that a request may ask for; the first is the usual one.
    voices: tuple[str, ...]
    #: How many hidden states a thinker can have made for one request.
    most: int = MOST_IDS

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raise InvalidRequestError for a prompt whose answer can't be spoken."""
        if self.turns is not None:
            self.turns.check(token_ids)

    def voice(self, asked: Any) -> str:
        """The voice of that name, whatever its case. Raise InvalidRequestError if the model has none."""
        name = asked.strip().lower() if isinstance(asked, str) else ""
        found = next((voice for voice in self.voices if voice.lower() == name), None)
        if found is None:
            raise InvalidRequestError(f"speaker: this model has {', '.join(self.voices)}, not {asked!r}")
        return found

    def check(self, payload: Mapping[str, Any], *, is_first: bool) -> None:
        """Raise InvalidRequestError for hidden states, or a piece of them, that the talker would trip over."""
        check_parts(payload, _OF_TALKERS)
        speaker = payload.get("speaker")
        for name in speaker if isinstance(speaker, list) else [speaker] if speaker else []:
            self.voice(name)
        embed, hidden, ids = (_part(payload, name) for name in ("embed", "hidden_states", "ids"))
        self._check_forms(embed, hidden, ids)
        if not is_first:
            self._check_later(embed)
            return
        prompt = self._token_ids(ids.get("prompt"), "ids.prompt")
        self.check_prompt(prompt)
        rows = self._rows(embed.get("prefill"), "embed.prefill", least=len(prompt))
        if self.turns is None:
            self._rows(hidden.get("output"), "hidden_states.output", least=1)
            spoken = self._token_ids(ids.get("output"), "ids.output")
            if rows != len(prompt) or not spoken:
                raise InvalidRequestError(f"the hand-off's embed.prefill has {rows} rows, its prompt {len(prompt)}")
            return
        self._rows(hidden.get("output"), "hidden_states.output", least=rows)
        if len(self._token_ids(ids.get("all"), "ids.all")) < len(prompt):
            raise InvalidRequestError("the hand-off's ids.all is shorter than its prompt")
        if any(embed.get(name) is None for name in _MARKS):
            raise InvalidRequestError(f"the hand-off's embed lacks one of {', '.join(_MARKS)}")

    def fitted(self, payload: Mapping[str, Any], dtype: Any) -> Mapping[str, Any]:
        """A payload with its floats in the model's own type: the talker multiplies them by its weights as they come.

        Raise InvalidRequestError for those that are none in it.
        """
        fitted = dict(payload)
        for part in ("embed", "hidden_states"):
            held = dict(_part(payload, part))
            for name, value in held.items():
                if _is_floats(value) and value.dtype != dtype:
                    held[name] = value.to(dtype)
                    check_sound(held[name], f"the hand-off's {part}.{name}")
            if held:
                fitted[part] = held
        return fitted

    def _check_later(self, embed: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for more than one step of the thinker in a later piece: a step takes up one row."""
        if embed.get("prefill") is not None:
            raise InvalidRequestError("the hand-off's embed.prefill comes in the first piece alone")
        decode = embed.get("decode")
        if decode is not None and len(decode) != 1:
            raise InvalidRequestError(f"the hand-off's embed.decode has {len(decode)} rows; a later piece has one")

    def _check_forms(self, embed: Mapping[str, Any], hidden: Mapping[str, Any], ids: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for anything in a payload that has not its form, be it needed there or not."""
        for part, held in (("embed", embed), ("hidden_states", hidden), ("ids", ids)):
            for name, value in held.items():
                if value is None:
                    continue
                if part == "ids":
                    self._token_ids(value, f"{part}.{name}")
                elif name in _MARKS:
                    self._check_mark(value, f"{part}.{name}")
                elif name.endswith(_SHAPE):
                    _check_shape(value, f"{part}.{name}")
                else:
                    self._rows(value, f"{part}.{name}", least=1)
                    check_sound(value, f"the hand-off's {part}.{name}")

    def _token_ids(self, value: Any, name: str) -> Sequence[int]:
        check_count(value, name)
        # vLLM-Omni adds to these lists, so that a tensor of the same numbers would end it.
        if isinstance(value, list) and set(map(type, value)) <= {int}:
            token_ids: list[int] = value
            if not token_ids or 0 <= min(token_ids) <= max(token_ids) < self.vocabulary:
                return token_ids
        raise InvalidRequestError(f"the hand-off's {name} must be token ids in a list, below {self.vocabulary}")

    def _check_mark(self, value: Any, name: str) -> None:
        check_count(value, name, self.most)
        shape = tuple(getattr(value, "shape", ()))
        if not _is_floats(value) or len(shape) != _DIMENSIONS + 1 or not shape[0] or shape[1:] != (1, self.hidden_size):
            raise InvalidRequestError(
                f"the hand-off's {name} must be floats of the shape (1 or more, 1, {self.hidden_size});"
                f" it is {_described(value)}"
            )
        check_sound(value, f"the hand-off's {name}")

    def _rows(self, value: Any, name: str, *, least: int) -> int:
        """How many hidden states a tensor holds. Raise InvalidRequestError if it is none, or has too few."""
        check_count(value, name, self.most)
        shape = tuple(getattr(value, "shape", ()))
        is_table = _is_floats(value) and len(shape) == _DIMENSIONS
        if not is_table or shape[-1] != self.hidden_size or shape[0] < least:
            raise InvalidRequestError(
                f"the hand-off's {name} must be floats of the shape ({least} or more, {self.hidden_size});"
                f" it is {_described(value)}"
            )
        return int(shape[0])


#: By how much a model's context may be longer than its config says.
_STRETCHED: Final = 4
#: Of a table of hidden states.
_DIMENSIONS: Final = 2
#: The marks of speech, one for each step of the thinker, all the same; and how the names of shapes end.
_MARKS: Final = ("tts_bos", "tts_eos", "tts_pad")
_SHAPE: Final = "_shape"
_FLOATS: Final = frozenset(("torch.float32", "torch.float16", "torch.bfloat16"))
#: What a thinker hands over, by part of its payload.
_OF_TALKERS: Final = {
    "embed": frozenset(("prefill", "prefill_shape", "decode", "tts_bos", "tts_eos", "tts_pad")),
    "hidden_states": frozenset(("output", "output_shape")),
    "ids": frozenset(("prompt", "all", "output")),
}


def _is_floats(value: Any) -> bool:
    """Whether it is a tensor of floats as models have them."""
    return hasattr(value, "is_floating_point") and str(value.dtype) in _FLOATS


def _described(value: Any) -> str:
    shape = tuple(getattr(value, "shape", ()))
    return f"{value.dtype} of {shape}" if shape else type(value).__name__


def _check_shape(value: Any, name: str) -> None:
    if not isinstance(value, list) or len(value) > _DIMENSIONS + 1 or not all(type(each) is int for each in value):
        raise InvalidRequestError(f"the hand-off's {name} must be a few whole numbers in a list")


def _part(payload: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = payload.get(name)
    return part if isinstance(part, Mapping) else {}


def talker_of(kind: str, hf_config: Any) -> Talker | None:
    """The talker of a model; None for a pipeline without one behind a thinker."""
    if kind not in OMNI:
        return None
    text = hf_config.thinker_config.text_config
    hidden_size, vocabulary = int(text.hidden_size), int(text.vocab_size)
    # Positions may be stretched.
    most = _STRETCHED * int(text.max_position_embeddings)
    if kind == "qwen2_5_omni":
        # vLLM-Omni sets its voice once for the whole process.
        return Talker(hidden_size=hidden_size, vocabulary=vocabulary, voices=("Chelsie",), most=most)
    turns = Turns(
        begin=int(hf_config.im_start_token_id),
        roles=tuple(int(getattr(hf_config, f"{role}_token_id")) for role in ("system", "user", "assistant")),
        assistant=int(hf_config.assistant_token_id),
    )
    voices = tuple(getattr(hf_config.talker_config, "speaker_id", None) or ("default",))
    return Talker(hidden_size=hidden_size, vocabulary=vocabulary, turns=turns, voices=voices, most=most)
