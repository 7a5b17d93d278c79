"""What Qwen3-TTS is asked to say, checked before its talker gets it.

The talker reads its text, voice and language from ``additional_information``; the prompt's tokens only hold the places,
of which there must be exactly as many as it will fill. It would look up an unknown voice, or fetch a voice from an
address, in the middle of a step: nothing but the fields below gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.prompts import prompt_text
from stage_runtime.engines.sampling import checked

_Word = Annotated[str, Meta(min_length=1, max_length=64)]
_PLACE: Final = 1


class Utterance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What is said, and how; the names are vLLM-Omni's."""

    text: Annotated[str, Meta(min_length=1, max_length=1 << 16)]
    speaker: _Word | None = None
    language: _Word = "Auto"
    instruct: Annotated[str, Meta(max_length=4096)] = ""
    task_type: Annotated[str, Meta(max_length=64)] = ""
    #: Whether the talker is given all of the text at once; None: as the model's own code does it, which is so.
    non_streaming_mode: bool | None = None
    #: See ``most_tokens``.
    max_new_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None


#: Parameters of a request that are no sampling parameters.
PARAMETERS: Final = ("speaker", "language", "instruct", "task_type")


#: What models are asked to do, by their own ``tts_model_type``.
_TASKS: Final = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}
_KNOWN_VOICES, _DESIGNED_VOICE = "CustomVoice", "VoiceDesign"


def task_of(hf_config: Any) -> str:
    """What the model was made for, by its config: to speak in voices that it knows, or in one that is described."""
    return _TASKS.get(str(getattr(hf_config, "tts_model_type", "") or ""), _KNOWN_VOICES)


def read_speech(
    inputs: Mapping[str, Any], params: Mapping[str, Any], talker: Any, task: str = _KNOWN_VOICES
) -> Utterance:
    """The speech that a client asks for: by ``additional_information``, as vLLM-Omni has it, or by its prompt.

    ``params`` are the request's, in the second place; ``task`` is the model's. Raise InvalidRequestError.
    """
    told = inputs.get("additional_information")
    if told is not None and not isinstance(told, Mapping):
        raise InvalidRequestError("additional_information is a mapping")
    given: dict[str, Any] = {name: params[name] for name in PARAMETERS if params.get(name) is not None}
    given |= {str(name): only_one(name, value) for name, value in (told or {}).items()}
    if "text" not in given:
        given["text"] = prompt_text(inputs)
    speech = checked(given, Utterance)
    if (asked := speech.task_type or task) not in (_KNOWN_VOICES, _DESIGNED_VOICE):
        raise InvalidRequestError(f"task_type: {asked!r} was not tried here; CustomVoice and VoiceDesign were")
    if asked != task:
        raise InvalidRequestError(f"task_type: this model is for {task}, not {asked!r}")
    if task == _DESIGNED_VOICE and not speech.instruct.strip():
        raise InvalidRequestError("instruct: this model speaks in the voice that it describes (HTTP: instructions)")
    # Clients name a voice always; one that is described has no name.
    speaker = _known("speaker", speech.speaker or "", talker.spk_id) if task == _KNOWN_VOICES else None
    language = _known("language", speech.language, {"Auto": 0, **(talker.codec_language_id or {})})
    return msgspec.structs.replace(speech, speaker=speaker, language=language, task_type=task)


def most_tokens(inputs: Mapping[str, Any]) -> int | None:
    """How many tokens ``additional_information`` allows its speech; None if it does not say a number."""
    told = inputs.get("additional_information")
    most = told.get("max_new_tokens") if isinstance(told, Mapping) else None
    most = most[0] if isinstance(most, list | tuple) and len(most) == 1 else most
    return most if type(most) is int and most > 0 else None


def only_one(name: Any, value: Any) -> Any:
    """The value of a list of one, as vLLM-Omni writes them."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise InvalidRequestError(f"additional_information.{name}: one value is right, not {len(value)}")
    return value[0]


def _known(name: str, asked: str, there: Mapping[str, Any]) -> str:
    for each in there:
        if each.lower() == asked.strip().lower():
            return each
    raise InvalidRequestError(f"{name}: this model has {', '.join(sorted(there))}, not {asked!r}")


def prompt_of(speech: Utterance, tokenize: Callable[[str], Sequence[int]], talker: Any) -> dict[str, Any]:
    """The prompt for vLLM-Omni. Raise InvalidRequestError for a text that can't be said."""
    from vllm_omni.model_executor.models.qwen3_tts.prompt_embeds_builder import Qwen3TTSPromptEmbedsBuilder

    fields = msgspec.to_builtins(msgspec.structs.replace(speech, max_new_tokens=None))
    information = {name: [value] for name, value in fields.items()} | {"task_type": [speech.task_type]}
    try:
        places = Qwen3TTSPromptEmbedsBuilder.estimate_prompt_len_from_additional_information(
            information,
            task_type=speech.task_type,
            tokenize_prompt=lambda text: list(tokenize(text)),
            codec_language_id=talker.codec_language_id,
            spk_is_dialect=talker.spk_is_dialect,
        )
    except ValueError as error:
        raise InvalidRequestError(f"the text can't be said: {error}") from error
    return {"prompt_token_ids": [_PLACE] * places, "additional_information": information}
